"""bucket: merge the collectives of parameters that lie side by side in storage.

Before    all_gather: f32[4,4] = all_gather_into_tensor(p_w, 2, group);    gather_w = wait_tensor(all_gather)
          all_gather_1: f32[4] = all_gather_into_tensor(p_b, 2, group);    gather_b = wait_tensor(all_gather_1)
          reduce_scatter = reduce_scatter_tensor(grad_w, 'avg', 2, group); reduce_w = wait_tensor(reduce_scatter)
          reduce_scatter_1 = ...
After     shards: f32[12] = aten.slice(storage_f32, 0, 0, 12)               # no copy: shards are neighbours
          all_gather: f32[24] = all_gather_into_tensor(shards, 2, group)
          wait = wait_tensor(all_gather);  view: f32[2,12] = aten.view(wait, [2, 12])
          split = aten.split_with_sizes_copy(view, [8, 4], 1)
          gather_w: f32[4,4] = aten.view(split[0], [4, 4]);  gather_b: f32[8] = aten.view(split[1], [8])
          pack: f32[2,12] = aten._chunk_cat([grad_w, grad_b], 0, 2)         # rows of rank 0, rows of rank 1
          reduce_scatter: f32[12] = reduce_scatter_tensor(pack, 'avg', 2, group)
          reduce_w = aten.view(split[0], ...)                               # views of one gradient buffer
Requires  optimizer_sharded
Ensures   bucketed

A bucket is a run of neighbours in one flat buffer (registration order, one dtype) of at most BUCKET_BYTES
gathered; it is gathered at its first use and reduced when its last gradient is there. A larger limit saves
latency and costs memory and overlap.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.fx as fx

from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.layout import ParamLayout
from fsdp_fx.printing import dtype_text
from fsdp_fx.signature import ParameterInput, StorageInput
from fsdp_fx.step_graph import Collective, Decision, StepGraph, emit

__all__ = ["BUCKET_BYTES", "bucket"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

BUCKET_BYTES = 16 * 2**20
"""Largest gathered bucket. Near the size of one transformer block of 4M float32 parameters, where latency is
already under a tenth of the transfer on the slow links measured here."""


@dataclass(frozen=True)
class _Member:
    """One unmerged collective: its start, its wait, and the node that carries the border's result."""

    layout: ParamLayout
    start: fx.Node
    wait: fx.Node
    result: fx.Node


@graph_pass(requires={"optimizer_sharded"}, ensures={"bucketed"})
def bucket(step: StepGraph) -> StepGraph:
    if "bucketed" in step.properties:
        return step
    ranges = _ranges(step)
    gathers = _members(step, c10d.all_gather_into_tensor.default)
    reduces = _members(step, c10d.reduce_scatter_tensor.default)
    storages: dict[torch.dtype, fx.Node] = {}
    decisions = []
    for members in _group(gathers, ranges):
        if len(members) > 1:
            _merge_gathers(step, members, storages)
        decisions.append(_decision("gather", members))
    for members in _group(reduces, ranges):
        if len(members) > 1 and members[0].start.args[1] == "avg":
            _merge_reduces(step, members)
            decisions.append(_decision("reduce", members))
        elif len(members) > 1:
            decisions.append(
                Decision("bucket", _span(members), "reduces kept apart", "float16 gradients are divided one by one")
            )
    return step.decided(*decisions)


def _span(members: list[_Member]) -> str:
    first, last = members[0].layout.name, members[-1].layout.name
    return first if first == last else f"{first} .. {last}"


def _decision(kind: str, members: list[_Member]) -> Decision:
    nbytes = sum(m.layout.shard_numel * m.layout.world * m.layout.dtype.itemsize for m in members)
    choice = f"one {kind} for {len(members)}" if len(members) > 1 else f"a {kind} of its own"
    reason = f"{nbytes} bytes, neighbours in storage, limit {BUCKET_BYTES}"
    return Decision("bucket", _span(members), choice, reason)


def _ranges(step: StepGraph) -> dict[str, int]:
    """Parameter -> number of its bucket, by storage order and size alone: the same on every rank."""
    numbers: dict[str, int] = {}
    filled: dict[torch.dtype, tuple[int, int]] = {}
    count = 0
    for layout in step.layout.params:
        if layout.replicated or layout.numel == 0:
            filled.pop(layout.dtype, None)  # a hole in the run
            continue
        nbytes = layout.span * layout.world * layout.dtype.itemsize
        number, used = filled.get(layout.dtype, (-1, 0))
        if number < 0 or used + nbytes > BUCKET_BYTES:
            number, used = count, 0
            count += 1
        filled[layout.dtype] = (number, used + nbytes)
        numbers[layout.name] = number
    return numbers


def _members(step: StepGraph, target: object) -> list[_Member]:
    members = []
    for start, info in step.collectives():
        if start.target is not target or len(info.parameters) != 1 or info.phase == "sharded":
            continue
        (wait,) = start.users
        result = wait
        layout = step.layout[info.parameters[0]]
        if target is c10d.all_gather_into_tensor.default and layout.padded:
            (result,) = wait.users
        members.append(_Member(layout, start, wait, result))
    return members


def _group(members: list[_Member], ranges: dict[str, int]) -> list[list[_Member]]:
    """Members by bucket, segment, dtype and how often the parameter came before; storage neighbours only."""
    seen: dict[tuple[str, int], int] = defaultdict(int)
    groups: dict[tuple[object, ...], list[_Member]] = {}
    for member in members:
        segment = member.start.meta.get("segment", 0)
        again = seen[member.layout.name, segment]
        seen[member.layout.name, segment] += 1
        dtype = member.start.meta["val"].dtype
        key = (ranges[member.layout.name], segment, again, dtype, member.start.args[1])
        groups.setdefault(key, []).append(member)
    runs: list[list[_Member]] = []
    for group in groups.values():
        group.sort(key=lambda m: m.layout.index)
        for position, member in enumerate(group):
            before = group[position - 1].layout if position else None
            if before is None or before.offset + before.span != member.layout.offset:
                runs.append([])
            runs[-1].append(member)
    return runs


def _merge_gathers(step: StepGraph, members: list[_Member], storages: dict[torch.dtype, fx.Node]) -> None:
    first = min(m.start for m in members)
    dtype, world = members[0].layout.dtype, members[0].layout.world
    begin = members[0].layout.offset
    end = members[-1].layout.offset + members[-1].layout.span
    sizes: list[int] = []
    places: list[int] = []
    for member in members:
        places.append(len(sizes))
        sizes.append(member.layout.shard_numel)
        if member.layout.span > member.layout.shard_numel:
            sizes.append(member.layout.span - member.layout.shard_numel)
    made = []
    with step.graph.inserting_before(first):
        flat = _storage(step, dtype, storages)
        shards = emit(step, aten.slice.Tensor, (flat, 0, begin, end), {}, first)
        start = emit(step, c10d.all_gather_into_tensor.default, (shards, world, step.group), {}, first)
        start.meta["collective"] = _joint("all_gather", members, (end - begin) * world * dtype.itemsize, first)
        wait = emit(step, c10d.wait_tensor.default, (start,), {}, first)
        view = emit(step, aten.view.default, (wait, [world, end - begin]), {}, first)
        split = emit(step, aten.split_with_sizes_copy.default, (view, sizes, 1), {}, first)
        for member, place in zip(members, places, strict=True):
            layout = member.layout
            part = emit(step, operator.getitem, (split, place), {}, member.start)
            full = emit(step, aten.view.default, (part, list(layout.padded_shape)), {}, member.start)
            if layout.padded:
                full = emit(step, aten.slice.Tensor, (full, 0, 0, layout.rows), {}, member.start)
            made.append(full)
    for member, full in zip(members, made, strict=True):  # not inside: this erases the insertion point
        _take_over(step, member, full)


def _merge_reduces(step: StepGraph, members: list[_Member]) -> None:
    last = max(m.start for m in members)
    first_wait = min(m.wait for m in members)
    world = members[0].layout.world
    grads = [_unpacked(m.start.args[0]) for m in members]  # type: ignore[arg-type]
    sizes = [m.layout.shard_numel for m in members]
    dtype = grads[0].meta["val"].dtype
    with step.graph.inserting_before(last):
        pack = emit(step, aten._chunk_cat.default, (grads, 0, world), {}, last)
        flat = emit(step, aten.view.default, (pack, [sum(sizes) * world]), {}, last)
        start = emit(step, c10d.reduce_scatter_tensor.default, (flat, "avg", world, step.group), {}, last)
        start.meta["collective"] = _joint("reduce_scatter", members, sum(sizes) * world * dtype.itemsize, last)
    made = []
    with step.graph.inserting_before(first_wait):
        wait = emit(step, c10d.wait_tensor.default, (start,), {}, first_wait)
        split = emit(step, aten.split_with_sizes.default, (wait, sizes), {}, first_wait)
        for place, member in enumerate(members):
            part = emit(step, operator.getitem, (split, place), {}, member.wait)
            shard = emit(step, aten.view.default, (part, list(member.layout.shard_shape)), {}, member.wait)
            made.append(shard)
    for member, shard in zip(members, made, strict=True):
        _take_over(step, member, shard)


def _take_over(step: StepGraph, member: _Member, value: fx.Node) -> None:
    """Puts `value` in the place of a member's result and removes what nobody needs then."""
    name = member.result.name
    if "gradient_of" in member.result.meta:
        value.meta["gradient_of"] = member.result.meta["gradient_of"]
    member.result.replace_all_uses_with(value)
    node: fx.Node | None = member.result
    while node is not None and node.op == "call_function" and not node.users:
        before = node.args[0] if isinstance(node.args[0], fx.Node) else None
        step.graph.erase_node(node)
        node = before
    value.name = name


def _unpacked(grad: fx.Node) -> fx.Node:
    """The gradient itself, before the padding or copy that an unmerged reduce-scatter needs."""
    if grad.target in (aten.constant_pad_nd.default, aten.clone.default) and len(grad.users) == 1:
        source = grad.args[0]
        if isinstance(source, fx.Node) and grad.meta.get("made_by") == "shard_parameters":
            return source
    return grad


def _joint(kind: str, members: list[_Member], nbytes: int, origin: fx.Node) -> Collective:
    names = tuple(m.layout.name for m in members)
    info: Collective = origin.meta["collective"]
    return Collective(kind, names, nbytes, info.dtype, info.phase, info.frame)


def _storage(step: StepGraph, dtype: torch.dtype, storages: dict[torch.dtype, fx.Node]) -> fx.Node:
    if dtype not in storages:
        parameter = next(n for n, s in step.inputs() if isinstance(s, ParameterInput) and n.meta["val"].dtype == dtype)
        with step.mode:
            value = parameter.meta["val"].new_empty(step.layout.storages()[dtype])
        spec = StorageInput(f"storage_{dtype_text(dtype)}", str(dtype))
        (storages[dtype],) = step.add_inputs([(spec, value)])
    return storages[dtype]
