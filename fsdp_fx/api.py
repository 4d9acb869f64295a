"""`fsdp_compile` and the step it returns."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fx._torch_private import backend_name
from fsdp_fx.agreement import Agreement, check_kept
from fsdp_fx.capture import capture
from fsdp_fx.errors import ConfigError, FsdpFxError, message
from fsdp_fx.guards import Guards
from fsdp_fx.optimizers import rebind_optimizers
from fsdp_fx.pipeline import Pipeline
from fsdp_fx.printing import StepGraphModule, diff
from fsdp_fx.program import Program
from fsdp_fx.report import Report, make_report
from fsdp_fx.signature import StepSignature
from fsdp_fx.state import OptimizerShards
from fsdp_fx.storage import ShardedModel
from fsdp_fx.tree import flatten
from fsdp_fx.world import check_alive, find_mesh, is_simulated

__all__ = ["CompiledStep", "fsdp_compile"]

_LOG = logging.getLogger("fsdp_fx")

CACHE_SIZE = 32
"""Graphs kept per step; the least recently used goes first."""

R = TypeVar("R")


def fsdp_compile(
    train_step: Callable[..., R],
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
) -> CompiledStep[R]:
    """Shards `model` over `mesh` and returns `train_step` as a compiled, fully sharded step.

    `train_step(model, *args, **kwargs)` is ordinary single-device code: forward, loss, `backward()`, clipping,
    `optimizer.step()`, `zero_grad()`. Call the result as `step(*args, **kwargs)`, on every rank, each with its own
    batch. The first call traces and compiles; later calls run.

    `mesh`: a 1-D `DeviceMesh` over the whole world. Default: all ranks; without a process group, the one that
    torchrun's environment describes, else a world of one.

    Afterwards `model.parameters()` are DTensors with `Shard(0)` (0-d ones `Replicate()`), whose memory the step
    trains: state dicts, `torch.distributed.checkpoint` and eager optimizers work on them. Optimizers that hold the
    model's parameters, wherever they are, are pointed at the shards. Lists of parameters that you keep yourself work
    inside the step; outside of it, read `model.parameters()` anew.

    Gradients are averaged over ranks, as `fully_shard` does. Hyperparameters in `optimizer.param_groups` are
    read at every call; other Python values that the step uses (attributes, globals, closures) are baked in when it
    is traced. Calling it again on the same model, for example with an evaluation step, shares the shards.

    Raises `ConfigError` for a model or mesh that cannot be sharded. Calls of the step raise `CaptureError` for code
    that cannot be one graph, `PlanMismatchError` if ranks disagree, `CollectiveError` if another rank is gone.
    """
    if not callable(train_step) or not isinstance(model, nn.Module):
        raise ConfigError(
            message(
                f"fsdp_compile got ({type(train_step).__name__}, {type(model).__name__}).",
                "It needs a function and an nn.Module, in this order.",
                "fsdp_compile(train_step, model) with def train_step(model, *batch): ...",
            )
        )
    sharded = ShardedModel.of(model)
    if sharded is None:
        parameters = list(model.parameters())
        device_type = mesh.device_type if mesh else (parameters[0].device.type if parameters else "cpu")
        mesh = find_mesh(mesh, "cpu" if device_type == "meta" else device_type)
        sharded = ShardedModel(model, mesh)
        rebind_optimizers(sharded)
        sharded.release_replaced()
        sharded.optimizer_shards = OptimizerShards(sharded)
    elif mesh is not None and mesh != sharded.mesh:
        raise ConfigError(
            message(
                "The model is sharded over another mesh already.",
                "All steps of a model share its shards.",
                "Leave `mesh` out when you compile a second step.",
            )
        )
    return CompiledStep(train_step, model, sharded)


class CompiledStep(Generic[R]):
    """A sharded training step. Call it like the step it was made of, without the model.

    `graphs`: every stage of the last compiled graph by name, "capture" first, as `GraphModule`s that print with
    types, roles and the user's lines. `graph`: the one that runs. `report()`, `diff(a, b)`: what was done and why.
    """

    def __init__(self, train_step: Callable[..., R], model: nn.Module, sharded: ShardedModel):
        self._train_step = train_step
        self._model = model
        self._sharded = sharded
        self._state: OptimizerShards = sharded.optimizer_shards
        self._guards = Guards(model, sharded)
        self._agreement = Agreement(sharded.rank, sharded.mesh.size(), is_simulated())
        self._programs: dict[Any, list[Program]] = {}
        self._plans: dict[Any, list[str]] = {}
        self._last: Program | None = None
        self._last_key: Any = None
        self._seconds: dict[str, float] = {}
        self._traces: list[str] = []
        self._arguments: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Runs the step on this rank's batch; compiles first if nothing compiled fits."""
        check_alive(self._sharded.mesh)
        if self._sharded.meta:
            raise ConfigError(
                message(
                    "The model's parameters are on the meta device.",
                    "They have shapes but no values, so the step can be compiled, not run.",
                    "step.compile(*args) and step.report() work; to train, build the model on a real device.",
                )
            )
        program, leaves = self._program(args, kwargs)
        result: R = program(leaves)
        return result

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep[R]:
        """Compiles for arguments like these (meta tensors will do) without running; returns the step itself."""
        self._program(args, kwargs)
        return self

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, list[Any]]:
        kwargs = dict(sorted(kwargs.items()))  # their order means nothing
        leaves, tree = flatten((args, kwargs))
        self._sharded.check_parameters()
        key = self._guards.key(leaves, tree)
        reason = None
        for program in self._programs.get(key, ()):
            reason = program.why_not()
            if reason is None:
                self._last, self._last_key = program, key
                return program, leaves
        if reason is None:
            reason = "first call" if self._last_key is None else self._guards.difference(self._last_key, key)
        program = self._compile(args, kwargs, key, reason)
        # Other objects among the arguments are known by id, which must not be used again for another object.
        self._arguments += [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        return program, leaves

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, reason: str) -> Program:
        # A retrace is worth a warning, once and not once a rank.
        log = _LOG.warning if self._traces and self._sharded.rank == 0 else _LOG.info
        log("tracing '%s': %s", getattr(self._train_step, "__name__", "step"), reason)
        begun = time.perf_counter()
        try:
            with _gc_paused():
                captured = capture(self._train_step, self._model, args, kwargs, self._sharded)
                step = captured.step
                step.group = self._sharded.mesh.get_group().group_name
                step.backend = backend_name(self._sharded.mesh.get_group(), self._sharded.mesh.device_type)
                step.mesh = self._sharded.mesh
                step.rank = self._sharded.rank
                step.timings["capture"] = time.perf_counter() - begun
                stages = Pipeline().run(step)
        except Exception as error:
            self._agreement.failed(error)
            raise
        self._agree(key, captured.step.signature, stages.step.plan())
        program = Program(captured, stages, self._model, self._sharded, self._state)
        self._programs.setdefault(key, []).append(program)
        self._trim(key)
        self._seconds = stages.step.timings
        self._traces.append(reason)
        self._last, self._last_key = program, key
        self._dump()
        return program

    def _agree(self, key: Any, signature: StepSignature, plan: list[str]) -> None:
        structure = (self._guards.structure(key), str(signature.outputs))
        kept = self._plans.get(structure)
        if kept is None:
            self._agreement.agree(plan)
            self._plans[structure] = plan
        else:
            check_kept(kept, plan)

    def _trim(self, newest: Any) -> None:
        while sum(len(p) for p in self._programs.values()) > CACHE_SIZE:
            oldest = next(iter(self._programs))
            if oldest == newest and len(self._programs) == 1:
                self._programs[oldest].pop(0)
            else:
                del self._programs[oldest]
            log = _LOG.warning if self._sharded.rank == 0 else _LOG.info
            log("dropped the oldest of %d compiled graphs; shapes that vary much retrace often", CACHE_SIZE)

    # --- reading --------------------------------------------------------------------------------------------

    def _compiled(self) -> Program:
        if self._last is None:
            raise FsdpFxError(
                message(
                    "The step has not been compiled yet.",
                    "It is traced at its first call, for the arguments given there.",
                    "Call the step once, or step.compile(*args).",
                )
            )
        return self._last

    @property
    def graphs(self) -> dict[str, StepGraphModule]:
        """Every stage of the last compiled graph, "capture" first, in the order of the passes."""
        return dict(self._compiled().stages.graphs)

    @property
    def graph(self) -> StepGraphModule:
        """The graph that runs."""
        return list(self._compiled().stages.graphs.values())[-1]

    @property
    def signature(self) -> StepSignature:
        """Roles of the running graph's inputs and outputs."""
        return self._compiled().stages.step.signature

    @property
    def traces(self) -> list[str]:
        """Why each trace happened, first to last; its length is the number of traces."""
        return list(self._traces)

    def diff(self, before: str, after: str, context: int = 1) -> str:
        """What lies between two stages, by their names in `graphs`."""
        graphs = self.graphs
        for name in (before, after):
            if name not in graphs:
                raise FsdpFxError(f"no stage '{name}'; the stages are {list(graphs)}")
        return diff(graphs[before].graph, graphs[after].graph, context)

    def report(self) -> Report:
        """Collectives, decisions with reasons, compile time by stage and the traces so far; `print` it."""
        step = self._compiled().stages.step
        return make_report(step, self._sharded.nbytes(), dict(self._seconds), self._traces)

    def _dump(self) -> None:
        """Writes every stage, the diffs between them and the report if FSDP_FX_DUMP names a folder."""
        folder = os.environ.get("FSDP_FX_DUMP")
        if not folder:
            return
        name = getattr(self._train_step, "__name__", "step")
        target = Path(folder) / f"rank{self._sharded.rank}" / f"{self._agreement.number}_{name}_{len(self._traces) - 1}"
        target.mkdir(parents=True, exist_ok=True)
        before: StepGraphModule | None = None
        for number, (stage, module) in enumerate(self.graphs.items()):
            (target / f"{number:02d}_{stage}.txt").write_text(str(module))
            if before is not None:
                (target / f"{number:02d}_{stage}.diff").write_text(diff(before.graph, module.graph))
            before = module
        (target / "report.txt").write_text(str(self.report()) + "\n")


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Tracing makes many long-lived objects; the collector would walk them again and again for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
