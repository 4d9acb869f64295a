"""How graphs print: shapes, dtypes, roles and the user's lines; and what a pass changed."""

from __future__ import annotations

import operator
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from fsdp_fx._torch_private import LazyGraphModule

if TYPE_CHECKING:
    from fsdp_fx.step_graph import StepGraph

__all__ = ["StepGraphModule", "diff", "graph_text", "type_text"]

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_text(dtype: torch.dtype) -> str:
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def type_text(value: Any) -> str:
    """`f32[3,4]` for tensors, `float` for symbols, `(a, b)` for several values."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}[{','.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(v) for v in value)})"
    if isinstance(value, (float, torch.SymFloat)):
        return "float"
    if isinstance(value, (int, torch.SymInt)):
        return "int"
    return type(value).__name__ if value is not None else "none"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return repr(value)


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def node_text(node: fx.Node) -> str:
    """One node as `name: type = op(arguments)`, without its origin."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    kind = type_text(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}: {kind}"
    if node.op == "get_attr":
        return f"{node.name} = constant {node.target}"
    if node.target is operator.getitem:
        return f"{node.name}: {kind} = {_argument(node.args[0])}[{node.args[1]}]"
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}: {kind} = {_target(node)}({', '.join(arguments)})"


def _origin(node: fx.Node) -> str:
    frame = node.meta.get("frame")
    modules = node.meta.get("nn_module_stack") or {}
    parts = [node.meta.get("phase", "")]
    if modules:
        parts.append(next(reversed(modules)))
    if frame is not None:
        parts.append(frame.short())
    return " ".join(part for part in parts if part)


def graph_text(graph: fx.Graph, roles: dict[str, str] | None = None, outputs: tuple[str, ...] = ()) -> str:
    """The whole graph; `# phase module file:line` heads each run of nodes of one origin."""
    roles = roles or {}
    lines = []
    origin = None
    for node in graph.nodes:
        if node.op == "placeholder":
            role = roles.get(node.name)
            lines.append(f"{node_text(node)}" + (f"  # {role}" if role else ""))
            continue
        if node.op == "output":
            lines.append(node_text(node))
            lines += [f"  # {position}: {role}" for position, role in enumerate(outputs)]
            continue
        now = _origin(node)
        if now != origin:
            lines.append(f"# {now}")
            origin = now
        note = node.meta.get("collective")
        lines.append(f"  {node_text(node)}" + (f"  # {', '.join(note.parameters)}" if note else ""))
    return "\n".join(lines) + "\n"


class StepGraphModule(LazyGraphModule):
    """An ordinary `GraphModule` whose `str()` shows types, roles and origins; `.code` is as always."""

    _roles: dict[str, str]
    _outputs: tuple[str, ...]

    def __str__(self) -> str:
        return graph_text(self.graph, getattr(self, "_roles", {}), getattr(self, "_outputs", ()))

    def show_roles(self, step: StepGraph) -> None:
        """Keeps the signature's text for printing."""
        self._roles = {spec.node: str(spec) for spec in step.signature.inputs}
        self._outputs = tuple(str(spec) for spec in step.signature.outputs)


def _moved(before: list[str], after: list[str]) -> set[str]:
    """Names that changed their place relative to the others: all but a longest common order."""
    position = {name: i for i, name in enumerate(before)}
    sequence = [position[name] for name in after]
    tails: list[int] = []
    tail_at: list[int] = []
    previous: list[int] = [-1] * len(sequence)
    for i, value in enumerate(sequence):
        at = bisect_left(tails, value)
        if at == len(tails):
            tails.append(value)
            tail_at.append(i)
        else:
            tails[at] = value
            tail_at[at] = i
        previous[i] = tail_at[at - 1] if at else -1
    kept: set[int] = set()
    i = tail_at[-1] if tail_at else -1
    while i >= 0:
        kept.add(i)
        i = previous[i]
    return {name for i, name in enumerate(after) if i not in kept}


def diff(before: fx.Graph, after: fx.Graph, context: int = 1) -> str:
    """What lies between two stages, by node name: `+` inserted, `-` removed, `~` other arguments or type,
    `>` moved; each run with `context` unchanged lines around it, and a count at the end."""
    old = {n.name: node_text(n) for n in before.nodes}
    new = {n.name: node_text(n) for n in after.nodes}
    common_old = [name for name in old if name in new]
    common_new = [name for name in new if name in old]
    moved = _moved(common_old, common_new)
    rows: list[tuple[str, str]] = []
    removed_after: dict[str | None, list[str]] = {}
    anchor: str | None = None
    for name in old:
        if name in new and name not in moved:
            anchor = name
        elif name not in new:
            removed_after.setdefault(anchor, []).append(name)
    rows += [("-", old[name]) for name in removed_after.get(None, [])]
    for name in new:
        if name not in old:
            rows.append(("+", new[name]))
        elif name in moved:
            rows.append((">", new[name]))
        elif old[name] != new[name]:
            rows.append(("~", new[name]))
        else:
            rows.append((" ", new[name]))
        if name in old and name not in moved:
            rows += [("-", old[gone]) for gone in removed_after.get(name, [])]
    changed = [i for i, (mark, _) in enumerate(rows) if mark != " "]
    shown = sorted({j for i in changed for j in range(i - context, i + context + 1) if 0 <= j < len(rows)})
    lines = []
    last = -1
    for i in shown:
        if i != last + 1:
            lines.append("  ...")
        lines.append(f"{rows[i][0]} {rows[i][1]}")
        last = i
    counts = {mark: sum(1 for m, _ in rows if m == mark) for mark in "+-~>"}
    lines.append(
        f"{counts['+']} inserted, {counts['-']} removed, {counts['~']} changed, {counts['>']} moved, "
        f"{sum(1 for m, _ in rows if m == ' ')} unchanged"
    )
    return "\n".join(lines) + "\n"
