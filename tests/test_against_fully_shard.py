"""The promise of DESIGN, invariant 7: bit for bit `fully_shard` on two ranks, close on more."""

import cases
import pytest
import torch

from fsdp_fx import fsdp_compile

STEPS = 20


def train(step, model, optimizer):
    """20 steps with warm-up; (losses, norms) per step, final state, RNG state."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10))
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    history = []
    for i in range(STEPS):
        loss, norm = step(*cases.tokens(i))
        scheduler.step()
        history.append((loss.item(), cases.full(norm).item()))
    return history, cases.snapshot(model, optimizer), torch.get_rng_state()


def both(name):
    """Trains the same GPT eagerly and compiled; returns what a test needs to compare them."""
    make = cases.OPTIMIZERS[name]
    eager = cases.eager_sharded(cases.gpt())
    optimizer = make(eager.parameters())
    eager_step = cases.clipped_step(optimizer)
    expected = train(lambda *batch: eager_step(eager, *batch), eager, optimizer)
    model = cases.gpt()
    optimizer = make(model.parameters())
    step = fsdp_compile(cases.clipped_step(optimizer), model)
    got = train(step, model, optimizer)
    return {
        "losses": [e == g for e, g in zip(expected[0], got[0], strict=True)],
        "worst": max(
            abs(e - g) / abs(e) for es, gs in zip(expected[0], got[0], strict=True) for e, g in zip(es, gs, strict=True)
        ),
        "state": cases.differences(expected[1], got[1]),
        "parameter_error": max(
            ((expected[1][n] - got[1][n]).norm() / expected[1][n].norm()).item() for n, _ in model.named_parameters()
        ),
        "rng": torch.equal(expected[2], got[2]),
        "traces": len(step.traces),
        "fell": got[0][-1][0] < got[0][0][0],
        "first_loss": got[0][0][0],
    }


@pytest.mark.parametrize("name", list(cases.OPTIMIZERS))
def test_two_ranks_are_bitwise_equal(ranks, name):
    results = ranks(2, both, name)
    for result in results:
        assert all(result["losses"])
        assert result["state"] == []
        assert result["rng"]
        assert result["fell"]
        assert result["traces"] == (2 if name == "momentum" else 1)
    assert results[0]["first_loss"] != results[1]["first_loss"], "ranks must have different batches"


@pytest.mark.parametrize("name", ["adamw_large_eps", "sgd", "momentum"])
def test_four_ranks_are_close(ranks, name):
    for result in ranks(4, both, name):
        assert result["worst"] < 1e-6
        assert result["parameter_error"] < 1e-6
        assert result["rng"]


def test_world_of_one_is_bitwise_equal(ranks):
    (result,) = ranks(1, both, "adamw")
    assert all(result["losses"])
    assert result["state"] == []
