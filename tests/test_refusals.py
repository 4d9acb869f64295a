"""Every refusal names the user's file and line, says why and offers a way out. Golden texts."""

import re

import cases
import expecttest
import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import fsdp_fx
from fsdp_fx import fsdp_compile


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def item(model, x):
    loss = model(x).sum()
    loss.backward()
    return loss.item()


def to_float(model, x):
    loss = model(x).sum()
    print(f"loss {float(loss)}")
    loss.backward()


def branch(model, x):
    loss = model(x).sum()
    if loss > 0:
        loss.backward()


def numpy(model, x):
    return model(x).detach().numpy()


def data_dependent(model, x):
    out = model(x)
    return out[out > 0].sum()


def twice(model, x):
    loss = model(x).pow(2).sum()
    loss.backward()
    loss.backward()


def create_graph(model, x):
    loss = model(x).pow(2).sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return sum(g.pow(2).sum() for g in grads)


def foreign_parameter():
    stray = nn.Parameter(torch.zeros(3))
    model = small()
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.1)

    def train_step(model, x):
        model(x).sum().backward()
        optimizer.step()

    return model, train_step


def unowned_module():
    criterion = nn.Linear(2, 1)

    def train_step(model, x):
        criterion(model(x)).sum().backward()

    return small(), train_step


def numpy_function(model, x):
    return np.asarray(model(x).detach()).sum()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def dropout_under_checkpoint():
    def train_step(model, x):
        model(x).sum().backward()

    return Checkpointed(), train_step


def closure():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model, x):
        optimizer.step(lambda: model(x).sum())

    return model, train_step


def scheduler_inside():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def train_step(model, x):
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()

    return model, train_step


def own_value_on_gradients(model, x):
    loss = model(x).sum()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(x.sum())


def noise_on_gradients(model, x):
    model(x).sum().backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad))


def refusal(case):
    """The message of the error that a step raises, with paths made short."""
    torch.manual_seed(0)
    make = globals()[case]
    model, step = make() if make.__code__.co_argcount == 0 else (small(), make)
    compiled = fsdp_compile(step, model)
    before = {k: v.clone() for k, v in cases.snapshot(model).items()}
    state = torch.get_rng_state()
    try:
        compiled(torch.ones(3, 4))
    except fsdp_fx.FsdpFxError as error:
        text = str(error)
    else:
        raise AssertionError("not refused")
    assert cases.differences(before, cases.snapshot(model)) == []
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    # The model is untouched: an honest step still compiles and runs.
    fsdp_compile(lambda model, x: model(x).sum(), model)(torch.ones(3, 4))
    text = re.sub(r"\balias_", "detach_", text)  # what torch 2.14 calls it
    return re.sub(r"\S*/tests/", "tests/", re.sub(r"py:\d+", "py:LINE", text))


class TestRefusals(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _ranks(self, ranks):
        self.ranks = ranks

    def check(self, case, expected):
        texts = self.ranks(2, refusal, case)
        assert texts[0] == texts[1]
        self.assertExpectedInline(texts[0], expected, skip=1)

    def test_item(self):
        self.check(
            "item",
            """\
The step reads a tensor's value: .item() on a tensor f32[].
  at:  tests/test_refusals.py:LINE in item: return loss.item()
  why: The step is one graph for all calls; a value read here would be baked in.
  fix: Return the tensor from the step and read it outside (float(step(...))).""",
        )

    def test_to_float(self):
        self.check(
            "to_float",
            """\
The step reads a tensor's value: float() of a tensor f32[].
  at:  tests/test_refusals.py:LINE in to_float: print(f"loss {float(loss)}")
  why: The step is one graph for all calls; a value read here would be baked in.
  fix: Return the tensor from the step and read it outside (float(step(...))).""",
        )

    def test_branch(self):
        self.check(
            "branch",
            """\
The step reads a tensor's value: a Python branch on a tensor b8[].
  at:  tests/test_refusals.py:LINE in branch: if loss > 0:
  why: The step is one graph for all calls; a value read here would be baked in.
  fix: Write the choice as tensor arithmetic (torch.where, multiplication by a mask), or decide outside the step.""",
        )

    def test_numpy(self):
        self.check(
            "numpy",
            """\
The step reads a tensor's value: .numpy() on a tensor f32[3,2].
  at:  tests/test_refusals.py:LINE in numpy: return model(x).detach().numpy()
  why: The step is one graph for all calls; a value read here would be baked in.
  fix: Use torch operators on the tensor, or return it and convert it outside the step.""",
        )

    def test_data_dependent(self):
        self.check(
            "data_dependent",
            """\
The step does something whose shape or course depends on a tensor's values.
  at:  tests/test_refusals.py:LINE in data_dependent: return out[out > 0].sum()
  why: The step is one graph for all calls (DynamicOutputShapeException: aten.nonzero.default).
  fix: Use a form of fixed shape (a mask and torch.where instead of indexing by a mask or nonzero()), or do it outside the step.""",
        )

    def test_twice(self):
        self.check(
            "twice",
            """\
The step calls backward a second time on a graph that the first call freed.
  at:  tests/test_refusals.py:LINE in twice: loss.backward()
  why: Eager PyTorch fails here too.
  fix: Pass retain_graph=True to the first backward, or add the losses and call backward once.""",
        )

    def test_create_graph(self):
        self.check(
            "create_graph",
            """\
The gradient of '1.bias' is itself differentiated (create_graph=True).
  at:  tests/test_refusals.py:LINE in create_graph: grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
  why: The mean over ranks has no place inside a rank's own backward graph.
  fix: Differentiate with respect to activations, or keep the penalty out of the step.""",
        )

    def test_foreign_parameter(self):
        self.check(
            "foreign_parameter",
            """\
SGD steps a parameter (f32[3]) that the model does not own.
  at:  tests/test_refusals.py:LINE in train_step: optimizer.step()
  why: Only the model's parameters are sharded and reduced; this one would be trained on each rank's own gradient, or not at all.
  fix: Register it on the model (self.x = nn.Parameter(...)), give it an optimizer of its own outside the step, or rebuild the optimizer from model.parameters() after fsdp_compile.""",
        )

    def test_closure(self):
        self.check(
            "closure",
            """\
SGD.step was given a closure.
  at:  tests/test_refusals.py:LINE in train_step: optimizer.step(lambda: model(x).sum())
  why: A closure is run an unknown number of times, so the step has no single graph.
  fix: Call loss.backward() yourself and then optimizer.step() without arguments.""",
        )

    def test_scheduler_inside(self):
        self.check(
            "scheduler_inside",
            """\
The step changes SGD.param_groups[0]['lr'] (a scheduler inside the step?).
  at:  tests/test_refusals.py:LINE in train_step
  why: Hyperparameters are inputs of the graph; a value computed in Python while tracing would be baked.
  fix: Call scheduler.step() (or set the value) outside the step, after it returns: no retrace follows.""",
        )

    def test_own_value_on_gradients(self):
        self.check(
            "own_value_on_gradients",
            """\
Operator aten.mul_.Tensor combines a sharded gradient, parameter or state with a value that each rank has for itself.
  at:  tests/test_refusals.py:LINE in own_value_on_gradients: p.grad.mul_(x.sum())
  why: Ranks would treat their rows differently, and the result depends on who owns which row.
  fix: Reduce the value over ranks first, or apply it to the loss before backward.
  graph:
    mul_: f32[4,4] = aten.mul_.Tensor(detach_3, sum_4)""",
        )

    def test_noise_on_gradients(self):
        self.check(
            "noise_on_gradients",
            """\
Operator aten.randn_like.default draws random numbers for a sharded tensor.
  at:  tests/test_refusals.py:LINE in noise_on_gradients: p.grad.add_(torch.randn_like(p.grad))
  why: Ranks with the same seed would draw the same numbers for different rows.
  fix: Draw the noise on the activations, or outside the step.
  graph:
    randn_like: f32[4,4] = aten.randn_like(detach_3, pin_memory=False)""",
        )

    def test_unowned_module(self):
        self.check(
            "unowned_module",
            """\
The step uses a parameter (f32[1,2]) that the model does not own.
  at:  tests/test_refusals.py:LINE in train_step: criterion(model(x)).sum().backward()
  why: Only the model's parameters are sharded and get reduced gradients; this one's gradient would be each rank's own.
  fix: Register its module on the model, or freeze it: requires_grad_(False) or torch.no_grad().""",
        )

    def test_numpy_function(self):
        self.check(
            "numpy_function",
            """\
The step reads a tensor's value: numpy on a tensor f32[3,2].
  at:  tests/test_refusals.py:LINE in numpy_function: return np.asarray(model(x).detach()).sum()
  why: The step is one graph for all calls; a value read here would be baked in.
  fix: Use torch operators on the tensor, or return it and convert it outside the step.""",
        )

    def test_dropout_under_checkpoint(self):
        self.check(
            "dropout_under_checkpoint",
            """\
aten.bernoulli_.float draws random numbers in backward: a checkpointed part of the model with dropout.
  at:  tests/test_refusals.py:LINE in forward: return checkpoint(self.inner, x, use_reentrant=False)
  why: The recomputation would draw a second mask, and gradients would be wrong without any sign of it.
  fix: Keep random operators out of torch.utils.checkpoint, or set its dropout to 0.""",
        )
