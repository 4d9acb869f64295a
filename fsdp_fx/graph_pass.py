"""What a pass is: a function from step graph to step graph that says what it needs and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdp_fx.step_graph import StepGraph

__all__ = ["PROPERTIES", "GraphPass", "graph_pass"]

PROPERTIES = {
    "captured": "one graph of the single-device step; gradient borders are explicit",
    "domains": "every node is marked local or sharded; every local read of a parameter goes through a border",
    "functional": "the local domain mutates nothing but declared buffers and batch tensors, at its end",
    "parameters_sharded": "parameter inputs are padded shards; borders are collectives with waits",
    "optimizer_sharded": "the sharded domain works on shards; what crosses ranks there is a collective",
    "bucketed": "collectives of neighbours are merged; flat buffers are inputs",
    "scheduled": "collectives start early enough to overlap, within a fixed number in flight",
    "lowered": "each collective is the operator that is fastest on this backend",
}
"""Everything a pass can require or ensure; `verify` checks those that hold after each pass."""


@dataclass(frozen=True)
class GraphPass:
    """One pass: call it with a step graph of its own (it may change it in place) and use what it returns."""

    run: Callable[[StepGraph], StepGraph]
    requires: frozenset[str]
    ensures: frozenset[str]

    @property
    def name(self) -> str:
        return self.run.__name__

    def __call__(self, step: StepGraph) -> StepGraph:
        missing = self.requires - step.properties
        if missing:
            raise ValueError(f"pass '{self.name}' needs {sorted(missing)}; the graph has {sorted(step.properties)}")
        step = self.run(step)
        step.properties = step.properties | self.ensures
        return step


def graph_pass(*, requires: Iterable[str], ensures: Iterable[str]) -> Callable[..., GraphPass]:
    """Makes a `GraphPass` of a function. A second run of any pass must change nothing."""

    def make(run: Callable[[StepGraph], StepGraph]) -> GraphPass:
        made = GraphPass(run, frozenset(requires), frozenset(ensures))
        unknown = (made.requires | made.ensures) - PROPERTIES.keys()
        if unknown:
            raise ValueError(f"pass '{made.name}' names unknown properties {sorted(unknown)}")
        return made

    return make
