"""Checks the design's invariants after every pass; a broken one is a bug in the pass and raises `VerifyError`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from fsdp_fx.errors import VerifyError, message
from fsdp_fx.ops import BORDERS, gather_parameter
from fsdp_fx.printing import node_text
from fsdp_fx.signature import (
    BatchInput,
    BufferInput,
    GradientOutput,
    OptimizerStateInput,
    ParameterInput,
    UserOutput,
)
from fsdp_fx.step_graph import Aliases, StepGraph, is_random, written_args

__all__ = ["verify"]

c10d = torch.ops._c10d_functional


def verify(step: StepGraph, stage: str, before: StepGraph | None = None) -> None:
    """Raises `VerifyError` naming `stage`, the invariant and the node; `before` is the graph one pass earlier."""
    try:
        step.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"after '{stage}': the graph is malformed: {str(error).splitlines()[0]}") from error
    for node, why in _broken(step, before):
        raise VerifyError(
            message(
                f"after '{stage}': {why}",
                "Every later pass relies on it; the compiled step would be wrong or hang.",
                f"This is a bug in fsdp_fx's pass '{stage}', not in your code; please report the graph.",
                str(node.meta.get("frame")) if node is not None and node.meta.get("frame") else None,
                _around(node) if node is not None else None,
            )
        )


def _around(node: fx.Node) -> str:
    lines = [node_text(node)]
    if node.prev.op != "root":
        lines.insert(0, node_text(node.prev))
    if node.next.op != "root":
        lines.append(node_text(node.next))
    return "\n".join(lines)


def _broken(step: StepGraph, before: StepGraph | None) -> Iterator[tuple[fx.Node | None, str]]:
    yield from _signature(step)
    if before is not None and _draws(before.graph) != _draws(step.graph):
        yield None, "the order or number of random draws changed, so masks differ from eager's"
    if "domains" in step.properties:
        yield from _domains(step)
    if "functional" in step.properties:
        yield from _functional(step)
    if "parameters_sharded" in step.properties:
        yield from _waits(step)
        aliases = Aliases(step.graph)
        yield from _lifetimes(step, aliases)
        yield from _versions(step, aliases)
        if "optimizer_sharded" in step.properties:
            yield from _shards(step, aliases)


def _signature(step: StepGraph) -> Iterator[tuple[fx.Node | None, str]]:
    names = [n.name for n in step.placeholders()]
    wanted = [s.node for s in step.signature.inputs]
    if names != wanted:
        yield None, f"the placeholders {names} are not the signature's inputs {wanted}"
    if len(step.output_args()) != len(step.signature.outputs):
        yield step.output_node(), f"{len(step.signature.outputs)} outputs are declared"
    for node in step.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            yield node, f"'{node.name}' has no fake value"


def _draws(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1].rstrip("_") for n in graph.nodes if is_random(n)]


def _domains(step: StepGraph) -> Iterator[tuple[fx.Node | None, str]]:
    parameters = step.nodes_of(ParameterInput)
    for node in step.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        domain = node.meta.get("domain")
        if domain not in ("local", "sharded"):
            yield node, f"'{node.name}' is in no domain"
        if domain == "local":
            for argument in node.all_input_nodes:
                if argument.meta.get("domain") == "sharded" and argument.op != "placeholder":
                    yield node, f"local '{node.name}' reads '{argument.name}' of the sharded domain"
                raw = argument in parameters and "parameters_sharded" not in step.properties
                if raw and node.target is not gather_parameter:
                    yield node, f"local '{node.name}' reads parameter '{argument.name}' without a border"


def _functional(step: StepGraph) -> Iterator[tuple[fx.Node | None, str]]:
    updatable = step.nodes_of(BufferInput, BatchInput)
    for node in step.graph.nodes:
        if node.meta.get("domain") == "local":
            for target in written_args(node):
                if target not in updatable:
                    yield node, f"local '{node.name}' writes '{target.name}' in place"


def _waits(step: StepGraph) -> Iterator[tuple[fx.Node | None, str]]:
    for node in step.graph.nodes:
        if node.target in BORDERS:
            yield node, f"border '{node.name}' is left"
        starts = str(node.target).startswith("_c10d_functional.") and node.target is not c10d.wait_tensor.default
        if starts:
            waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
            if len(waits) != 1 or len(node.users) != 1:
                yield node, f"collective '{node.name}' has {len(waits)} waits and {len(node.users)} users"
            if "collective" not in node.meta:
                yield node, f"collective '{node.name}' does not say what it is for"
        if node.target is c10d.wait_tensor.default and "collective" not in node.args[0].meta:
            yield node, f"'{node.name}' waits for what is no collective"


def _lifetimes(step: StepGraph, aliases: Aliases) -> Iterator[tuple[fx.Node | None, str]]:
    for spec, value in zip(step.signature.outputs, step.output_args(), strict=True):
        root = aliases.root(value)
        source = root.args[0] if root.target is c10d.wait_tensor.default else None
        gathered = isinstance(source, fx.Node) and source.meta["collective"].kind == "all_gather"
        if gathered and not isinstance(spec, UserOutput):
            yield value, f"output '{spec}' keeps a gathered parameter alive"


def _versions(step: StepGraph, aliases: Aliases) -> Iterator[tuple[fx.Node | None, str]]:
    """A gather reads its parameters as they are in its segment: before that segment's writes, behind earlier ones.
    No edge of the graph says so, since shards are written in place and buckets read the flat buffer."""
    names = {node: spec.name for node, spec in step.inputs() if isinstance(spec, ParameterInput)}
    writes: dict[str, list[fx.Node]] = {}
    for node in step.graph.nodes:
        for root in aliases.writes(node):
            if root in names:
                writes.setdefault(names[root], []).append(node)
    for node, info in step.collectives():
        if info.kind != "all_gather":
            continue
        for name in info.parameters:
            for write in writes.get(name, ()):
                before = node.meta["segment"] <= write.meta["segment"]
                if before != (node < write):
                    place = "behind" if before else "before"
                    yield node, f"'{node.name}' gathers '{name}' {place} its update '{write.name}'"


def _shards(step: StepGraph, aliases: Aliases) -> Iterator[tuple[fx.Node | None, str]]:
    for node, spec in step.inputs():
        if isinstance(spec, ParameterInput):
            wanted = step.layout[spec.name].shard_shape
            if tuple(node.meta["val"].shape) != wanted:
                yield node, f"parameter input '{spec.name}' is not a shard of shape {list(wanted)}"
    state = step.nodes_of(ParameterInput, OptimizerStateInput)
    for node in step.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and written_args(node):
            for root in aliases.writes(node):
                if root in state and aliases.root(node) is root and value.shape != root.meta["val"].shape:
                    yield node, f"'{node.name}' writes {list(value.shape)} over '{root.name}'"
    for output, value in zip(step.signature.outputs, step.output_args(), strict=True):
        if isinstance(output, GradientOutput):
            layout = step.layout[output.parameter]
            shape = tuple(value.meta["val"].shape)
            if shape != layout.shard_shape:
                yield value, f"output '{output}' is no shard of shape {list(layout.shard_shape)}"
