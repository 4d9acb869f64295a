"""shard_optimizer: make the sharded domain (clipping, optimizer, gradient metrics) work on shards.

Before    norm: f32[] = aten.linalg_vector_norm(reduce_w, 2.0)         # reduce_w: f32[4,4] of f32[8,4]
          add: f32[] = aten.add(norm, 1e-06)
          mul_: f32[8,4] = aten.mul_(p_w, decay)
After     norm: f32[] = aten.linalg_vector_norm(reduce_w, 2.0)         # this rank's part
          pow: f32[] = aten.pow(norm, 2.0)
          all_reduce: f32[] = all_reduce(pow, 'sum', group)
          wait: f32[] = wait_tensor(all_reduce)
          pow_1: f32[] = aten.pow(wait, 0.5)                           # the norm of the whole
          add: f32[] = aten.add(pow_1, 1e-06)
          mul_: f32[4,4] = aten.mul_(p_w, decay)                       # same operator, on the shard
Requires  parameters_sharded
Ensures   optimizer_sharded

Elementwise operators (foreach and fused forms too) stay as they are, on shards. Everything else is asked of
DTensor's own sharding rules, one operator at a time, and what DTensor does on this rank is inlined;
pending sums are reduced when an elementwise operator or an output needs them. DTensor knows nothing of padded
rows: zero padding is neutral for sums and p-norms; before any other operator a padded value is gathered and
cut to its true rows. Optimizer state of a parameter's shape is sharded like the parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from fsdp_fx._torch_private import local_tensor, make_fx
from fsdp_fx.errors import CaptureError, message
from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.printing import node_text
from fsdp_fx.signature import (
    GradientInput,
    InputGradientOutput,
    OptimizerStateInput,
    OptimizerStateOutput,
    ParameterInput,
    UserOutput,
)
from fsdp_fx.step_graph import (
    Collective,
    Decision,
    StepGraph,
    emit,
    fake_result,
    fresh,
    is_random,
    remove_dead,
    written_args,
)

__all__ = ["shard_optimizer"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Rows:
    """A shard: rows of dimension 0 divided over the ranks, `rows` of them real; `zeros` if the padding is
    known to be zero."""

    rows: int
    zeros: bool = False


@dataclass(frozen=True)
class Whole:
    """The same value on every rank."""


@dataclass(frozen=True)
class Own:
    """A value of the local domain: each rank has its own."""


@dataclass(frozen=True)
class Pending:
    """A value still to be reduced over ranks, in DTensor's terms."""

    placement: Any


Placement: TypeAlias = Rows | Whole | Own | Pending
WHOLE = Whole()


@graph_pass(requires={"parameters_sharded"}, ensures={"optimizer_sharded"})
def shard_optimizer(step: StepGraph) -> StepGraph:
    if "optimizer_sharded" in step.properties:
        return step
    return _Sharder(step).run()


class _Sharder:
    def __init__(self, step: StepGraph):
        self.step = step
        self.world = step.layout.world
        self.placed: dict[fx.Node, Any] = {}  # Placement, or a list of them for operators with several results
        self.whole: dict[fx.Node, Any] = {}  # fake values on the whole (before this pass)
        self.reduced: dict[fx.Node, fx.Node] = {}
        self.gathered: dict[fx.Node, fx.Node] = {}
        self.traced: dict[Any, tuple[fx.GraphModule, list[Placement]]] = {}
        self.mesh: DeviceMesh | None = None
        self.through_dtensor: dict[str, int] = {}

    def run(self) -> StepGraph:
        step = self.step
        for node, spec in step.inputs():
            self._place_input(node, spec)
        for node in list(step.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            self.whole[node] = node.meta.get("val")
            if "gradient_of" in node.meta:
                layout = step.layout[node.meta["gradient_of"]]
                self.placed[node] = WHOLE if layout.replicated else Rows(layout.rows, zeros=True)
                with step.mode:
                    self.whole[node] = node.meta["val"].new_empty(layout.shape)
            elif node.op == "get_attr":
                self.placed[node] = WHOLE
            elif node.meta.get("domain") != "sharded":
                self.placed[node] = Own()
            else:
                with step.graph.inserting_before(node):
                    self._node(node)
        self._outputs()
        for name, count in sorted(self.through_dtensor.items()):
            step = step.decided(
                Decision("shard_optimizer", "step", f"{count} x {name} by DTensor's rule", "it is not elementwise")
            )
        return step

    def _place_input(self, node: fx.Node, spec: Any) -> None:
        self.whole[node] = node.meta["val"]
        placement: Placement = Own()
        if isinstance(spec, (ParameterInput, GradientInput, OptimizerStateInput)):
            layout = self.step.layout[spec.name if isinstance(spec, ParameterInput) else spec.parameter]
            placement = WHOLE
            if isinstance(spec, ParameterInput) or tuple(node.meta["val"].shape) == layout.shape:
                with self.step.mode:
                    self.whole[node] = node.meta["val"].new_empty(layout.shape)
                    node.meta["val"] = node.meta["val"].new_empty(layout.shard_shape)
                if not layout.replicated:
                    # User-visible memory: the user may have written the padding's neighbours, never the padding.
                    placement = Rows(layout.rows)
        elif type(spec).__name__ == "HyperparameterInput":
            placement = WHOLE
        self.placed[node] = placement

    # --- one node -------------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, position = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(position, int)
            placed = self.placed[source]
            self.placed[node] = placed[position] if isinstance(placed, list) else placed
            node.meta["val"] = source.meta["val"][position]
            return
        placements = [self.placed[a] for a in node.all_input_nodes]
        if any(isinstance(p, list) for p in placements):
            raise self._refuse(node, "takes the results of a multi-result operator as one value")
        if all(isinstance(p, Whole) for p in placements):
            self.placed[node] = WHOLE
            return
        sharded = any(isinstance(p, Rows) for p in placements)
        if sharded and is_random(node):
            raise self._refuse(
                node,
                "draws random numbers for a sharded tensor",
                "Ranks with the same seed would draw the same numbers for different rows.",
                "Draw the noise on the activations, or outside the step.",
            )
        if sharded and any(isinstance(p, Own) for p in placements):
            raise self._refuse(
                node,
                "combines a sharded gradient, parameter or state with a value that each rank has for itself",
                "Ranks would treat their rows differently, and the result depends on who owns which row.",
                "Reduce the value over ranks first, or apply it to the loss before backward.",
            )
        if _elementwise(node):
            self._elementwise(node)
        elif any(isinstance(p, Own) for p in placements):
            self._replace_arguments(node, self._reduce_if_pending)
            node.meta["val"] = fake_result(self.step, node)
            self.placed[node] = Own()
        else:
            self._by_dtensor(node)

    def _refuse(self, node: fx.Node, what: str, why: str = "", fix: str = "") -> CaptureError:
        return CaptureError(
            message(
                f"Operator {node.target} {what}.",
                why or "The sharded domain has no rule for it.",
                fix or "Report the step; do this part outside of it meanwhile.",
                str(node.meta.get("frame") or ""),
                node_text(node),
            )
        )

    def _replace_arguments(self, node: fx.Node, by: Any) -> None:
        node.args = fx.node.map_arg(node.args, by)
        node.kwargs = fx.node.map_arg(node.kwargs, by)

    def _reduce_if_pending(self, node: fx.Node) -> fx.Node:
        placed = self.placed[node]
        if not isinstance(placed, Pending):
            return node
        if node not in self.reduced:
            if self.mesh is None:
                self.mesh = _mesh(self.step)
            gm, placements = self._trace(lambda t: t.redistribute(self.mesh, [Replicate()]), [node], [placed])
            self.reduced[node] = self._inline(gm, [node], node)[0]
            self.placed[self.reduced[node]] = placements[0]
            self.whole[self.reduced[node]] = self.reduced[node].meta["val"]
        return self.reduced[node]

    def _elementwise(self, node: fx.Node) -> None:
        self._replace_arguments(node, self._reduce_if_pending)
        rows = [p for a in node.all_input_nodes if isinstance(p := self.placed[a], Rows)]
        if not rows:
            node.meta["val"] = fake_result(self.step, node)
            own = any(isinstance(self.placed[a], Own) for a in node.all_input_nodes)
            self.placed[node] = _like(node.meta["val"], Own() if own else WHOLE)
            return
        if any(isinstance(self.placed[a], Whole) and a.meta["val"].dim() for a in written_args(node)):
            # Every rank holds the target whole, so all of them need all rows.
            self._replace_arguments(node, self._gathered)
            node.meta["val"] = fake_result(self.step, node)
            self.placed[node] = _like(node.meta["val"], WHOLE)
            return
        several = any(isinstance(a, (list, tuple)) for a in node.args if not isinstance(a, str))
        if not several:
            whole = self.whole[node]
            if any(self._broadcasts_rows(a, whole) for a in node.all_input_nodes):
                self._by_dtensor(node)
                return
            span = rows[0].rows
            self._replace_arguments(node, lambda a: self._rows_of(a, span, whole.dim()))
        node.meta["val"] = fake_result(self.step, node)
        zeros = _keeps_zero(node) and all(p.zeros for p in rows)
        if not several:
            self.placed[node] = Rows(rows[0].rows, zeros)
        else:
            first: Any = next(a for a in node.args if isinstance(a, (list, tuple)))
            self.placed[node] = [
                Rows(p.rows, zeros and p.zeros) if isinstance(p := self.placed[a], Rows) else p for a in first
            ]
        if written_args(node):
            self.gathered.clear()
            for a in written_args(node):
                if isinstance(p := self.placed[a], Rows):
                    self.placed[a] = replace(p, zeros=p.zeros and zeros)

    def _broadcasts_rows(self, argument: fx.Node, result: torch.Tensor) -> bool:
        """True if a shard's dimension 0 is not the result's dimension 0."""
        if not isinstance(self.placed[argument], Rows):
            return False
        shape = self.whole[argument].shape
        return len(shape) != result.dim() or shape[0] != result.shape[0]

    def _rows_of(self, argument: fx.Node, rows: int, dim: int) -> fx.Node:
        """This rank's rows of a whole value that spans the sharded dimension; others as they are."""
        value = argument.meta["val"]
        if not isinstance(self.placed[argument], Whole) or not isinstance(value, torch.Tensor):
            return argument
        if value.dim() < dim or value.dim() == 0 or value.shape[0] != rows or rows == 1:
            return argument
        return self._shard(argument, rows)

    def _shard(self, argument: fx.Node, rows: int) -> fx.Node:
        step, mine = self.step, -(-rows // self.world)
        value = argument.meta["val"]
        if mine * self.world != rows:
            padding = [0, 0] * (value.dim() - 1) + [0, mine * self.world - rows]
            argument = emit(step, aten.constant_pad_nd.default, (argument, padding), {}, argument)
        start = step.rank * mine
        piece = emit(step, aten.slice.Tensor, (argument, 0, start, start + mine), {}, argument)
        piece.meta.update(domain="sharded", phase="sharded")
        self.placed[piece] = Rows(rows, zeros=True)
        with step.mode:
            self.whole[piece] = value.new_empty(value.shape)
        return piece

    def _unpadded(self, argument: fx.Node) -> fx.Node:
        """A padded shard gathered and cut to its true rows; other values as they are."""
        placed = self.placed[argument]
        even = not isinstance(placed, Rows) or argument.meta["val"].shape[0] * self.world == placed.rows
        return argument if even else self._gathered(argument)

    def _gathered(self, argument: fx.Node) -> fx.Node:
        """All true rows of a shard; other values as they are. Gathered once until something is written."""
        placed = self.placed[argument]
        if not isinstance(placed, Rows):
            return argument
        if self.world == 1:
            return argument
        if argument not in self.gathered:
            self.gathered[argument] = self._gather(argument, placed)
        return self.gathered[argument]

    def _gather(self, argument: fx.Node, placed: Rows) -> fx.Node:
        step = self.step
        start = emit(step, c10d.all_gather_into_tensor.default, (argument, self.world, step.group), {}, argument)
        start.meta["collective"] = self._note("all_gather", start, start.meta["val"])
        wait = emit(step, c10d.wait_tensor.default, (start,), {}, argument)
        cut = emit(step, aten.slice.Tensor, (wait, 0, 0, placed.rows), {}, argument)
        cut.meta.update(domain="sharded", phase="sharded")
        wait.meta.update(domain="sharded", phase="sharded")
        self.placed[cut] = WHOLE
        self.whole[cut] = cut.meta["val"]
        return cut

    def _note(self, kind: str, node: fx.Node, payload: torch.Tensor) -> Collective:
        nbytes = payload.numel() * payload.itemsize
        node.meta.update(domain="sharded", phase="sharded")
        return Collective(kind, (), nbytes, payload.dtype, "sharded", node.meta.get("frame"))

    # --- through DTensor ------------------------------------------------------------------------------------

    def _by_dtensor(self, node: fx.Node) -> None:
        if self.world > 1 and not (_sums(node) and all(self._zeros(a) for a in node.all_input_nodes)):
            self._replace_arguments(node, self._unpadded)
        arguments = node.all_input_nodes
        tensors = [a for a in arguments if isinstance(a.meta["val"], torch.Tensor)]
        if all(isinstance(self.placed[a], Whole) for a in arguments):
            node.meta["val"] = fake_result(self.step, node)
            self.placed[node] = _like(node.meta["val"], WHOLE)
            return
        if self.world == 1:
            node.meta["val"] = fake_result(self.step, node)
            self.placed[node] = self._alone(node)
            return
        self.through_dtensor[str(node.target)] = self.through_dtensor.get(str(node.target), 0) + 1
        placements = [self.placed[a] for a in tensors]

        def call(*values: Any) -> Any:
            given = dict(zip(tensors, values, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: given.get(a, a.meta["val"]))
            return node.target(*args, **kwargs)  # type: ignore[operator]

        shape = pytree.tree_map_only(
            fx.Node, lambda a: tensors.index(a) if a in tensors else a.name, [node.args, node.kwargs]
        )
        key = (node.target, repr(shape), tuple(placements), tuple(_key(a.meta["val"]) for a in tensors))
        gm, results = self._trace(call, tensors, placements, key)
        new = self._inline(gm, tensors, node)
        several = isinstance(self.whole[node], (list, tuple))
        if several:
            for user in list(node.users):
                if user.target is operator.getitem:
                    position = user.args[1]
                    self.placed[new[position]] = results[position]  # type: ignore[index]
                    user.replace_all_uses_with(new[position])  # type: ignore[index]
                    self.step.graph.erase_node(user)
        else:
            self.placed[new[0]] = results[0]
            self.whole[new[0]] = self.whole[node]
            node.replace_all_uses_with(new[0])
        self.step.graph.erase_node(node)
        if not several and new[0].op != "placeholder":
            new[0].name = node.name

    def _alone(self, node: fx.Node) -> Any:
        """In a world of one every value is whole, but results that look like shards keep counting as such."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dim():
            return Rows(value.shape[0], zeros=True)
        return _like(value, WHOLE)

    def _zeros(self, argument: fx.Node) -> bool:
        placed = self.placed[argument]
        if not isinstance(placed, Rows):
            return True
        return placed.zeros or argument.meta["val"].shape[0] * self.world == placed.rows

    def _trace(
        self, call: Any, tensors: Sequence[fx.Node], placements: Sequence[Placement], key: Any = None
    ) -> tuple[fx.GraphModule, list[Placement]]:
        """What `call` on DTensors does on this rank, as a graph of local operators and collectives."""
        if key is not None and key in self.traced:
            return self.traced[key]
        if self.mesh is None:
            self.mesh = _mesh(self.step)
        mesh = self.mesh
        results: list[Placement] = []

        def local(*values: torch.Tensor) -> list[torch.Tensor]:
            given = [
                DTensor.from_local(v, mesh, [_torch_placement(p)], run_check=False)
                for v, p in zip(values, placements, strict=True)
            ]
            out = call(*given)
            flat = list(out) if isinstance(out, (list, tuple)) else [out]
            locals_ = []
            for value in flat:
                assert isinstance(value, DTensor)
                (placement,) = value.placements
                even = placement.is_shard(0) and value.shape[0] % self.world == 0
                if not (placement.is_partial() or placement.is_replicate() or even):
                    value = value.redistribute(mesh, [Replicate()])
                    (placement,) = value.placements
                results.append(
                    Rows(value.shape[0]) if even else Pending(placement) if placement.is_partial() else WHOLE
                )
                locals_.append(local_tensor(value))
            return locals_

        with self.step.mode, torch.no_grad():
            values = [fresh(t.meta["val"]) for t in tensors]
            gm = make_fx(local)(*values)
        remove_dead(gm.graph)
        for node in reversed(gm.graph.nodes):
            if node.target is aten.view.default and _same_view(node):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        if key is not None:
            self.traced[key] = (gm, results)
        return gm, results

    def _inline(self, gm: fx.GraphModule, tensors: Sequence[fx.Node], origin: fx.Node) -> list[fx.Node]:
        """Copies a traced piece before the insertion point, marking its collectives."""
        step = self.step
        mapping: dict[fx.Node, fx.Node] = dict(zip(gm.graph.find_nodes(op="placeholder"), tensors, strict=True))
        for node in gm.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: mapping[n])
                new = emit(step, node.target, args, kwargs, origin)
                new.meta.update(domain="sharded", phase="sharded")
                kind = _COLLECTIVES.get(node.target)
                if kind is not None:
                    new.meta["collective"] = self._note(kind, new, new.meta["val"])
                mapping[node] = new
                self.placed[new] = WHOLE
        results: Any = gm.graph.output_node().args[0]
        return [mapping[n] for n in results]

    # --- outputs --------------------------------------------------------------------------------------------

    def _outputs(self) -> None:
        step = self.step
        output = step.output_node()
        specs = []
        values = []
        with step.graph.inserting_before(output):
            for spec, node in zip(step.signature.outputs, step.output_args(), strict=True):
                node = self._reduce_if_pending(node)
                placed = self.placed[node]
                if isinstance(spec, UserOutput):
                    if isinstance(placed, Rows):
                        shape = (placed.rows, *node.meta["val"].shape[1:])
                        spec = replace(spec, placement="sharded", shape=shape)
                    elif isinstance(placed, Whole):
                        spec = replace(spec, placement="replicated")
                elif not isinstance(spec, InputGradientOutput):
                    layout = step.layout[spec.parameter]
                    wants_rows = not isinstance(spec, OptimizerStateOutput) or (
                        tuple(self.whole[node].shape) == layout.shape
                    )
                    if wants_rows and not layout.replicated and isinstance(placed, Whole):
                        node = self._shard(node, layout.rows)
                specs.append(spec)
                values.append(node)
        output.args = (tuple(values),)
        step.signature = replace(step.signature, outputs=tuple(specs))


def _mesh(step: StepGraph) -> DeviceMesh:
    assert step.mesh is not None
    return step.mesh


def _key(value: torch.Tensor) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype)


def _like(value: Any, placement: Placement) -> Any:
    return [placement] * len(value) if isinstance(value, (list, tuple)) else placement


def _same_view(node: fx.Node) -> bool:
    """DTensor wraps its locals in a `view` to their own shape."""
    source = node.args[0]
    return isinstance(source, fx.Node) and tuple(source.meta["val"].shape) == tuple(node.meta["val"].shape)


def _torch_placement(placed: Placement) -> Any:
    if isinstance(placed, Pending):
        return placed.placement
    return Shard(0) if isinstance(placed, Rows) else Replicate()


_COLLECTIVES = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
}

_ELEMENTWISE = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift_fresh_copy.default,
}

_FOREACH_WHOLE = ("_foreach_norm", "_foreach_max")


def _elementwise(node: fx.Node) -> bool:
    """True for operators that treat every element by itself, also over lists of tensors."""
    target = node.target
    if target in _ELEMENTWISE:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::")
    if name.startswith(("_foreach_", "_fused_")):
        return not name.startswith(_FOREACH_WHOLE)
    return torch.Tag.pointwise in target.tags


_ZERO_KEEPING = ("mul", "div", "neg", "abs", "sqrt", "detach", "alias", "clone", "_to_copy", "sign", "copy", "zero")


def _keeps_zero(node: fx.Node) -> bool:
    """True if a result is zero wherever the sharded arguments are, given finite scalars."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
    if name not in {n.rstrip("_") for n in _ZERO_KEEPING}:
        return False
    # x / y with a sharded y would be 0 / 0 in the padding.
    return name != "div" or not isinstance(node.args[1], (fx.Node, list)) or _is_scalar(node.args[1])


def _is_scalar(argument: Any) -> bool:
    if not isinstance(argument, fx.Node):
        return False
    value = argument.meta["val"]
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _sums(node: fx.Node) -> bool:
    """Reductions for which zeros in the padding are neutral: sums and p-norms with p > 0."""
    if node.target in (aten.sum.default,):
        return True
    if node.target is aten.linalg_vector_norm.default and len(node.args) < 3:
        order = node.args[1] if len(node.args) > 1 else 2
        return isinstance(order, (int, float)) and order > 0
    return False
