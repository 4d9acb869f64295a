"""shard_parameters: turn the borders into collectives.

Before    gather_w: f32[7,4] = fsdp_fx.gather_parameter(p_w, 'w')               # p_w: f32[7,4]
          reduce_w: f32[7,4] = fsdp_fx.reduce_gradient(t_5, 'w')
          detach: f32[7,4] = aten.detach(reduce_w)                              # sharded domain
After     all_gather: f32[8,4] = all_gather_into_tensor(p_w, 2, group)          # p_w: f32[4,4]
          wait: f32[8,4] = wait_tensor(all_gather)
          gather_w: f32[7,4] = aten.slice(wait, 0, 0, 7)
          pad: f32[8,4] = aten.constant_pad_nd(t_5, [0, 0, 0, 1])
          reduce_scatter: f32[4,4] = reduce_scatter_tensor(pad, 'avg', 2, group)
          reduce_w: f32[4,4] = wait_tensor(reduce_scatter)                      # just before its first use
          detach = aten.detach(reduce_w)
Requires  functional
Ensures   parameters_sharded

Parameter inputs become this rank's padded rows. A gathered parameter is a view of the collective's output;
only padding makes a slice of it. 0-d parameters are replicated: nothing to gather, gradients all-reduced.
Empty ones need no collective, nor does anything in a world of one. Gradients are averaged as
`fully_shard` does: by the backend's own mean, for float16 by dividing before and after the sum.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.layout import ParamLayout
from fsdp_fx.ops import gather_parameter, reduce_gradient
from fsdp_fx.signature import ParameterInput
from fsdp_fx.step_graph import Collective, Decision, StepGraph, emit, is_view

__all__ = ["shard_parameters"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@graph_pass(requires={"functional"}, ensures={"parameters_sharded"})
def shard_parameters(step: StepGraph) -> StepGraph:
    if "parameters_sharded" in step.properties:
        return step
    for node, spec in step.inputs():
        if isinstance(spec, ParameterInput):
            with step.mode:
                full = node.meta["val"]
                node.meta["val"] = full.new_empty(step.layout[spec.name].shard_shape)
    for node in list(step.graph.nodes):
        if node.target is gather_parameter:
            _gather(step, node, step.layout[str(node.args[1])])
        elif node.target is reduce_gradient:
            _reduce(step, node, step.layout[str(node.args[1])])
    return step.decided(*_decisions(step))


def _decisions(step: StepGraph) -> list[Decision]:
    if step.layout.world == 1:
        return [Decision("shard_parameters", "step", "no collectives", "the world has one rank")]
    decisions = []
    for layout in step.layout.params:
        if layout.replicated:
            decisions.append(
                Decision("shard_parameters", layout.name, "replicated", "a 0-d parameter has no rows to divide")
            )
        elif layout.numel == 0:
            decisions.append(Decision("shard_parameters", layout.name, "no collectives", "it is empty"))
        elif layout.padded:
            decisions.append(
                Decision(
                    "shard_parameters",
                    layout.name,
                    f"padded to {layout.padded_shape[0]} rows",
                    f"{layout.rows} rows do not divide by {layout.world} ranks",
                )
            )
    return decisions


def _gather(step: StepGraph, border: fx.Node, layout: ParamLayout) -> None:
    shard = border.args[0]
    assert isinstance(shard, fx.Node)
    graph = step.graph
    result: fx.Node = shard
    with graph.inserting_before(border):
        if layout.numel == 0:
            result = emit(step, aten.new_empty.default, (shard, list(layout.shape)), {}, border)
        elif step.layout.world > 1 and not layout.replicated:
            start = emit(step, c10d.all_gather_into_tensor.default, (shard, layout.world, step.group), {}, border)
            start.meta["collective"] = _note("all_gather", layout, border, layout.dtype)
            result = emit(step, c10d.wait_tensor.default, (start,), {}, border)
            if layout.padded:
                result = emit(step, aten.slice.Tensor, (result, 0, 0, layout.rows), {}, border)
    border.replace_all_uses_with(result)
    graph.erase_node(border)
    if result is not shard:
        result.name = border.name


def _note(kind: str, layout: ParamLayout, border: fx.Node, dtype: torch.dtype) -> Collective:
    nbytes = layout.shard_numel * (layout.world if not layout.replicated else 1) * dtype.itemsize
    return Collective(kind, (layout.name,), nbytes, dtype, border.meta["phase"], border.meta.get("frame"))


def _reduce(step: StepGraph, border: fx.Node, layout: ParamLayout) -> None:
    grad = border.args[0]
    assert isinstance(grad, fx.Node)
    graph = step.graph
    world = step.layout.world
    first_use = min(border.users, default=step.output_node())  # nodes compare by their place in the graph
    with graph.inserting_before(border):
        value = grad.meta["val"]
        if layout.numel == 0:
            result = emit(step, aten.new_empty.default, (grad, list(layout.shard_shape)), {}, border)
        elif world == 1:
            result = grad
            if not _owned_alone(grad):
                result = emit(step, aten.clone.default, (grad,), {"memory_format": torch.contiguous_format}, border)
        else:
            if layout.padded:
                missing = layout.padded_shape[0] - layout.rows
                padding = [0, 0] * (len(layout.shape) - 1) + [0, missing]
                grad = emit(step, aten.constant_pad_nd.default, (grad, padding), {}, border)
                grad.meta["made_by"] = "shard_parameters"
            elif not value.is_contiguous():
                grad = emit(step, aten.clone.default, (grad,), {"memory_format": torch.contiguous_format}, border)
                grad.meta["made_by"] = "shard_parameters"
            before, after, kind = _divide_factors(value.dtype, world)
            if before != 1:
                grad = emit(step, aten.div.Scalar, (grad, before), {}, border)
            if layout.replicated:
                start = emit(step, c10d.all_reduce.default, (grad, kind, step.group), {}, border)
                start.meta["collective"] = _note("all_reduce", layout, border, value.dtype)
            else:
                start = emit(step, c10d.reduce_scatter_tensor.default, (grad, kind, world, step.group), {}, border)
                start.meta["collective"] = _note("reduce_scatter", layout, border, value.dtype)
            with graph.inserting_before(first_use):
                origin = first_use if first_use.op != "output" else border
                result = emit(step, c10d.wait_tensor.default, (start,), {}, origin)
                result.meta.update(domain="sharded", phase="sharded")
                if after != 1:
                    result = emit(step, aten.div.Scalar, (result, after), {}, result)
    border.replace_all_uses_with(result)
    graph.erase_node(border)
    result.meta["gradient_of"] = layout.name
    if result is not border.args[0]:
        result.name = border.name


def _divide_factors(dtype: torch.dtype, world: int) -> tuple[int, float, str]:
    """(divide before, divide after, reduction): the mean over ranks; float16 is divided by about sqrt(world)
    on each side of the sum so that neither overflows nor vanishes (the rule of `fully_shard`)."""
    if dtype != torch.float16:
        return 1, 1, "avg"
    before = 1
    while world % before == 0 and world / before > before:
        before *= 2
    return before, world / before, "sum"


def _owned_alone(grad: fx.Node) -> bool:
    """True if the sharded domain may write this gradient in place: fresh contiguous memory nobody else sees."""
    if not grad.meta["val"].is_contiguous():
        return False
    node = grad
    while True:
        if node.op != "call_function" or len(node.users) != 1:
            return False
        if not is_view(node):
            return True
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
