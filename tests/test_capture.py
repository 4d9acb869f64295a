"""Capture: roles, borders, origins, and that nothing of the user's is touched."""

import cases
import pytest
import staging
import torch
import torch.nn as nn

from fsdp_fx import fsdp_compile, simulated_world
from fsdp_fx.signature import (
    BatchInput,
    BufferInput,
    GradientOutput,
    HyperparameterInput,
    OptimizerStateInput,
    OptimizerStateOutput,
    ParameterInput,
    UserOutput,
)


def roles(step, kind):
    return [spec for spec in step.signature.inputs if isinstance(spec, kind)]


def test_signature_of_a_whole_step():
    model = cases.gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    step = staging.stages(cases.clipped_step(optimizer), model, *cases.tokens(0))["capture"]
    names = [s.name for s in roles(step, ParameterInput)]
    assert names == [n for n, _ in model.named_parameters()]  # tied weights once
    assert step.layout["emb.weight"].aliases == ("head.weight",)
    assert [(s.key, s.index) for s in roles(step, HyperparameterInput)] == [
        ("lr", None),
        ("betas", 0),
        ("betas", 1),
        ("eps", None),
        ("weight_decay", None),
    ]
    assert [str(s) for s in roles(step, BatchInput)] == ["batch args[0]", "batch args[1]"]
    states = roles(step, OptimizerStateInput)
    assert {(s.parameter, s.key) for s in states} == {(n, k) for n in names for k in ("step", "exp_avg", "exp_avg_sq")}
    assert step.signature.outputs == (UserOutput(0), UserOutput(1))
    borders = [n.args[1] for n in step.graph.nodes if "reduce_gradient" in str(n.target)]
    assert sorted(borders) == sorted(names)  # one border a parameter, the tied one included


def test_state_made_from_gradients_is_an_output_of_the_first_graph():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(model, x):
        model(x).sum().backward()
        optimizer.step()

    step = staging.stages(train_step, model, torch.ones(1, 2))["capture"]
    assert [s for s in step.signature.outputs if isinstance(s, OptimizerStateOutput)] == [
        OptimizerStateOutput(0, "weight", "momentum_buffer"),
        OptimizerStateOutput(0, "bias", "momentum_buffer"),
    ]
    assert [s for s in step.signature.outputs if isinstance(s, GradientOutput)] == [
        GradientOutput("weight"),
        GradientOutput("bias"),
    ]


def test_backward_nodes_carry_their_forwards_origin():
    model = cases.gpt(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = staging.stages(cases.clipped_step(optimizer), model, *cases.tokens(0))["capture"]
    backward = [n for n in step.graph.nodes if n.meta.get("phase") == "backward"]
    forward_lines = {
        (n.meta["frame"].line, next(reversed(n.meta["nn_module_stack"]), ""))
        for n in step.graph.nodes
        if n.meta.get("phase") == "forward"
    }
    located = [n for n in backward if "reduce_gradient" not in str(n.target)]
    with_module = [n for n in located if n.meta["nn_module_stack"]]
    assert len(with_module) > 0.8 * len(located)
    for node in with_module:
        path = next(reversed(node.meta["nn_module_stack"]))
        assert (node.meta["frame"].line, path) in forward_lines
        assert f"line {node.meta['frame'].line}" in node.meta["stack_trace"]
    gelu = next(n for n in backward if "gelu_backward" in str(n.target))
    assert next(reversed(gelu.meta["nn_module_stack"])) == "blocks.0"
    # They form one run: nothing of the forward lies between.
    phases = [n.meta["phase"] for n in step.graph.nodes if n.meta.get("phase") in ("forward", "backward")]
    first, last = phases.index("backward"), len(phases) - phases[::-1].index("backward")
    assert phases[first:last].count("forward") == 0


class Counting(nn.Module):
    """Keeps Python state that a forward changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0
        self.seen = []
        self.cache = {"last": None}

    def forward(self, x, fail=False):
        self.calls += 1
        self.seen.append(tuple(x.shape))
        self.cache["last"] = x
        x = torch.dropout(self.norm(self.linear(x)), 0.5, True)
        if fail:
            raise KeyError("the user's own mistake")
        return x


def state_of(model, optimizer):
    return {
        "modules": [
            (
                {k: v for k, v in m.__dict__.items() if not isinstance(v, dict)},
                {k: id(v) for k, v in m._parameters.items()},
                {k: (id(v), v.clone()) for k, v in m._buffers.items()},
            )
            for m in model.modules()
        ],
        "lists": (list(model.seen), dict(model.cache)),
        "optimizer": (
            {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")},
            [{**g, "params": [id(p) for p in g["params"]]} for g in optimizer.param_groups],
            [id(g["params"]) for g in optimizer.param_groups],
            len(optimizer.state),
        ),
        "grads": [p.grad for p in model.parameters()],
        "rng": torch.get_rng_state(),
        "grad_enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("fail", [False, True])
def test_capture_touches_nothing(fail):
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = optimizer.param_groups

    def train_step(model, x, fail):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, False).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        torch.set_grad_enabled(False)
        if fail:
            model(x, True)
        return loss

    with simulated_world(2) as mesh:
        step = fsdp_compile(train_step, model, mesh=mesh)
        before = state_of(model, optimizer)
        values = [p.to_local().detach().clone() for p in model.parameters()]
        if fail:
            with pytest.raises(KeyError, match="the user's own mistake") as caught:
                step.compile(torch.ones(4, 3), True)
            (note,) = caught.value.__notes__
            assert "raised by the user's code while 'train_step' was traced" in note
            assert "test_capture.py" in note
        else:
            step.compile(torch.ones(4, 3), False)
        assert same(before, state_of(model, optimizer))
        assert same(values, [p.to_local() for p in model.parameters()])
        assert optimizer.param_groups is groups


def test_a_failed_trace_does_not_poison_the_next():
    def broken(model, x):
        loss = model(x).sum()
        loss.backward()
        raise KeyError

    model = cases.gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with simulated_world(2) as mesh:
        with pytest.raises(KeyError):
            fsdp_compile(broken, model, mesh=mesh).compile(cases.tokens(0)[0])
        after = fsdp_compile(cases.clipped_step(optimizer), model).compile(*cases.tokens(0))
        phases = [n.meta["phase"] for n in after.graphs["capture"].graph.nodes if n.op == "call_function"]
    assert phases[0] == "forward"
    assert phases.count("backward") > 50


class Holder:
    pass


HELD = Holder()


@pytest.mark.parametrize("where", ["closure", "global", "attribute", "list", "after"])
def test_an_optimizer_is_found_wherever_it_is(where):
    model = nn.Linear(2, 2)
    make = lambda: torch.optim.Adam(model.parameters(), lr=1e-3)  # noqa: E731
    kept = None if where == "after" else make()
    if where == "global":
        HELD.optimizer, kept = kept, None
    elif where == "attribute":
        model.optimizer, kept = kept, None
    elif where == "list":
        kept = [kept]

    def train_step(model, x):
        model(x).sum().backward()
        found = {"global": lambda: HELD.optimizer, "attribute": lambda: model.optimizer, "list": lambda: kept[0]}
        optimizer = found.get(where, lambda: kept)()
        optimizer.step()
        optimizer.zero_grad()

    with simulated_world(2) as mesh:
        step = fsdp_compile(train_step, model, mesh=mesh)
        if where == "after":
            kept = make()
        step.compile(torch.ones(1, 2))
        inputs = step.signature.inputs
    assert {s.key for s in inputs if isinstance(s, OptimizerStateInput)} == {"step", "exp_avg", "exp_avg_sq"}
    HELD.__dict__.clear()


def test_an_optimizer_that_is_not_stepped_is_no_input():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    first = torch.optim.Adam(model["a"].parameters(), lr=1e-3)
    second = torch.optim.Adam(model["b"].parameters(), lr=1e-3)

    def train_step(model, x):
        model["b"](model["a"](x)).sum().backward()
        second.step()
        first.zero_grad()
        second.zero_grad()

    step = staging.stages(train_step, model, torch.ones(1, 2))["capture"]
    assert {s.parameter for s in roles(step, OptimizerStateInput)} == {"b.weight", "b.bias"}
    assert {s.optimizer for s in roles(step, HyperparameterInput)} == {0}


def test_the_same_step_gives_the_same_graph_byte_for_byte():
    texts = []
    for _ in range(2):
        model = cases.gpt(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = staging.stages(cases.clipped_step(optimizer), model, *cases.tokens(0))
        texts.append([str(step.module) for step in found.values()])
    assert texts[0] == texts[1]


def test_buffers_are_inputs():
    model = nn.BatchNorm1d(2)
    step = staging.stages(lambda model, x: model(x), model, torch.ones(4, 2))["capture"]
    assert [s.name for s in roles(step, BufferInput)] == ["running_mean", "running_var", "num_batches_tracked"]
