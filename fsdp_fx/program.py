"""One compiled graph and how it is called: arguments gathered by role, outputs put where they belong."""

from __future__ import annotations

import linecache
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_fx.capture import Captured, OutputRef
from fsdp_fx.errors import CollectiveError, message
from fsdp_fx.optimizers import Hyperparameter, read_hyperparameter, static_settings
from fsdp_fx.pipeline import Stages
from fsdp_fx.printing import StepGraphModule, node_text
from fsdp_fx.signature import (
    BatchInput,
    BufferInput,
    GradientInput,
    GradientOutput,
    HyperparameterInput,
    InputGradientOutput,
    OptimizerStateInput,
    OptimizerStateOutput,
    ParameterInput,
    StorageInput,
    UserOutput,
)
from fsdp_fx.state import OptimizerShards
from fsdp_fx.storage import ShardedModel

__all__ = ["Program"]


class Program:
    """A step graph ready to run for one set of guards."""

    def __init__(
        self, captured: Captured, stages: Stages, model: nn.Module, sharded: ShardedModel, state: OptimizerShards
    ):
        self.captured = captured
        self.stages = stages
        self.sharded = sharded
        self.state = state
        self._optimizers = [weakref.ref(o) for o in captured.optimizers]
        captured.optimizers = []  # weak references only: a dropped optimizer must not live on in a program
        self.settings = [static_settings(o) for o in self.optimizers()]
        self._guard = _guard_function(captured)
        module = stages.step.module
        assert isinstance(module, StepGraphModule)
        module.real_recompile()
        self._run = module.forward
        index_of = {p.name: p.index for p in sharded.layout.params}
        signature = stages.step.signature
        owners = {name: _owner(model, name) for name, _ in model.named_buffers()}
        storages = {str(dtype): flat for dtype, flat in sharded.storage.flats.items()}
        self._template: list[Any] = [None] * len(signature.inputs)
        self._gradients: list[tuple[int, int]] = []
        self._buffers: list[tuple[int, dict[str, Any], str]] = []
        self._hypers: list[tuple[int, int, Hyperparameter]] = []
        self._states: list[tuple[int, int, int, str]] = []
        self._batch: list[tuple[int, int]] = []
        for position, spec in enumerate(signature.inputs):
            match spec:
                case ParameterInput():
                    self._template[position] = sharded.storage.views[index_of[spec.name]]
                case StorageInput():
                    self._template[position] = storages[spec.dtype]
                case GradientInput():
                    self._gradients.append((position, index_of[spec.parameter]))
                case BufferInput():
                    self._buffers.append((position, *owners[spec.name]))
                case HyperparameterInput():
                    where = Hyperparameter(spec.group, spec.key, spec.index)
                    self._hypers.append((position, spec.optimizer, where))
                case OptimizerStateInput():
                    self._states.append((position, spec.optimizer, index_of[spec.parameter], spec.key))
                case BatchInput():
                    self._batch.append((position, spec.leaf))
        self._outputs = signature.outputs
        self._index_of = index_of
        lifted = {(i.optimizer, index_of[i.parameter], i.key) for i in captured.state_inits}
        self._needed = [s[1:] for s in self._states if s[1:] not in lifted]
        given = {s[1:] for s in self._states}
        self._created = [
            key
            for o in self._outputs
            if isinstance(o, OptimizerStateOutput) and (key := (o.optimizer, index_of[o.parameter], o.key)) not in given
        ]

    def optimizers(self) -> list[Optimizer]:
        """The stepped optimizers; empty if one of them no longer exists."""
        found = [ref() for ref in self._optimizers]
        return [] if any(o is None for o in found) else found  # type: ignore[return-value]

    def why_not(self) -> str | None:
        """The reason why this program cannot run now as far as optimizers go; None if it can."""
        optimizers = self.optimizers()
        if len(optimizers) != len(self._optimizers):
            return "an optimizer of the step no longer exists"
        for optimizer, settings in zip(optimizers, self.settings, strict=True):
            if static_settings(optimizer) != settings:
                return f"param groups of {type(optimizer).__name__} changed (groups, flags or kinds of values)"
        for number, index, key in self._needed:
            if not self.state.has(optimizers[number], index, key):
                return f"optimizer state '{key}' is gone"
        for number, index, key in self._created:
            if self.state.has(optimizers[number], index, key):
                return f"optimizer state '{key}', made by the first step, is there now"
        if self._guard is not None and not self._guard(optimizers):
            return f"a hyperparameter crossed a condition ({'; '.join(self.captured.hyper_guards)})"
        return None

    def create_state(self) -> None:
        """Creates what is missing of the state that the optimizer would create at its first step."""
        optimizers = self.optimizers()
        missing = [
            init
            for init in self.captured.state_inits
            if not self.state.has(optimizers[init.optimizer], self._index_of[init.parameter], init.key)
        ]
        inits = []
        for init in missing:
            value: float | int = init.value
            if init.hyperparameter is not None:
                number, where = init.hyperparameter
                value = float(read_hyperparameter(optimizers[number], where))
            inits.append((init, value))
        self.state.create(optimizers, inits)

    def __call__(self, leaves: list[Any]) -> Any:
        """Runs the step on the leaves of (args, kwargs) and returns the user's tree."""
        optimizers = self.optimizers()
        arguments = list(self._template)
        for position, index in self._gradients:
            arguments[position] = self.sharded.gradient(index)
        for position, holder, name in self._buffers:
            arguments[position] = holder[name]
        for position, number, where in self._hypers:
            arguments[position] = read_hyperparameter(optimizers[number], where)
        try:
            self._fill_states(arguments, optimizers)
        except KeyError:  # the optimizer's first step, or a parameter's
            self.create_state()
            self._fill_states(arguments, optimizers)
        for position, leaf in self._batch:
            arguments[position] = leaves[leaf]
        with torch.no_grad():
            try:
                results = self._run(*arguments)
            except Exception as error:
                self._explain(error)
                raise
        return self._finish(results, optimizers, leaves)

    def _fill_states(self, arguments: list[Any], optimizers: list[Optimizer]) -> None:
        for position, number, index, key in self._states:
            arguments[position] = self.state.local(optimizers[number], index, key)

    def _finish(self, results: tuple[Any, ...], optimizers: list[Optimizer], given: list[Any]) -> Any:
        sharded = self.sharded
        for name in self.captured.cleared_gradients:
            sharded.clear_gradient(self._index_of[name])
        for spec, value in zip(self._outputs, results, strict=True):
            if isinstance(spec, GradientOutput):
                sharded.show_gradient(self._index_of[spec.parameter], value)
            elif isinstance(spec, InputGradientOutput):
                leaf = given[spec.leaf]
                leaf.grad = value if leaf.grad is None else leaf.grad + value
            elif isinstance(spec, OptimizerStateOutput):
                self.state.put(optimizers[spec.optimizer], self._index_of[spec.parameter], spec.key, value)
        for optimizer in optimizers:
            # Schedulers look at this to warn about a wrong order of steps.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        leaves = [
            self._shown(self._outputs[leaf.position], results[leaf.position]) if isinstance(leaf, OutputRef) else leaf
            for leaf in self.captured.out_leaves
        ]
        return pytree.tree_unflatten(leaves, self.captured.out_spec)

    def _shown(self, spec: Any, value: Any) -> Any:
        assert isinstance(spec, UserOutput)
        if spec.placement != "sharded" or spec.shape is None:
            return value
        return self.sharded.rows_as_dtensor(value, spec.shape)

    def _explain(self, error: Exception) -> None:
        """Says which line of the user's code the failing node stands for; turns transport errors into ours."""
        node = self._failing_node(error)
        frame = node.meta.get("frame") if node is not None else None
        what = f"node '{node.name}'" if node is not None else "the graph"
        if (node is not None and str(node.target).startswith("_c10d_functional.")) or isinstance(error, dist.DistError):
            raise CollectiveError(
                message(
                    f"Rank {self.sharded.rank} of {self.sharded.mesh.size()}: a collective failed at {what}: "
                    f"{str(error).splitlines()[0]}",
                    "Most often another rank raised an error, was killed or ran out of time; this rank cannot go on "
                    "without it.",
                    "Look for the first error among the other ranks' logs, then restart all ranks from a checkpoint.",
                    str(frame or ""),
                    node_text(node) if node is not None else None,
                )
            ) from error
        error.add_note(f"fsdp_fx: raised by {what} of the compiled step, which stands for {frame}")

    def _failing_node(self, error: Exception) -> torch.fx.Node | None:
        trace = error.__traceback__
        found = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.startswith("<eval_with_key>"):
                line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
                match = re.match(r"\s*(\w+)\s*=", line)
                if match:
                    found = match.group(1)
            trace = trace.tb_next
        return next((n for n in self.stages.step.graph.nodes if n.name == found), None)


def _owner(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path)._buffers, attribute


def _guard_function(captured: Captured) -> Callable[[list[Optimizer]], bool] | None:
    """The conditions on hyperparameters as one Python function of their current values."""
    if not captured.hyper_guards:
        return None
    names = list(captured.hyper_symbols)
    source = f"lambda {', '.join(names)}: " + " and ".join(f"({guard})" for guard in captured.hyper_guards)
    check = eval(source, {"math": __import__("math"), "torch": torch})
    places = [captured.hyper_symbols[name] for name in names]

    def guard(optimizers: list[Optimizer]) -> bool:
        return bool(check(*(read_hyperparameter(optimizers[number], where) for number, where in places)))

    return guard
