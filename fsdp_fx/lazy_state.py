"""State that optimizers create from nothing at their first step: lifted out of the graph, made sharded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from fsdp_fx.optimizers import Hyperparameter
from fsdp_fx.signature import (
    HyperparameterInput,
    InputSpec,
    OptimizerStateInput,
    OptimizerStateOutput,
    OutputSpec,
    safe_name,
)
from fsdp_fx.step_graph import Aliases, StepGraph

__all__ = ["StateInit", "lift_state"]


@dataclass(frozen=True)
class StateInit:
    """State that the optimizer creates at its first step: made sharded, before the first run.

    `value` fills it, or the hyperparameter (of which optimizer, where) does. `like_parameter` says that it has the
    parameter's shape and is sharded as the parameter is; else it is whole, of `shape`.
    """

    optimizer: int
    parameter: str
    key: str
    like_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: float | int
    hyperparameter: tuple[int, Hyperparameter] | None = None


_FACTORIES = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "full": None,
    "full_like": None,
    "new_full": None,
}
"""Factory operators of lazily created state, and the value they fill with (None: their fill argument)."""


def lift_state(step: StepGraph, stepped: list[Optimizer]) -> list[StateInit]:
    """Turns state that the optimizer creates from nothing (zeros, ones, a fill) into inputs of the graph.

    So one graph serves the first call and all others, and the state is created sharded. State made from
    the gradient (SGD's momentum buffer) stays an output, and the second call gets a graph of its own; so does
    that of optimizers from outside torch.optim, whose first step may differ in other ways too.
    """
    aliases = Aliases(step.graph)
    hypers = {
        n: (s.optimizer, Hyperparameter(s.group, s.key, s.index))
        for n, s in step.inputs()
        if isinstance(s, HyperparameterInput)
    }
    outputs: list[OutputSpec] = []
    nodes: list[fx.Node] = []
    inits: list[StateInit] = []
    roots: list[fx.Node] = []
    known = {(s.optimizer, s.parameter, s.key) for _, s in step.inputs() if isinstance(s, OptimizerStateInput)}
    for spec, node in zip(step.signature.outputs, step.output_args(), strict=True):
        init = None
        if isinstance(spec, OptimizerStateOutput) and (spec.optimizer, spec.parameter, spec.key) not in known:
            root = aliases.root(node)
            if type(stepped[spec.optimizer]).__module__.startswith("torch.optim"):
                init = _state_init(step, spec, root, hypers)
        if init is None:
            outputs.append(spec)
            nodes.append(node)
        else:
            inits.append(init)
            roots.append(root)
    specs: list[tuple[InputSpec, Any]] = [
        (
            OptimizerStateInput(
                f"s{i.optimizer}_{safe_name(i.key)}_{safe_name(i.parameter)}", i.optimizer, i.parameter, i.key
            ),
            root.meta["val"],
        )
        for i, root in zip(inits, roots, strict=True)
    ]
    for root, placeholder in zip(roots, step.add_inputs(specs), strict=True):
        root.replace_all_uses_with(placeholder)
        step.graph.erase_node(root)
    step.signature = replace(step.signature, outputs=tuple(outputs))
    final = step.output_node()
    final.args = (tuple(nodes),)
    return inits


def _state_init(
    step: StepGraph, spec: OptimizerStateOutput, root: fx.Node, hypers: dict[fx.Node, tuple[int, Hyperparameter]]
) -> StateInit | None:
    name = str(root.target).removeprefix("aten.").split(".")[0]
    if root.op != "call_function" or name not in _FACTORIES:
        return None
    value: Any = _FACTORIES[name]
    if value is None:
        value = root.kwargs.get("fill_value", root.args[-1])
    hyper = hypers.get(value) if isinstance(value, fx.Node) else None
    if not isinstance(value, (int, float)) and hyper is None:
        return None
    made = root.meta["val"]
    layout = step.layout[spec.parameter]
    return StateInit(
        spec.optimizer,
        spec.parameter,
        spec.key,
        like_parameter=tuple(made.shape) == layout.shape and not layout.replicated,
        shape=tuple(made.shape),
        dtype=made.dtype,
        device=made.device,
        value=0.0 if hyper is not None else value,
        hyperparameter=hyper,
    )
