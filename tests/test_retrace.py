"""What is traced anew, what never is, and what ranks with different batches do."""

import copy
import logging

import cases
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_fx import fsdp_compile


def schedule_for_50_steps():
    model = cases.gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fsdp_compile(cases.clipped_step(optimizer), model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50)  # moves lr and betas
    rates = []
    for i in range(50):
        before = cases.full(model.emb.weight.detach()).clone()
        step(*cases.tokens(i))
        rates.append((optimizer.param_groups[0]["lr"], (cases.full(model.emb.weight) - before).abs().max().item()))
        if i < 49:
            scheduler.step()
    return step.traces, rates


def test_a_scheduler_never_retraces(ranks):
    traces, rates = ranks(2, schedule_for_50_steps)[0]
    assert traces == ["first call"]
    assert len({rate for rate, _ in rates}) > 40
    # Adam's largest update follows the learning rate of the very same step.
    assert all(0.1 * rate < update < 10 * rate for rate, update in rates)


def numpy_rates():
    """A schedule that makes numpy floats, as many do."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: np.float64(1 / (i + 1)) if i % 2 else 1.0)

    def train_step(model, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = fsdp_compile(train_step, model)
    kinds = set()
    for _ in range(6):
        step(torch.ones(2, 3))
        kinds.add(type(optimizer.param_groups[0]["lr"]).__name__)
        scheduler.step()
    return step.traces, kinds


def test_rates_that_are_numpy_floats(ranks):
    traces, kinds = ranks(2, numpy_rates)[0]
    assert kinds == {"float", "float64"}
    assert traces == ["first call"]


def new_shapes():
    model = cases.gpt(layers=1, p=0.0)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fsdp_fx").addHandler(handler)
    step = fsdp_compile(cases.clipped_step(optimizer), model)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i, length in enumerate([8, 8, 12, 8, 12, 12]):
        step(*cases.tokens(i, t=length))
        mean_step(reference, expected, *cases.tokens(i, t=length))
    logging.getLogger("fsdp_fx").removeHandler(handler)
    return step.traces, records, distance(reference, model)


def mean_step(model, optimizer, x, y, max_norm=1.0):
    """One process's step on gradients averaged over ranks: what sharded training must equal."""
    loss = cases.loss_of(model, x, y)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def distance(reference, model):
    return max(
        (p - cases.full(q)).abs().max().item() for p, q in zip(reference.parameters(), model.parameters(), strict=True)
    )


def test_a_new_shape_is_traced_once(ranks):
    for rank, (traces, records, error) in enumerate(ranks(2, new_shapes)):
        assert len(traces) == 2
        assert "shape [2, 8] -> [2, 12]" in traces[1]
        # A retrace is a warning, once; the other ranks log it as information, which is off by default.
        assert any("tracing 'train_step': shapes" in text for text in records) == (rank == 0)
        assert error < 1e-5


def different_lengths():
    rank = dist.get_rank()
    model = cases.gpt(layers=1, p=0.0)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fsdp_compile(cases.clipped_step(optimizer), model)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    lengths = [[8, 8, 16, 8], [12, 16, 16, 20]][rank]  # ranks retrace at different calls
    for i, length in enumerate(lengths):
        step(*cases.tokens(i, t=length))
        mean_step(reference, expected, *cases.tokens(i, t=length))
    return len(step.traces), distance(reference, model)


def test_ranks_with_different_lengths(ranks):
    (first, first_error), (second, second_error) = ranks(2, different_lengths)
    assert (first, second) == (2, 3)
    assert max(first_error, second_error) < 1e-5


def guards():
    """Each change on its own, back and forth: traced once, found again later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model, x, scale=1.0):
        loss = model(x).sum() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = fsdp_compile(train_step, model)
    x = torch.ones(3, 4)
    counts = []

    def call(*args, **kwargs):
        step(*args, **kwargs)
        counts.append(len(step.traces))

    call(x)
    model.eval()
    call(x)
    model.train()
    call(x)
    call(x, 2.0)
    call(x, scale=1.0)
    model[0].bias.requires_grad_(False)
    call(x)
    model[0].bias.requires_grad_(True)
    call(x)
    optimizer.param_groups[0]["lr"] = 0.05
    call(x)
    optimizer.param_groups[0]["nesterov"] = False
    call(x)
    optimizer.param_groups[0]["maximize"] = True
    call(x)
    with torch.autocast("cpu", torch.bfloat16):
        call(x)
    return counts, step.traces


def test_guards(ranks):
    counts, traces = ranks(2, guards)[0]
    assert counts == [1, 2, 2, 3, 4, 5, 5, 5, 5, 6, 7]
    assert traces[1] == "train()/eval() flags changed"
    assert "structure of the arguments" in traces[2]
    assert "requires_grad flags changed" in traces[4]
    assert "param groups of SGD changed" in traces[5]


def weight_decay_crosses_zero():
    model = nn.Linear(4, 4)
    reference = copy.deepcopy(model)

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.0)

        def train_step(model, x):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return optimizer, train_step

    expected, eager = make(reference)
    optimizer, train_step = make(model)
    step = fsdp_compile(train_step, model)
    for decay in [0.0, 0.1, 0.3, 0.0]:
        expected.param_groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"] = decay
        eager(reference, torch.ones(2, 4))
        step(torch.ones(2, 4))
    return step.traces, distance(reference, model)


def test_a_hyperparameter_that_python_branches_on(ranks):
    traces, error = ranks(2, weight_decay_crosses_zero)[0]
    assert len(traces) == 2  # one graph with decay, one without, both found again
    assert "hyperparameter crossed a condition" in traces[1]
    assert error < 1e-6


def new_optimizer():
    model = nn.Linear(4, 4)
    holder = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def train_step(model, x):
        model(x).sum().backward()
        holder["optimizer"].step()
        holder["optimizer"].zero_grad()

    step = fsdp_compile(train_step, model)
    step(torch.ones(2, 4))
    holder["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    before = cases.full(model.weight.detach()).clone()
    step(torch.ones(2, 4))
    return step.traces, torch.equal(before, cases.full(model.weight))


def test_an_optimizer_put_in_the_place_of_another(ranks):
    traces, unchanged = ranks(2, new_optimizer)[0]
    assert unchanged  # the new one's lr of 0 counts
    assert "an optimizer of the step no longer exists" in traces[1]
