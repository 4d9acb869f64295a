"""The line of passes, in one place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fsdp_fx.graph_pass import GraphPass
from fsdp_fx.passes.bucket import bucket
from fsdp_fx.passes.functionalize import functionalize
from fsdp_fx.passes.lower import lower
from fsdp_fx.passes.place_borders import place_borders
from fsdp_fx.passes.schedule import schedule
from fsdp_fx.passes.shard_optimizer import shard_optimizer
from fsdp_fx.passes.shard_parameters import shard_parameters
from fsdp_fx.printing import StepGraphModule
from fsdp_fx.step_graph import StepGraph
from fsdp_fx.verify import verify

__all__ = ["PASSES", "Pipeline", "Stages"]

# To add a pass: one module in passes/ with one function under @graph_pass, and one line here.
PASSES: tuple[GraphPass, ...] = (
    place_borders,  # first, so that every later pass knows local from sharded and sees each parameter read
    functionalize,  # before anything moves: only a domain without writes may be reordered
    shard_parameters,  # needs explicit borders; leaves one gather and one reduce a parameter
    shard_optimizer,  # needs sharded gradients; its own collectives (norms) appear here
    bucket,  # needs all collectives in place to merge them
    schedule,  # needs buckets: moves starts and waits
    lower,  # last: after it collectives are what the backend likes best, no longer what passes look for
)


@dataclass
class Stages:
    """Every stage's graph by name, in order, and the last step graph."""

    step: StepGraph
    graphs: dict[str, StepGraphModule] = field(default_factory=dict)

    def keep(self, name: str, step: StepGraph) -> None:
        module = step.module
        assert isinstance(module, StepGraphModule)
        module.show_roles(step)
        self.graphs[name] = module
        self.step = step


class Pipeline:
    """A checked order of passes: built only if each pass finds what it requires."""

    def __init__(self, passes: Sequence[GraphPass] = PASSES, given: frozenset[str] = frozenset({"captured"})):
        have = given
        for position, one in enumerate(passes):
            missing = one.requires - have
            if missing:
                raise ValueError(
                    f"pass {position} '{one.name}' requires {sorted(missing)}, which nothing before it ensures; "
                    f"order: {[p.name for p in passes]}"
                )
            have |= one.ensures
        self.passes = tuple(passes)
        self.given = given

    def run(self, captured: StepGraph) -> Stages:
        """Runs all passes on copies, verifying after each; `captured` itself stays as it is."""
        captured.properties = captured.properties | self.given
        verify(captured, "capture")
        stages = Stages(captured)
        stages.keep("capture", captured)
        current = captured
        for one in self.passes:
            begun = time.perf_counter()
            after = one(current.copy())
            verify(after, one.name, current)
            after = replace(after, timings={**after.timings, one.name: time.perf_counter() - begun})
            stages.keep(one.name, after)
            current = after
        return stages
