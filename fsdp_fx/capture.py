"""Capture: one call of the user's step under fake tensors becomes the step graph of a single device.

Nothing real is touched: parameters, buffers, optimizer state, hyperparameters and the batch are replaced by
stand-ins for the time of the call, and every user object is put back as it was, also when the call fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fsdp_fx._torch_private import fake_mode, make_fx, python_guard, symbol_name, symbolic_float, tracing
from fsdp_fx.annotate import Annotator, module_paths
from fsdp_fx.errors import CaptureError, message, user_frame
from fsdp_fx.kept import grad_mode_kept, modules_kept, rng_kept
from fsdp_fx.lazy_state import StateInit, lift_state
from fsdp_fx.ops import reduce_gradient
from fsdp_fx.optimizers import (
    Hyperparameter,
    find_optimizers,
    read_hyperparameter,
    swapped,
)
from fsdp_fx.printing import StepGraphModule, type_text
from fsdp_fx.signature import (
    BatchInput,
    BufferInput,
    GradientInput,
    GradientOutput,
    HyperparameterInput,
    InputGradientOutput,
    InputSpec,
    OptimizerStateInput,
    OptimizerStateOutput,
    OutputSpec,
    ParameterInput,
    StepSignature,
    UserOutput,
    safe_name,
)
from fsdp_fx.step_graph import StepGraph, is_random, remove_dead
from fsdp_fx.storage import ShardedModel, check_no_hooks, contiguous_stride
from fsdp_fx.tree import flatten, flatten_with_paths
from fsdp_fx.watch import Watch, translated

__all__ = ["Captured", "OutputRef", "capture"]


@dataclass
class Captured:
    """A step graph and what running it needs: the optimizers it steps, lazily created state, the returned tree."""

    step: StepGraph
    optimizers: list[Optimizer]
    state_inits: list[StateInit]
    hyper_guards: tuple[str, ...]
    """Conditions on hyperparameters that the user's Python branched on (`weight_decay != 0`)."""
    hyper_symbols: dict[str, tuple[int, Hyperparameter]]
    """Which hyperparameter of which optimizer each name in `hyper_guards` stands for."""
    out_spec: pytree.TreeSpec
    out_leaves: list[Any]
    """Leaves of the returned tree; a tensor's place holds an `OutputRef`, other leaves are themselves."""
    cleared_gradients: tuple[str, ...]
    """Parameters whose `.grad` was set before the step and is None after it."""


@dataclass(frozen=True)
class OutputRef:
    """Stands for output `position` of the graph in the returned tree."""

    position: int


def capture(
    train_step: Callable[..., Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharded: ShardedModel,
) -> Captured:
    """Traces one call of `train_step(model, *args, **kwargs)`.

    Returns the step graph in terms of full parameters, with a `reduce_gradient` border behind every parameter
    gradient. Raises `CaptureError` with the user's line for what cannot be traced; any other exception of the
    user's code is raised unchanged, with a note that says it happened during tracing.
    """
    return _Trace(train_step, model, sharded).run(args, kwargs)


class _Trace:
    """One call of the step: the stand-ins it works on, in placeholder order, and what it leaves behind."""

    def __init__(self, train_step: Callable[..., Any], model: nn.Module, sharded: ShardedModel):
        self.train_step = train_step
        self.model = model
        self.sharded = sharded
        self.layouts = sharded.layout.params
        self.mode = fake_mode()
        self.index_of = {id(p): i for i, p in enumerate(sharded.parameters)}
        self.values: list[Any] = []
        self.specs: list[InputSpec] = []
        self.stand_ins: list[torch.Tensor] = []
        self.gradients: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, torch.Tensor] = {}
        self.batch: list[Any] = []
        self.inputs_with_grad: list[tuple[int, str, torch.Tensor]] = []
        self.optimizers = find_optimizers(self.index_of)
        self.stepped: list[Optimizer] = []
        self.symbols: dict[tuple[int, Hyperparameter], str] = {}
        self.hypers: dict[tuple[int, Hyperparameter], Any] = {}
        self.state: dict[tuple[int, int, str], torch.Tensor] = {}
        self.outputs: list[OutputSpec] = []
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: list[Any] = []
        self.cleared: list[str] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        self._add_model()
        self.watch = Watch({key: self.stand_ins[index] for key, index in self.sharded.known_objects().items()})
        with contextlib.ExitStack() as stack:
            stack.enter_context(rng_kept())
            stack.enter_context(modules_kept(self.model))
            self.stepped = stack.enter_context(
                swapped(self.optimizers, self._stand_in, self._add_hyper, self._add_state, _foreign, self.watch)
            )
            tree = self._add_batch(args, kwargs)
            stack.enter_context(translated(self.train_step, self.watch))
            stack.enter_context(tracing(self.mode))
            modules = stack.enter_context(module_paths(self.model))
            stack.enter_context(grad_mode_kept())

            def call(*values: Any) -> list[Any]:
                # make_fx hands the same stand-ins back, now tracked: closures over them are closures over inputs.
                assert all(given is value for given, value in zip(values, self.values, strict=True))
                with Annotator(modules):
                    return self._call(tree)

            module = make_fx(call)(*self.values)
        return self._finish(module)

    # --- before the call: a stand-in and a role for everything it may read -----------------------------------

    def _add(self, spec: InputSpec, value: Any) -> Any:
        self.specs.append(spec)
        self.values.append(value)
        return value

    def _fake(self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A stand-in; parameters and their state by full shape, meta tensors on the mesh's device."""
        device = self.sharded.device if tensor.device.type == "meta" else tensor.device
        size = tuple(tensor.shape) if shape is None else shape
        stride = contiguous_stride(size) if shape is not None or isinstance(tensor, DTensor) else tensor.stride()
        with self.mode:
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)

    def _add_model(self) -> None:
        for layout, real in zip(self.layouts, self.sharded.parameters, strict=True):
            check_no_hooks(real, layout.name)
            spec = ParameterInput(f"p_{safe_name(layout.name)}", layout.name)
            self.stand_ins.append(self._add(spec, self._fake(real, layout.shape)))
        for layout, real in zip(self.layouts, self.sharded.parameters, strict=True):
            if real.grad is not None:
                spec_ = GradientInput(f"g_{safe_name(layout.name)}", layout.name)
                self.gradients[layout.index] = self._add(spec_, self._fake(real.grad, layout.shape))
        for name, buffer in self.model.named_buffers():
            self.buffers[id(buffer)] = self._add(BufferInput(f"b_{safe_name(name)}", name), self._fake(buffer))

    def _stand_in(self, p: Any) -> torch.Tensor | None:
        index = self.index_of.get(id(p))
        return None if index is None else self.stand_ins[index]

    def _add_hyper(self, position: int, where: Hyperparameter) -> Any:
        real = read_hyperparameter(self.optimizers[position], where)
        item = "" if where.index is None else f"_{where.index}"
        name = f"h{position}_{where.group}_{where.key}{item}"
        if isinstance(real, torch.Tensor):
            value: Any = self._fake(real)
        else:
            value = symbolic_float(self.mode, real, name)
            self.symbols[position, where] = symbol_name(value)
        self.hypers[position, where] = value
        return self._add(HyperparameterInput(name, position, where.group, where.key, where.index), value)

    def _add_state(self, position: int, parameter: Any) -> dict[str, Any]:
        index = self.index_of[id(parameter)]
        layout = self.layouts[index]
        traced: dict[str, Any] = {}
        for key, value in self.optimizers[position].state.get(parameter, {}).items():
            traced[key] = value
            if isinstance(value, torch.Tensor):
                name = f"s{position}_{safe_name(key)}_{safe_name(layout.name)}"
                spec = OptimizerStateInput(name, position, layout.name, key)
                traced[key] = self.state[position, index, key] = self._add(spec, self._fake(value, tuple(value.shape)))
        return traced

    def _add_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> pytree.TreeSpec:
        pairs, tree = flatten_with_paths((args, kwargs))
        for number, (path, leaf) in enumerate(pairs):
            if not isinstance(leaf, torch.Tensor):
                self.batch.append(leaf)
                continue
            _check_batch(leaf, path)
            shown = "args" + path[3:] if path.startswith("[0]") else "kwargs" + path[3:]
            value = self._add(BatchInput(f"x{safe_name(shown[4:])}".rstrip("_"), number, shown), self._fake(leaf))
            self.batch.append(value)
            if leaf.requires_grad:
                self.inputs_with_grad.append((number, shown, value))
        return tree

    # --- the call itself -------------------------------------------------------------------------------------

    def _call(self, tree: pytree.TreeSpec) -> list[Any]:
        for layout, p, real in zip(self.layouts, self.stand_ins, self.sharded.parameters, strict=True):
            p.__dict__.update({k: v for k, v in real.__dict__.items() if not k.startswith("_fsdp_fx")})
            p._is_param = True  # type: ignore[attr-defined]
            p.requires_grad_(real.requires_grad)
            p.grad = self.gradients.get(layout.index)
            if real.requires_grad:
                p.register_hook(_border_hook(layout.name))
        for _, _, value in self.inputs_with_grad:
            value.requires_grad_()
        for owner in self.sharded.owners:
            setattr(owner.module, owner.attribute, self.stand_ins[owner.index])
        stand_in_of = {}
        for path, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = stand_in_of[path, key] = self.buffers[id(buffer)]
        args, kwargs = pytree.tree_unflatten(self.batch, tree)
        with self.watch:
            result = self.train_step(self.model, *args, **kwargs)
        _update_buffers(self.model, stand_in_of)
        return self._collect(result)

    def _collect(self, result: Any) -> list[Any]:
        """Reads everything the step left behind; returns the traced values, `outputs` says what they are."""
        values: list[Any] = []

        def put(spec: OutputSpec, value: Any) -> None:
            self.outputs.append(spec)
            values.append(value)

        leaves, self.out_spec = flatten(result)
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, (torch.Tensor, torch.SymFloat)):
                self.out_leaves.append(leaf)
                continue
            self.out_leaves.append(OutputRef(len(values)))
            put(UserOutput(number), leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf)
        for index, p in enumerate(self.stand_ins):
            if p.grad is not None and p.grad is not self.gradients.get(index):
                put(GradientOutput(self.layouts[index].name), p.grad)
        self.cleared = [self.layouts[i].name for i in self.gradients if self.stand_ins[i].grad is None]
        for number, path, value in self.inputs_with_grad:
            if value.grad is not None:
                put(InputGradientOutput(number, path), value.grad)
        index_of = {id(p): i for i, p in enumerate(self.stand_ins)}
        for optimizer in self.stepped:
            position = next(i for i, o in enumerate(self.optimizers) if o is optimizer)
            self._check_hypers(optimizer, position)
            for p, entries in optimizer.state.items():
                index = index_of[id(p)]
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        if value is not self.state.get((position, index, key)):
                            put(OptimizerStateOutput(position, self.layouts[index].name, key), value)
                    else:
                        _check_state(optimizer, key, value, _defined_at(self.train_step))
        return values

    def _check_hypers(self, optimizer: Optimizer, position: int) -> None:
        for (owner, where), value in self.hypers.items():
            if owner != position:
                continue
            group = optimizer.param_groups[where.group]
            now = group.get(where.key) if where.index is None else group[where.key][where.index]
            if now is not value:
                name = f"{type(optimizer).__name__}.param_groups[{where.group}]['{where.key}']"
                raise CaptureError(
                    message(
                        f"The step changes {name} (a scheduler inside the step?).",
                        "Hyperparameters are inputs of the graph; a value computed in Python while tracing would be "
                        "baked.",
                        "Call scheduler.step() (or set the value) outside the step, after it returns: no retrace "
                        "follows.",
                        _defined_at(self.train_step),
                    )
                )

    # --- after it ----------------------------------------------------------------------------------------------

    def _finish(self, module: fx.GraphModule) -> Captured:
        """From what make_fx wrote to a step graph with roles: names, stepped optimizers only, lazy state lifted."""
        graph = module.graph
        graph.set_codegen(fx.graph.CodeGen())
        number_of = {next(i for i, o in enumerate(self.optimizers) if o is s): n for n, s in enumerate(self.stepped)}
        specs: list[InputSpec] = []
        for node, spec in zip(graph.find_nodes(op="placeholder"), self.specs, strict=True):
            if isinstance(spec, (HyperparameterInput, OptimizerStateInput)):
                if spec.optimizer not in number_of and not node.users:
                    graph.erase_node(node)
                    continue
                spec = replace(spec, optimizer=number_of.get(spec.optimizer, spec.optimizer))
            node.name = graph._graph_namespace.create_name(spec.node, None)
            node.target = node.name
            node.meta["phase"] = "input"
            specs.append(replace(spec, node=node.name))
        outputs = [
            replace(s, optimizer=number_of[s.optimizer]) if isinstance(s, OptimizerStateOutput) else s
            for s in self.outputs
        ]
        final = graph.output_node()
        final.args = (tuple(final.args[0]),)  # type: ignore[arg-type]
        for node in graph.nodes:
            _check_draw(node)
            node.meta.setdefault("val", None)  # in-place foreach operators return nothing
            if node.target is reduce_gradient:
                node.name = graph._graph_namespace.create_name(f"reduce_{safe_name(str(node.args[1]))}", None)
        signature = StepSignature(tuple(specs), tuple(outputs))
        step = StepGraph(StepGraphModule(module, graph), signature, self.sharded.layout, self.mode)
        remove_dead(step.graph)
        inits = lift_state(step, self.stepped)
        remove_dead(step.graph)
        symbols = {
            symbol: (number_of[position], where)
            for (position, where), symbol in self.symbols.items()
            if position in number_of
        }
        assert self.out_spec is not None
        return Captured(
            step=step,
            optimizers=list(self.stepped),
            state_inits=inits,
            hyper_guards=python_guard(self.mode),
            hyper_symbols=symbols,
            out_spec=self.out_spec,
            out_leaves=self.out_leaves,
            cleared_gradients=tuple(self.cleared),
        )


def _update_buffers(model: nn.Module, stand_in_of: dict[tuple[str, str], torch.Tensor]) -> None:
    """A buffer that the step replaced (`self.average = ...`) becomes an update of the buffer in place."""
    for path, module in model.named_modules():
        for key, now in module._buffers.items():
            before = stand_in_of.get((path, key))
            if now is before:
                continue
            name = f"{path}.{key}" if path else key
            if before is None or now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
                raise CaptureError(
                    message(
                        f"The step gives buffer '{name}' another shape or dtype, or makes or removes it.",
                        "The compiled step updates buffers in place, for all later calls.",
                        "Register the buffer with its final shape before fsdp_compile.",
                    )
                )
            with torch.no_grad():
                before.copy_(now)


def _border_hook(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        if grad.is_sparse:
            raise CaptureError(
                message(
                    f"The gradient of '{name}' is sparse.",
                    "A reduce-scatter needs a dense gradient.",
                    "Use nn.Embedding(..., sparse=False).",
                    str(user_frame() or ""),
                )
            )
        if grad.requires_grad:
            raise CaptureError(
                message(
                    f"The gradient of '{name}' is itself differentiated (create_graph=True).",
                    "The mean over ranks has no place inside a rank's own backward graph.",
                    "Differentiate with respect to activations, or keep the penalty out of the step.",
                    str(user_frame() or ""),
                )
            )
        return reduce_gradient(grad, name)  # type: ignore[no-any-return]

    return hook


def _foreign(optimizer: Optimizer, parameter: Any) -> Exception:
    shape = type_text(parameter) if isinstance(parameter, torch.Tensor) else type(parameter).__name__
    return CaptureError(
        message(
            f"{type(optimizer).__name__} steps a parameter ({shape}) that the model does not own.",
            "Only the model's parameters are sharded and reduced; this one would be trained on each rank's own "
            "gradient, or not at all.",
            "Register it on the model (self.x = nn.Parameter(...)), give it an optimizer of its own outside the "
            "step, or rebuild the optimizer from model.parameters() after fsdp_compile.",
            str(user_frame() or ""),
        )
    )


def _check_state(optimizer: Optimizer, key: str, value: Any, at: str) -> None:
    if isinstance(value, (int, float, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        raise CaptureError(
            message(
                f"{type(optimizer).__name__} keeps a Python number in its state ('{key}').",
                "It would be baked into the graph and never change again.",
                f"Keep it as a 0-d tensor: state['{key}'] = torch.tensor(0.0).",
                at,
            )
        )


def _check_draw(node: fx.Node) -> None:
    if is_random(node) and node.meta.get("phase") == "backward":
        raise CaptureError(
            message(
                f"{node.target} draws random numbers in backward: a checkpointed part of the model with dropout.",
                "The recomputation would draw a second mask, and gradients would be wrong without any sign of it.",
                "Keep random operators out of torch.utils.checkpoint, or set its dropout to 0.",
                str(node.meta.get("frame") or ""),
            )
        )


def _check_batch(leaf: torch.Tensor, path: str) -> None:
    if isinstance(leaf, DTensor):
        raise CaptureError(
            message(
                f"Argument {path} of the step is a DTensor.",
                "Each rank passes its own part of the batch as a plain tensor.",
                "Pass tensor.to_local().",
            )
        )
    if leaf.grad_fn is not None:
        raise CaptureError(
            message(
                f"Argument {path} of the step was computed with gradients outside the step ({leaf.grad_fn.name()}).",
                "The step is one graph; backward inside it cannot go on into code that ran before it.",
                "Compute it inside the step, or pass x.detach() (with requires_grad_() if the step needs x.grad).",
            )
        )


def _defined_at(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
