"""`step.report()`: what was inserted, why, and what it costs, as data that prints itself."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from fsdp_fx.printing import dtype_text
from fsdp_fx.step_graph import Decision, StepGraph

__all__ = ["CollectiveRow", "Report"]


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a step. `nbytes` is its full payload; a rank sends and receives (world-1)/world of it."""

    number: int
    kind: str
    operator: str
    phase: str
    dtype: str
    nbytes: int
    parameters: tuple[str, ...]
    first_use: str


@dataclass(frozen=True)
class Report:
    """What was compiled. Bytes are per rank and step; seconds are wall time of this process."""

    world: int
    parameter_bytes: int
    shard_bytes: int
    collectives: tuple[CollectiveRow, ...]
    decisions: tuple[Decision, ...]
    seconds: dict[str, float]
    traces: tuple[str, ...]
    """Why each graph was traced, first to last."""
    nodes: int

    @property
    def communicated_bytes(self) -> int:
        """Bytes that a rank receives per step, all collectives together (the field's usual count of
        (world-1)/world of a gathered or reduced payload, twice that for an all-reduce)."""
        share = (self.world - 1) / self.world
        return int(sum(row.nbytes * share * (2 if row.kind == "all_reduce" else 1) for row in self.collectives))

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=132, highlight=False, color_system=None)
        console.print(
            f"fsdp_fx: {self.world} rank{'s' if self.world != 1 else ''}, "
            f"parameters {_bytes(self.parameter_bytes)}, {_bytes(self.shard_bytes)} of them here (padding included); "
            f"{self.nodes} nodes; {_bytes(self.communicated_bytes)} received per step"
        )
        console.print(self._collective_table())
        console.print(self._decision_table())
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        console.print(f"compile time: {sum(self.seconds.values()):.2f} s ({stages})")
        for number, reason in enumerate(self.traces):
            console.print(f"trace {number}: {reason}")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _collective_table(self) -> Table:
        table = Table("no", "collective", "phase", "dtype", "bytes", "parameters", "first needed at", box=box.SIMPLE)
        for row in self.collectives:
            names = row.parameters
            shown = ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]} ({len(names)})"
            kind = row.kind if row.kind == row.operator else f"{row.kind} ({row.operator})"
            table.add_row(str(row.number), kind, row.phase, row.dtype, _bytes(row.nbytes), shown, row.first_use)
        return table

    def _decision_table(self) -> Table:
        table = Table("pass", "about", "decided", "because", box=box.SIMPLE)
        for decision in self.decisions:
            table.add_row(decision.stage, decision.subject, decision.choice, decision.reason)
        return table


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def make_report(step: StepGraph, shard_bytes: int, seconds: dict[str, float], traces: list[str]) -> Report:
    """Reads everything off the last stage's graph."""
    rows = []
    for number, (node, info) in enumerate(step.collectives()):
        operator = str(node.target).removeprefix("_c10d_functional.").split(".")[0]
        operator = operator.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
        rows.append(
            CollectiveRow(
                number,
                info.kind,
                operator,
                info.phase,
                dtype_text(info.dtype),
                info.nbytes,
                info.parameters,
                info.frame.short() if info.frame else "",
            )
        )
    return Report(
        world=step.layout.world,
        parameter_bytes=sum(p.nbytes for p in step.layout.params),
        shard_bytes=shard_bytes,
        collectives=tuple(rows),
        decisions=step.decisions,
        seconds=seconds,
        traces=tuple(traces),
        nodes=len(step.graph.nodes),
    )
