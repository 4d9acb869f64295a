"""lower: replace collectives by the operators that this backend runs fastest.

Before    reduce_scatter: f32[12] = reduce_scatter_tensor(pack, 'avg', 2, group)      # gloo
          wait: f32[12] = wait_tensor(reduce_scatter)
After     all_to_all: f32[24] = all_to_all_single(pack, [12, 12], [12, 12], group)
          wait_1: f32[24] = wait_tensor(all_to_all)
          view: f32[2,12] = aten.view(wait_1, [2, 12])
          wait: f32[12] = aten.mean(view, [0])
Requires  scheduled
Ensures   lowered

On gloo only, whose reduce_scatter takes 1.6 to 2.0 times as long as exchanging the pieces and averaging them
locally, and whose small all_reduce 1.2 times as long as gathering and adding (`benchmarks/collectives.py`); other
backends keep their own. With two ranks the sum has the same two terms, hence the same bits. An all-reduce of more
than ALL_REDUCE_BYTES stays: gathering it would move `world` times the bytes.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.step_graph import Decision, StepGraph, emit

__all__ = ["ALL_REDUCE_BYTES", "lower"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_REDUCE_BYTES = 65536


@graph_pass(requires={"scheduled"}, ensures={"lowered"})
def lower(step: StepGraph) -> StepGraph:
    if step.backend != "gloo" or "lowered" in step.properties:
        return step
    counts = {"reduce_scatter": 0, "all_reduce": 0}
    for node, info in step.collectives():
        world = step.layout.world
        if node.target is c10d.reduce_scatter_tensor.default and node.meta["val"].dtype.is_floating_point:
            _exchange(step, node, world)
        elif (
            node.target is c10d.all_reduce.default
            and node.args[1] == "sum"
            and info.nbytes * world <= ALL_REDUCE_BYTES
            and node.meta["val"].dtype.is_floating_point
        ):
            _gather_and_add(step, node, world)
        else:
            continue
        counts[info.kind] += 1
    return step.decided(
        *(
            Decision("lower", "step", f"{count} {kind} exchanged and added locally", "faster on gloo, same bits")
            for kind, count in counts.items()
            if count
        )
    )


def _exchange(step: StepGraph, start: fx.Node, world: int) -> None:
    source, kind = start.args[0], start.args[1]
    shape = list(start.meta["val"].shape)
    rows = shape[0]
    with step.graph.inserting_before(start):
        new = emit(
            step, c10d.all_to_all_single.default, (source, [rows] * world, [rows] * world, step.group), {}, start
        )
        new.meta["collective"] = start.meta["collective"]
    _add_up(step, start, new, [world, *shape], kind)


def _gather_and_add(step: StepGraph, start: fx.Node, world: int) -> None:
    source, kind = start.args[0], start.args[1]
    shape = list(start.meta["val"].shape)
    with step.graph.inserting_before(start):
        if not shape:
            source = emit(step, aten.view.default, (source, [1]), {}, start)
        new = emit(step, c10d.all_gather_into_tensor.default, (source, world, step.group), {}, start)
        new.meta["collective"] = start.meta["collective"]
    _add_up(step, start, new, [world, *shape], kind)


def _add_up(step: StepGraph, start: fx.Node, new: fx.Node, shape: list[int], kind: object) -> None:
    (wait,) = start.users
    with step.graph.inserting_before(wait):
        arrived = emit(step, c10d.wait_tensor.default, (new,), {}, wait)
        pieces = emit(step, aten.view.default, (arrived, shape), {}, wait)
        target = aten.mean.dim if kind == "avg" else aten.sum.dim_IntList
        total = emit(step, target, (pieces, [0]), {}, wait)
    if "gradient_of" in wait.meta:
        total.meta["gradient_of"] = wait.meta["gradient_of"]
    name = wait.name
    wait.replace_all_uses_with(total)
    step.graph.erase_node(wait)
    step.graph.erase_node(start)
    total.name = name
