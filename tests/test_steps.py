"""Ordinary variations of a step on two ranks, against one process's step on gradients averaged over the ranks."""

import copy
import dataclasses

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_fx import CaptureError, fsdp_compile


def data(i):
    generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
    return torch.randn(6, 5, generator=generator)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))  # 7 and 3 rows: padded on two ranks


def loss_of(model, x):
    return model(x).pow(2).mean()


def average(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def nothing(model):
    pass


def compare(build, make_step, steps=4, tolerance=1e-5):
    """Trains a copy eagerly (make_step gets `average` to call after each backward) and compiled (`nothing`)."""
    model = build()
    reference = copy.deepcopy(model)
    eager = make_step(reference, average)
    step = fsdp_compile(make_step(model, nothing), model)
    for i in range(steps):
        expected, got = eager(reference, data(i)), step(data(i))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for (name, p), (_, q) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(p, cases.full(q), rtol=tolerance, atol=tolerance), name
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(cases.full(q.grad), p.grad, rtol=1e-4, atol=1e-5)
    for (name, b), (_, c) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(c, b, msg=name)
    return step


def stepping(optimizer, reduce=nothing):
    """The ordinary step: backward, step, zero_grad."""

    def train_step(model, x):
        loss = loss_of(model, x)
        loss.backward()
        reduce(model)
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return train_step


def with_sgd(model, reduce):
    return stepping(torch.optim.SGD(model.parameters(), lr=0.1), reduce)


def batch_norm():
    """Running statistics are this rank's own, as eager's; the activation is in place."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(inplace=True), nn.Linear(7, 3))

    compare(build, with_sgd)


def kept_gradients():
    def make(model, reduce):
        def train_step(model, x):
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            loss = loss_of(model, x)
            loss.backward()
            if reduce is average:  # only the new part is this rank's own
                for p, old in zip(model.parameters(), before, strict=True):
                    new = p.grad if old is None else p.grad - old
                    dist.all_reduce(new)
                    p.grad = new / 2 if old is None else old + new / 2
            return loss.detach()

        return train_step

    step = compare(small, make)
    assert step.traces == ["first call", "which parameters have a gradient changed"]


def zeroed_gradients():
    def make(model, reduce):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train_step(model, x):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, x)
            loss.backward()
            reduce(model)
            optimizer.step()
            return loss.detach()

        return train_step

    compare(small, make)


def without_an_optimizer():
    """autograd.grad and an update by hand; gradients are returned, as DTensors of the parameters' shapes."""

    def make(model, reduce):
        def train_step(model, x):
            grads = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
            if reduce is average:
                for g in grads:
                    dist.all_reduce(g)
                    g /= 2
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return [g for g in grads] if reduce is average else grads[0].sum()

        return train_step

    model = small()
    reference = copy.deepcopy(model)
    eager, step = make(reference, average), fsdp_compile(make(model, nothing), model)
    for i in range(3):
        expected = eager(reference, data(i))
        torch.testing.assert_close(step(data(i)), expected[0].sum(), rtol=1e-4, atol=1e-5)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(cases.full(q.detach()), p.detach())


def gradients_returned():
    model = small()
    reference = copy.deepcopy(model)

    def train_step(model, x):
        loss_of(model, x).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        return grads

    got = fsdp_compile(train_step, model)(data(0))
    loss_of(reference, data(0)).backward()
    average(reference)
    for name, p in reference.named_parameters():
        assert got[name].shape == p.shape
        assert got[name].placements[0].is_shard(0)
        torch.testing.assert_close(got[name].full_tensor(), p.grad)


def two_optimizers():
    """A GAN: the second forward reads what the first optimizer wrote, so its parameters are gathered anew."""

    def build():
        torch.manual_seed(0)
        return nn.ModuleDict({"g": nn.Linear(5, 5), "d": nn.Linear(5, 1)})

    def make(model, reduce):
        first = torch.optim.Adam(model["g"].parameters(), lr=0.01)
        second = torch.optim.Adam(model["d"].parameters(), lr=0.01)

        def train_step(model, x):
            fooled = -model["d"](model["g"](x)).mean()
            fooled.backward()
            reduce(model)
            first.step()
            model.zero_grad()
            told = model["d"](model["g"](x).detach()).pow(2).mean() - model["d"](x).mean()
            told.backward()
            reduce(model)
            second.step()
            model.zero_grad()
            return fooled.detach(), told.detach()

        return train_step

    step = compare(build, make)
    gathered = [name for row in step.report().collectives if row.kind == "all_gather" for name in row.parameters]
    assert gathered.count("g.weight") == 2
    assert gathered.count("d.weight") == 1


def micro_batches():
    def make(model, reduce):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(model, x):
            losses = []
            for part in x.chunk(3):
                loss = loss_of(model, part) / 3
                loss.backward()
                losses.append(loss.detach())
            reduce(model)
            optimizer.step()
            optimizer.zero_grad()
            return losses

        return train_step

    compare(small, make)


def evaluation():
    """Same shards, no gradients; interleaved with training; the mode is the model's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model, x):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    train = fsdp_compile(train_step, model)
    evaluate = fsdp_compile(lambda model, x: {"out": model(x), "note": "text", "none": None}, model)
    for i in range(3):
        model.train()
        train(data(i))
        model.eval()
        with torch.no_grad():
            got = evaluate(data(i))
        whole = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).eval()
        whole.load_state_dict({k: cases.full(v) for k, v in model.state_dict().items()})
        assert torch.equal(got["out"], whole(data(i)))
        assert (got["note"], got["none"]) == ("text", None)
    assert {row.kind for row in evaluate.report().collectives} == {"all_gather"}
    assert len(train.traces) == len(evaluate.traces) == 1


def state_dict_round_trip():
    """Loading model and optimizer state goes on bit for bit, without a retrace."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    step = fsdp_compile(stepping(optimizer), model)
    for i in range(2):
        step(data(i))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = [step(data(i)).item() for i in range(2, 5)]
    final = cases.snapshot(model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(data(i)).item() for i in range(2, 5)] == expected
    assert cases.differences(final, cases.snapshot(model, optimizer)) == []
    assert len(step.traces) == 1


def eager_steps_between():
    """The shards are ordinary DTensors: an eager optimizer may step them, the compiled step goes on from there."""
    model = small()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)

    step, eager = fsdp_compile(stepping(optimizer), model), stepping(expected, average)
    step(data(0))
    eager(reference, data(0))
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.mul_(0.5)
            q.mul_(0.5)
    torch.testing.assert_close(step(data(1)), eager(reference, data(1)))
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(cases.full(q.detach()), p.detach())


def low_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model = small().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reference = copy.deepcopy(model)

        def train_step(model, x, optimizer=optimizer, dtype=dtype):
            loss = loss_of(model, x.to(dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = fsdp_compile(train_step, model)
        step(data(0))
        loss_of(reference, data(0).to(dtype)).backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            grad = p.grad.float()
            dist.all_reduce(grad)
            wanted = p.detach().float() - 0.1 * grad / 2
            torch.testing.assert_close(cases.full(q.detach()).float(), wanted, rtol=2e-2, atol=2e-3)
            assert q.dtype == dtype


def sharded_state_of(optimizer_name):
    """Lazily created state is sharded, whole scalars stay whole, and nothing is created before the first run."""
    model = nn.Linear(6, 8)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.01)

    def train_step(model, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = fsdp_compile(train_step, model)
    step.compile(torch.ones(2, 6))
    assert len(optimizer.state) == 0
    step(torch.ones(2, 6))
    state = optimizer.state[model.weight]
    assert list(state) == list(reference_state(optimizer_name))
    return {k: (type(v).__name__, tuple(v.shape), tuple(cases.full(v).shape)) for k, v in state.items()}


def reference_state(optimizer_name):
    model = nn.Linear(6, 8)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return optimizer.state[model.weight]


CASES = [
    batch_norm,
    kept_gradients,
    zeroed_gradients,
    without_an_optimizer,
    gradients_returned,
    two_optimizers,
    micro_batches,
    evaluation,
    state_dict_round_trip,
    eager_steps_between,
    low_precision,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_step(ranks, case):
    ranks(2, case)


def test_lazy_state(ranks):
    (first, _) = ranks(2, sharded_state_of, "Adam")
    assert first == {
        "step": ("Tensor", (), ()),
        "exp_avg": ("DTensor", (8, 6), (8, 6)),
        "exp_avg_sq": ("DTensor", (8, 6), (8, 6)),
    }


def torch_optimizer(name):
    def make(model, reduce):
        parameters = [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else model.parameters()
        return stepping(getattr(torch.optim, name)(parameters, lr=0.01), reduce)

    compare(small, make)


@pytest.mark.parametrize("name", ["Adagrad", "Adadelta", "Adam", "Adamax", "Muon", "NAdam", "RMSprop", "Rprop"])
def test_optimizers_of_torch(ranks, name):
    ranks(2, torch_optimizer, name)


def undecidable(name):
    try:
        torch_optimizer(name)
    except CaptureError as error:
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize("name", ["RAdam", "ASGD", "Adafactor"])
def test_optimizers_that_branch_on_their_state_are_refused(ranks, name):
    text = ranks(2, undecidable, name)[0]
    assert "The optimizer decides in Python on a value of its state" in text
    assert "test_steps.py" in text


def lists_kept_by_the_user(when):
    """A list of parameters made before or after fsdp_compile stands for the shards inside the step."""
    model = small()
    reference = copy.deepcopy(model)

    def make(model, reduce, kept):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(model, x):
            loss = loss_of(model, x) + 0.01 * sum(p.pow(2).sum() for p in kept)
            loss.backward()
            reduce(model)
            norm = nn.utils.clip_grad_norm_(kept, 0.1)
            nn.utils.clip_grad_value_(kept, 0.01)
            optimizer.step()
            for p in kept:
                p.grad = None
            return loss.detach(), norm

        return train_step

    eager = make(reference, average, list(reference.parameters()))
    kept = list(model.parameters())
    step = fsdp_compile(make(model, nothing, kept), model)
    if when == "after":
        kept[:] = model.parameters()
    for i in range(3):
        torch.testing.assert_close(step(data(i)), eager(reference, data(i)), rtol=1e-4, atol=1e-5)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(cases.full(q.detach()), p.detach())
    assert all(p.grad is None for p in kept)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lists_of_parameters(ranks, when):
    ranks(2, lists_kept_by_the_user, when)


def frozen_teacher():
    """Tensors of another module, used without gradients, are constants of the graph."""
    torch.manual_seed(1)
    teacher = nn.Linear(5, 3)

    def make(model, reduce):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(model, x):
            with torch.no_grad():
                wanted = teacher(x)
            loss = (model(x) - wanted).pow(2).mean()
            loss.backward()
            reduce(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train_step

    compare(small, make)
    assert all(p.grad is None for p in teacher.parameters())


def test_a_frozen_teacher(ranks):
    ranks(2, frozen_teacher)


class Averaging(nn.Module):
    """Replaces its buffer instead of writing it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        out = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        return out - self.average


def replaced_buffer():
    torch.manual_seed(0)
    compare(Averaging, with_sgd)


def test_a_buffer_that_the_forward_replaces(ranks):
    ranks(2, replaced_buffer)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed():
    torch.manual_seed(0)
    compare(Recomputed, with_sgd)


def test_checkpointing_without_dropout(ranks):
    ranks(2, checkpointed)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


class Answer:
    """A plain class that pytree does not know."""

    def __init__(self, loss, names):
        self.loss = loss
        self.names = names


def objects_in_and_out():
    torch.manual_seed(0)
    model = small()
    expected = copy.deepcopy(model)

    def train_step(model, batch):
        loss = loss_of(model, batch.x)
        loss.backward()
        return Answer(loss.detach(), [batch.name])

    answer = fsdp_compile(train_step, model)(Batch(data(0), "first"))
    wanted = train_step(expected, Batch(data(0), "first"))
    assert type(answer) is Answer
    assert answer.names == ["first"]
    torch.testing.assert_close(answer.loss, wanted.loss)


def test_objects_in_and_out(ranks):
    ranks(1, objects_in_and_out)


def input_gradients():
    torch.manual_seed(0)
    model = small()
    expected = copy.deepcopy(model)

    def train_step(model, x):
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach()

    x = data(0).requires_grad_()
    wanted = x.detach().clone().requires_grad_()
    compiled = fsdp_compile(train_step, model)
    for _ in range(2):  # The second call accumulates.
        compiled(x)
        train_step(expected, wanted)
        torch.testing.assert_close(x.grad, wanted.grad)


def test_gradients_of_inputs(ranks):
    ranks(1, input_gradients)
