"""The step graph: an FX graph, its signature, and what passes have decided and established so far."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fx._torch_private import FakeTensorMode
from fsdp_fx.errors import Frame
from fsdp_fx.layout import ModelLayout
from fsdp_fx.printing import StepGraphModule
from fsdp_fx.signature import (
    InputSpec,
    StepSignature,
)

__all__ = [
    "Aliases",
    "Collective",
    "Decision",
    "StepGraph",
    "emit",
    "fake_result",
    "fresh",
    "is_random",
    "is_view",
    "remove_dead",
    "written_args",
]


@dataclass(frozen=True)
class Decision:
    """What a pass chose, or declined, and why; `subject` is a parameter, a bucket or "step"."""

    stage: str
    subject: str
    choice: str
    reason: str


@dataclass(frozen=True)
class Collective:
    """What a collective node is for; sits in `node.meta["collective"]` and is never inferred from op chains.

    `kind`: all_gather, reduce_scatter, all_reduce or all_to_all. `nbytes`: bytes of the full (unsharded)
    payload. `dtype`: what travels. `phase`: forward, backward or sharded. `frame`: the user's line that
    first needs it.
    """

    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    dtype: torch.dtype
    phase: str
    frame: Frame | None = None

    def plan_entry(self) -> str:
        """What all ranks must agree on: kind, dtype, bytes and parameters, in order. No batch shapes, no
        process-group names."""
        return f"{self.kind} {self.dtype} {self.nbytes} {' '.join(self.parameters)}"


@dataclass
class StepGraph:
    """`module` holds the graph and its constants; `properties` are what passes have established.

    `node.meta` of every node: `val` (fake value), `frame` (user's innermost line or None), `stack_trace`,
    `nn_module_stack`, `phase`.
    """

    module: fx.GraphModule
    signature: StepSignature
    layout: ModelLayout
    mode: FakeTensorMode
    group: str = ""
    mesh: DeviceMesh | None = None
    rank: int = 0
    backend: str = ""
    decisions: tuple[Decision, ...] = ()
    properties: frozenset[str] = frozenset()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def copy(self) -> StepGraph:
        """A graph of its own to change; constants, fake values and the signature are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
        module = StepGraphModule(self.module, graph)
        return replace(self, module=module, timings=dict(self.timings))

    def decided(self, *decisions: Decision) -> StepGraph:
        return replace(self, decisions=(*self.decisions, *decisions))

    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    def inputs(self) -> Iterator[tuple[fx.Node, InputSpec]]:
        return zip(self.placeholders(), self.signature.inputs, strict=True)

    def nodes_of(self, *roles: type) -> dict[fx.Node, InputSpec]:
        """The placeholders that have one of these roles."""
        return {node: spec for node, spec in self.inputs() if isinstance(spec, roles)}

    def output_node(self) -> fx.Node:
        return self.graph.output_node()

    def output_args(self) -> tuple[fx.Node, ...]:
        return tuple(self.output_node().args[0])  # type: ignore[arg-type]

    def add_inputs(self, specs: list[tuple[InputSpec, Any]]) -> list[fx.Node]:
        """Appends placeholders (with their fake value) behind the existing ones."""
        last = self.placeholders()[-1] if self.signature.inputs else None
        nodes = []
        for spec, value in specs:
            point = self.graph.inserting_after(last) if last else self.graph.inserting_before()
            with point:
                last = self.graph.placeholder(spec.node)
            last.meta = {"val": value, "phase": "input"}
            nodes.append(last)
        self.signature = replace(self.signature, inputs=(*self.signature.inputs, *(s for s, _ in specs)))
        return nodes

    def collectives(self) -> list[tuple[fx.Node, Collective]]:
        return [(n, n.meta["collective"]) for n in self.graph.nodes if "collective" in n.meta]

    def plan(self) -> list[str]:
        """The ordered collectives, one line each (see `Collective.plan_entry`)."""
        return [info.plan_entry() for _, info in self.collectives()]


def emit(step: StepGraph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: fx.Node) -> fx.Node:
    """Adds a call at the graph's insertion point; its fake value is computed, its origin is that of `origin`."""
    node = step.graph.create_node("call_function", target, args, kwargs, name=_short_name(target))
    node.meta = {k: v for k, v in origin.meta.items() if k in INHERITED}
    node.meta["val"] = fake_result(step, node)
    return node


def _short_name(target: Any) -> str:
    """The operator's name without namespace and overload, for readable graphs."""
    schema = getattr(target, "_schema", None)
    name: str = schema.name.split("::")[-1] if schema is not None else target.__name__
    return name.strip("_")


INHERITED = ("frame", "stack_trace", "nn_module_stack", "phase", "domain", "segment")
"""What a new node takes over from the node it is made for."""


def fake_result(step: StepGraph, node: fx.Node) -> Any:
    """What `node` gives on the fake values of its arguments as they are now."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with step.mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def remove_dead(graph: fx.Graph) -> None:
    """Drops what no output needs. Writes and random draws stay: both are the step's doing; profiler marks go."""
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if str(node.target).startswith("profiler.") or (
            not node.users and not written_args(node) and not is_random(node)
        ):
            graph.erase_node(node)


def fresh(value: Any) -> Any:
    """A new fake tensor like this one, for a trace whose writes must not reach the graph's own fake values."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


def schema_of(node: fx.Node) -> torch._C.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _bound(node: fx.Node, schema: torch._C.FunctionSchema) -> Iterator[tuple[Any, Any]]:
    """(schema argument, value) for every argument that was passed."""
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for item in value for n in _nodes(item)]
    return []


def written_args(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an operator writes in place, from its schema."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return []
    return [n for a, v in _bound(node, schema) if a.alias_info and a.alias_info.is_write for n in _nodes(v)]


def is_random(node: fx.Node) -> bool:
    """True for operators that draw from a generator; their order is part of the program."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def aliased_args(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an operator's result may share memory with, from its schema."""
    if node.op == "call_function" and node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    schema = schema_of(node)
    if schema is None:
        return []
    returned: set[str] = set()
    for result in schema.returns:
        if result.alias_info is not None:
            returned |= set(result.alias_info.before_set) | set(result.alias_info.after_set)
    if not returned:
        return []
    return [
        n
        for a, v in _bound(node, schema)
        if a.alias_info is not None and returned & (set(a.alias_info.before_set) | set(a.alias_info.after_set))
        for n in _nodes(v)
    ]


def is_view(node: fx.Node) -> bool:
    """True if the result is another look at an argument's memory."""
    return bool(aliased_args(node)) and not written_args(node)


class Aliases:
    """Memory of a graph: `root(node)` is the node that owns the memory `node` looks at.

    `_unsafe_view` and `reshape` may alias without saying so in a way a schema shows; aten's captured graphs
    hold `view` or a clone instead, and functionalisation emits only the honest forms.
    """

    def __init__(self, graph: fx.Graph):
        self._root: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            sources = aliased_args(node)
            self._root[node] = self._root[sources[0]] if sources else node

    def root(self, node: fx.Node) -> fx.Node:
        return self._root[node]

    def tensor_itself(self, node: fx.Node) -> fx.Node:
        """What `node` is once in-place operators are seen through: `add_(x)` is `x` itself."""
        while True:
            targets = written_args(node)
            if not targets or targets[0] not in aliased_args(node):
                return node
            node = targets[0]

    def writes(self, node: fx.Node) -> list[fx.Node]:
        """Roots that `node` writes."""
        return [self._root[n] for n in written_args(node)]
