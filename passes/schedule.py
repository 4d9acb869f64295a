"""schedule: start collectives early enough to run beside compute, and no earlier.

Before    wait_0 = wait_tensor(gather_0);  <compute 0>;  gather_1 = ...;  wait_1 = ...;  <compute 1>
          reduce_1 = ...;  <backward 0>;  reduce_0 = ...;  wait(reduce_1);  wait(reduce_0)
After     wait_0 = wait_tensor(gather_0);  gather_1 = ...;  <compute 0>;  wait_1 = ...;  <compute 1>
          reduce_1 = ...;  <backward 0>;  reduce_0 = ...;  wait(reduce_1);  wait(reduce_0)
Requires  bucketed
Ensures   scheduled

FSDP2's default, on the graph: the next gather starts when the one before has arrived (PREFETCH buckets
ahead), so one bucket more is in memory; at most IN_FLIGHT reduces are under way, because each holds its packed
gradients until it is waited for. A gather never moves before a write of its parameters (segments).
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.step_graph import Decision, StepGraph

__all__ = ["IN_FLIGHT", "PREFETCH", "schedule"]

c10d = torch.ops._c10d_functional

PREFETCH = 1
"""Gathers under way while compute uses an earlier one."""

IN_FLIGHT = 2
"""Reduces under way at once."""


@graph_pass(requires={"bucketed"}, ensures={"scheduled"})
def schedule(step: StepGraph) -> StepGraph:
    gathers = _chains(step, "all_gather")
    for before, after in zip(gathers, gathers[PREFETCH:], strict=False):
        _start_behind(step, before, after)
    reduces = _chains(step, "reduce_scatter")
    for early, late in zip(reduces, reduces[IN_FLIGHT:], strict=False):
        _wait_before(step, early, late)
    if "scheduled" in step.properties:
        return step
    return step.decided(
        Decision("schedule", "step", f"{PREFETCH} gather ahead", "it travels while the one before is computed with"),
        Decision("schedule", "step", f"at most {IN_FLIGHT} reduces under way", "each holds its packed gradients"),
    )


def _chains(step: StepGraph, kind: str) -> list[tuple[fx.Node, fx.Node]]:
    """(start, wait) of the parameter collectives of a kind, in order."""
    return [
        (node, next(iter(node.users)))
        for node, info in step.collectives()
        if info.kind == kind and info.phase != "sharded"
    ]


def _start_behind(step: StepGraph, before: tuple[fx.Node, fx.Node], after: tuple[fx.Node, fx.Node]) -> None:
    start = after[0]
    if start.meta.get("segment") != before[0].meta.get("segment"):
        return
    target = before[1]
    moving = [start]
    source = start.args[0]
    if isinstance(source, fx.Node) and source.op != "placeholder":
        moving.insert(0, source)
    if moving[0] <= target:
        return
    for node in reversed(moving):
        target.append(node)


def _wait_before(step: StepGraph, early: tuple[fx.Node, fx.Node], late: tuple[fx.Node, fx.Node]) -> None:
    """Moves the wait of `early` (and the split into views behind it) to just before `late` starts."""
    wait = early[1]
    if wait <= late[0]:
        return
    moving = [wait]
    for user in wait.users:
        if user.target is torch.ops.aten.split_with_sizes.default:
            moving.append(user)
            moving += [u for u in user.users if u.target is operator.getitem]
    for node in moving:
        late[0].prepend(node)
