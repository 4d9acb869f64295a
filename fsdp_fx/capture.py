"""Capture: one call of the user's step under fake tensors becomes the step graph of a single device.

Nothing real is touched: parameters, buffers, optimizer state, hyperparameters and the batch are replaced by
stand-ins for the time of the call, and every user object is put back as it was, also when the call fails.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsdp_fx._torch_private import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    fake_mode,
    make_fx,
    python_guard,
    record_in_place,
    symbol_name,
    symbolic_float,
    tracing,
)
from fsdp_fx.annotate import Annotator, module_paths
from fsdp_fx.errors import CaptureError, message, user_frame, user_frame_of
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
    InputSpec,
    OptimizerStateInput,
    OptimizerStateOutput,
    OutputSpec,
    ParameterInput,
    StepSignature,
    UserOutput,
)
from fsdp_fx.step_graph import Aliases, StepGraph, is_random, remove_dead
from fsdp_fx.storage import ShardedModel, check_no_hooks, contiguous_stride

__all__ = ["Captured", "StateInit", "capture"]


@dataclass(frozen=True)
class StateInit:
    """State that the optimizer creates at its first step: made sharded, before the first run.

    `value` fills it, or the hyperparameter (of which optimizer, where) does. `like_parameter` says that it has the
    parameter's shape and is sharded as the parameter is; else it is whole, of `shape`.
    """

    optimizer: int
    parameter: str
    key: str
    like_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: float | int
    hyperparameter: tuple[int, Hyperparameter] | None = None


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


@dataclass
class _Inputs:
    """Stand-ins and their roles, in placeholder order."""

    values: list[Any] = field(default_factory=list)
    specs: list[InputSpec] = field(default_factory=list)

    def add(self, spec: InputSpec, value: Any) -> Any:
        self.specs.append(spec)
        self.values.append(value)
        return value


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


_ITEM_CALLS = {
    torch.Tensor.item: ".item() on {}",
    torch.Tensor.tolist: ".tolist() on {}",
    torch.Tensor.numpy: ".numpy() on {}",
    torch.Tensor.__float__: "float() of {}",
    torch.Tensor.__int__: "int() of {}",
    torch.Tensor.__index__: "using {} as an index",
    torch.Tensor.__bool__: "a Python branch on {}",
    torch.Tensor.__array__: "numpy on {}",
}

_ITEM_FIX = {
    torch.Tensor.__bool__: "Write the choice as tensor arithmetic (torch.where, multiplication by a mask), or decide "
    "outside the step.",
    torch.Tensor.numpy: "Use torch operators on the tensor, or return it and convert it outside the step.",
    torch.Tensor.__array__: "Use torch operators on the tensor, or return it and convert it outside the step.",
}


_FUSED = {torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_}


class _Watch(TorchFunctionMode):
    """Refuses what has no place in one graph, at the user's line; lets the optimizers' own reads through.

    Parameter objects that the step holds itself (a list made before or after `fsdp_compile`) are replaced by their
    stand-ins on the way into every torch function.
    """

    def __init__(self, stand_ins: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.in_optimizer = 0
        self._stand_ins = stand_ins

    def _replaced(self, value: Any, reads: bool) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._replaced(item, reads) for item in value])
        if kind is not nn.Parameter and kind is not DTensor:
            return value
        known = self._stand_ins.get(id(value))
        if known is not None:
            return known
        if reads and value.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                message(
                    f"The step uses a parameter ({type_text(value)}) that the model does not own.",
                    "Only the model's parameters are sharded and get reduced gradients; this one's gradient would be "
                    "each rank's own.",
                    "Register its module on the model, or freeze it: requires_grad_(False) or torch.no_grad().",
                    str(user_frame(3) or ""),
                )
            )
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") not in ("__get__", "__set__")  # attributes are not values
        args = tuple([self._replaced(a, reads) for a in args])
        kwargs = {k: self._replaced(v, reads) for k, v in kwargs.items()} if kwargs else {}
        if self.in_optimizer:
            if func is torch.tensor and args and isinstance(args[0], (int, float)):
                # torch.tensor(0.0) would be a constant whose later .item() is baked; full() stays symbolic.
                dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
                return torch.full((), args[0], dtype=dtype, device=kwargs.get("device"))
            if func in _FUSED:
                overload = "tensor_lr" if isinstance(kwargs.get("lr"), torch.Tensor) else "default"
                record_in_place(getattr(getattr(torch.ops.aten, func.__name__), overload), args, kwargs)
                return None
        elif func in _ITEM_CALLS and isinstance(args[0], FakeTensor):
            kind = f"a tensor {type_text(args[0])}"
            raise CaptureError(
                message(
                    f"The step reads a tensor's value: {_ITEM_CALLS[func].format(kind)}.",
                    "The step is one graph for all calls; a value read here would be baked in.",
                    _ITEM_FIX.get(func, "Return the tensor from the step and read it outside (float(step(...)))."),
                    str(user_frame(2) or ""),
                )
            )
        return func(*args, **kwargs)


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
    mode = fake_mode()
    layouts = sharded.layout.params
    inputs = _Inputs()
    by_id = {id(p): i for i, p in enumerate(sharded.parameters)}

    def fake(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A stand-in; parameters and their state by full shape, meta tensors on the mesh's device."""
        device = sharded.device if tensor.device.type == "meta" else tensor.device
        size = tuple(tensor.shape) if shape is None else shape
        stride = contiguous_stride(size) if shape is not None or isinstance(tensor, DTensor) else tensor.stride()
        with mode:
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)

    for layout, real in zip(layouts, sharded.parameters, strict=True):
        check_no_hooks(real, layout.name)
    trained = [p.requires_grad for p in sharded.parameters]
    stand_ins: list[torch.Tensor] = []
    for layout, real in zip(layouts, sharded.parameters, strict=True):
        p = fake(real, layout.shape)
        inputs.add(ParameterInput(f"p_{_safe(layout.name)}", layout.name), p)
        stand_ins.append(p)
    grads: dict[int, torch.Tensor] = {}
    for layout, real in zip(layouts, sharded.parameters, strict=True):
        if real.grad is not None:
            spec = GradientInput(f"g_{_safe(layout.name)}", layout.name)
            grads[layout.index] = inputs.add(spec, fake(real.grad, layout.shape))
    buffers: dict[int, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        buffers[id(buffer)] = inputs.add(BufferInput(f"b_{_safe(name)}", name), fake(buffer))

    optimizers = find_optimizers(by_id)
    symbols: dict[tuple[int, Hyperparameter], str] = {}
    hyper_values: dict[tuple[int, Hyperparameter], Any] = {}

    def hyper_of(position: int, where: Hyperparameter) -> Any:
        real = read_hyperparameter(optimizers[position], where)
        item = "" if where.index is None else f"_{where.index}"
        name = f"h{position}_{where.group}_{where.key}{item}"
        if isinstance(real, torch.Tensor):
            value: Any = fake(real)
        else:
            value = symbolic_float(mode, real, name)
            symbols[position, where] = symbol_name(value)
        hyper_values[position, where] = value
        spec = HyperparameterInput(name, position, where.group, where.key, where.index)
        return inputs.add(spec, value)

    state_inputs: dict[tuple[int, int, str], torch.Tensor] = {}

    def state_of(position: int, parameter: Any) -> dict[str, Any]:
        entries = optimizers[position].state.get(parameter, {})
        index = by_id[id(parameter)]
        layout = layouts[index]
        traced: dict[str, Any] = {}
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                name = f"s{position}_{_safe(key)}_{_safe(layout.name)}"
                spec = OptimizerStateInput(name, position, layout.name, key)
                traced[key] = inputs.add(spec, fake(value, tuple(value.shape)))
                state_inputs[position, index, key] = traced[key]
            else:
                traced[key] = value
        return traced

    leaves, tree = pytree.tree_flatten((args, kwargs))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    batch: list[Any] = []

    out: dict[str, Any] = {}
    watch = _Watch({key: stand_ins[index] for key, index in sharded.known_objects().items()})

    def parameter_of(p: Any) -> Any:
        index = by_id.get(id(p))
        return None if index is None else stand_ins[index]

    def foreign(optimizer: Optimizer, parameter: Any) -> Exception:
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

    with contextlib.ExitStack() as stack:
        stack.enter_context(_rng_kept())
        stack.enter_context(_modules_kept(model))
        stepped = stack.enter_context(swapped(optimizers, parameter_of, hyper_of, state_of, foreign, watch))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                _check_batch(leaf, paths[number])
                value = fake(leaf)
                path = "args" + paths[number][3:] if paths[number].startswith("[0]") else "kwargs" + paths[number][3:]
                batch.append(inputs.add(BatchInput(f"x{_safe(path[4:])}".rstrip("_"), number, path), value))
            else:
                _check_leaf(leaf, paths[number])
                batch.append(leaf)

        def run(*values: Any) -> list[Any]:
            # make_fx hands the same stand-ins back, now tracked, so closures over them are closures over inputs.
            assert all(given is value for given, value in zip(values, inputs.values, strict=True))
            for index, p in enumerate(stand_ins):
                real = sharded.parameters[index]
                p.__dict__.update({k: v for k, v in real.__dict__.items() if not k.startswith("_fsdp_fx")})
                p._is_param = True  # type: ignore[attr-defined]
                p.requires_grad_(trained[index])
                p.grad = grads.get(index)
                if trained[index]:
                    p.register_hook(_border_hook(layouts[index].name))
            for owner in sharded.owners:
                setattr(owner.module, owner.attribute, stand_ins[owner.index])
            stand_in_of = {}
            for path, module in model.named_modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = stand_in_of[path, key] = buffers[id(buffer)]
            args_, kwargs_ = pytree.tree_unflatten(batch, tree)
            with watch:
                result = train_step(model, *args_, **kwargs_)
            _update_buffers(model, stand_in_of)
            return _collect(
                result,
                out,
                stepped,
                optimizers,
                stand_ins,
                grads,
                state_inputs,
                layouts,
                hyper_values,
                _defined_at(train_step),
            )

        with _translated(train_step, watch), tracing(mode), module_paths(model) as modules, _grad_mode_kept():

            def annotated(*values: Any) -> list[Any]:
                with Annotator(modules):
                    return run(*values)

            module = make_fx(annotated)(*inputs.values)

    return _finish(module, inputs, out, stepped, optimizers, mode, symbols, sharded)


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


def _collect(
    result: Any,
    out: dict[str, Any],
    stepped: list[Optimizer],
    optimizers: list[Optimizer],
    stand_ins: list[torch.Tensor],
    grads: dict[int, torch.Tensor],
    state_inputs: dict[tuple[int, int, str], torch.Tensor],
    layouts: Any,
    hyper_values: dict[tuple[int, Hyperparameter], Any],
    where: str,
) -> list[Any]:
    """Reads everything the step left behind; fills `out` and returns the traced values."""
    leaves, spec = pytree.tree_flatten(result)
    values: list[Any] = []
    outputs: list[OutputSpec] = []
    kept: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, (torch.Tensor, torch.SymFloat)):
            kept.append(OutputRef(len(values)))
            values.append(leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf)
            outputs.append(UserOutput(number))
        else:
            if any(isinstance(v, torch.Tensor) for v in getattr(leaf, "__dict__", {}).values()):
                raise CaptureError(
                    message(
                        f"The step returns a {type(leaf).__name__}, which holds tensors but is not a pytree.",
                        "Its tensors cannot be found, so they would be lost.",
                        "Return a tuple, dict or named tuple, or register the class with "
                        "torch.utils._pytree.register_pytree_node / register_dataclass.",
                        where,
                    )
                )
            kept.append(leaf)
    for index, p in enumerate(stand_ins):
        grad = p.grad
        if grad is not None and grad is not grads.get(index):
            values.append(grad)
            outputs.append(GradientOutput(layouts[index].name))
    out["cleared"] = [layouts[i].name for i in grads if stand_ins[i].grad is None]
    index_of = {id(p): i for i, p in enumerate(stand_ins)}
    for optimizer in stepped:
        position = next(i for i, o in enumerate(optimizers) if o is optimizer)
        _check_untouched(optimizer, position, hyper_values, where)
        for p, entries in optimizer.state.items():
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    if isinstance(value, (int, float, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
                        raise CaptureError(
                            message(
                                f"{type(optimizer).__name__} keeps a Python number in its state ('{key}').",
                                "It would be baked into the graph and never change again.",
                                f"Keep it as a 0-d tensor: state['{key}'] = torch.tensor(0.0).",
                                where,
                            )
                        )
                    continue
                if value is not state_inputs.get((position, index_of[id(p)], key)):
                    values.append(value)
                    outputs.append(OptimizerStateOutput(position, layouts[index_of[id(p)]].name, key))
    out.update(spec=spec, leaves=kept, outputs=outputs)
    return values


def _check_untouched(
    optimizer: Optimizer, position: int, hyper_values: dict[tuple[int, Hyperparameter], Any], at: str
) -> None:
    for (owner, where), value in hyper_values.items():
        if owner != position:
            continue
        group = optimizer.param_groups[where.group]
        now = group.get(where.key) if where.index is None else group[where.key][where.index]
        if now is not value:
            name = f"{type(optimizer).__name__}.param_groups[{where.group}]['{where.key}']"
            raise CaptureError(
                message(
                    f"The step changes {name} (a scheduler inside the step?).",
                    "Hyperparameters are inputs of the graph; a value computed in Python while tracing would be baked.",
                    "Call scheduler.step() (or set the value) outside the step, after it returns: no retrace follows.",
                    at,
                )
            )


def _defined_at(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _finish(
    module: fx.GraphModule,
    inputs: _Inputs,
    out: dict[str, Any],
    stepped: list[Optimizer],
    optimizers: list[Optimizer],
    mode: FakeTensorMode,
    symbols: dict[tuple[int, Hyperparameter], str],
    sharded: ShardedModel,
) -> Captured:
    """From what make_fx wrote to a step graph with roles: names, stepped optimizers only, lazy state lifted."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    number_of = {next(i for i, o in enumerate(optimizers) if o is s): n for n, s in enumerate(stepped)}
    specs: list[InputSpec] = []
    for node, spec in zip(graph.find_nodes(op="placeholder"), inputs.specs, strict=True):
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
        for s in out["outputs"]
    ]
    final = graph.output_node()
    final.args = (tuple(final.args[0]),)  # type: ignore[arg-type]
    for node in graph.nodes:
        if is_random(node) and node.meta.get("phase") == "backward":
            raise CaptureError(
                message(
                    f"{node.target} draws random numbers in backward: a checkpointed part of the model with dropout.",
                    "The recomputation would draw a second mask, and gradients would be wrong without any sign of it.",
                    "Keep random operators out of torch.utils.checkpoint, or set its dropout to 0.",
                    str(node.meta.get("frame") or ""),
                )
            )
        node.meta.setdefault("val", None)  # in-place foreach operators return nothing
        if node.target is reduce_gradient:
            node.name = graph._graph_namespace.create_name(f"reduce_{_safe(str(node.args[1]))}", None)
    step = StepGraph(
        StepGraphModule(module, graph),
        StepSignature(tuple(specs), tuple(outputs)),
        sharded.layout,
        mode,
    )
    remove_dead(step.graph)
    inits = _lift_state(step, stepped)
    remove_dead(step.graph)
    hyper_symbols = {
        symbols[position, where]: (number_of[position], where) for position, where in symbols if position in number_of
    }
    return Captured(
        step=step,
        optimizers=list(stepped),
        state_inits=inits,
        hyper_guards=python_guard(mode),
        hyper_symbols=hyper_symbols,
        out_spec=out["spec"],
        out_leaves=out["leaves"],
        cleared_gradients=tuple(out["cleared"]),
    )


_FACTORIES = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "full": None,
    "full_like": None,
    "new_full": None,
}
"""Factory operators of lazily created state, and the value they fill with (None: their fill argument)."""


def _lift_state(step: StepGraph, stepped: list[Optimizer]) -> list[StateInit]:
    """Turns state that the optimizer creates from nothing (zeros, ones, a fill) into inputs of the graph.

    So one graph serves the first call and all others, and the state is created sharded. State made from
    the gradient (SGD's momentum buffer) stays an output, and the second call gets a graph of its own; so does
    that of optimizers from outside torch.optim, whose first step may differ in other ways too.
    """
    aliases = Aliases(step.graph)
    hypers = {
        n: (s.optimizer, Hyperparameter(s.group, s.key, s.index))
        for n, s in step.inputs()
        if isinstance(s, HyperparameterInput)
    }
    outputs: list[OutputSpec] = []
    nodes: list[fx.Node] = []
    inits: list[StateInit] = []
    roots: list[fx.Node] = []
    known = {(s.optimizer, s.parameter, s.key) for _, s in step.inputs() if isinstance(s, OptimizerStateInput)}
    for spec, node in zip(step.signature.outputs, step.output_args(), strict=True):
        init = None
        if isinstance(spec, OptimizerStateOutput) and (spec.optimizer, spec.parameter, spec.key) not in known:
            root = aliases.root(node)
            if type(stepped[spec.optimizer]).__module__.startswith("torch.optim"):
                init = _state_init(step, spec, root, hypers)
        if init is None:
            outputs.append(spec)
            nodes.append(node)
        else:
            inits.append(init)
            roots.append(root)
    specs: list[tuple[InputSpec, Any]] = [
        (
            OptimizerStateInput(f"s{i.optimizer}_{_safe(i.key)}_{_safe(i.parameter)}", i.optimizer, i.parameter, i.key),
            root.meta["val"],
        )
        for i, root in zip(inits, roots, strict=True)
    ]
    for root, placeholder in zip(roots, step.add_inputs(specs), strict=True):
        root.replace_all_uses_with(placeholder)
        step.graph.erase_node(root)
    step.signature = replace(step.signature, outputs=tuple(outputs))
    final = step.output_node()
    final.args = (tuple(nodes),)
    return inits


def _state_init(
    step: StepGraph, spec: OptimizerStateOutput, root: fx.Node, hypers: dict[fx.Node, tuple[int, Hyperparameter]]
) -> StateInit | None:
    name = str(root.target).removeprefix("aten.").split(".")[0]
    if root.op != "call_function" or name not in _FACTORIES:
        return None
    value: Any = _FACTORIES[name]
    if value is None:
        value = root.kwargs.get("fill_value", root.args[-1])
    hyper = hypers.get(value) if isinstance(value, fx.Node) else None
    if not isinstance(value, (int, float)) and hyper is None:
        return None
    made = root.meta["val"]
    layout = step.layout[spec.parameter]
    return StateInit(
        spec.optimizer,
        spec.parameter,
        spec.key,
        like_parameter=tuple(made.shape) == layout.shape and not layout.replicated,
        shape=tuple(made.shape),
        dtype=made.dtype,
        device=made.device,
        value=0.0 if hyper is not None else value,
        hyperparameter=hyper,
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
    if leaf.requires_grad:
        raise CaptureError(
            message(
                f"Argument {path} of the step requires a gradient.",
                "The compiled step does not fill the .grad of its inputs.",
                "Inside the step: x = x.detach().requires_grad_(), and return torch.autograd.grad(loss, x) or x.grad.",
            )
        )


def _check_leaf(leaf: Any, path: str) -> None:
    if any(isinstance(v, torch.Tensor) for v in getattr(leaf, "__dict__", {}).values()) and not isinstance(
        leaf, nn.Module
    ):
        raise CaptureError(
            message(
                f"Argument {path} is a {type(leaf).__name__}, which holds tensors but is not a pytree.",
                "Its tensors would be baked into the graph as constants.",
                "Pass a tuple, dict or named tuple, or register the class with torch.utils._pytree.register_dataclass.",
            )
        )


@contextlib.contextmanager
def _rng_kept() -> Iterator[None]:
    """Tracing draws no random numbers on tensors, but the user's Python code may."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[None]:
    """Puts every attribute of every submodule back, the contents of lists and dicts included."""
    saved = []
    for module in model.modules():
        containers = [
            (value, value.copy()) for value in module.__dict__.values() if isinstance(value, (list, dict, set))
        ]
        saved.append((module, dict(module.__dict__), containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            for container, content in containers:
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextlib.contextmanager
def _grad_mode_kept() -> Iterator[None]:
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(before)
        torch.clear_autocast_cache()  # it may hold casts of stand-ins


@contextlib.contextmanager
def _translated(train_step: Callable[..., Any], watch: _Watch) -> Iterator[None]:
    """Gives errors of torch's tracing our form; leaves the user's own errors as they are, with a note."""
    try:
        yield
    except CaptureError:
        raise
    except DATA_DEPENDENT as error:
        if watch.in_optimizer:
            raise CaptureError(
                message(
                    "The optimizer decides in Python on a value of its state (as RAdam, ASGD and Adafactor do).",
                    f"The step is one graph for all calls ({type(error).__name__}).",
                    "Use one without such branches (Adam, AdamW, SGD, NAdam, RMSprop, Adagrad, Muon, ...), or its "
                    "capturable=True form where it has one.",
                    str(user_frame_of(error) or ""),
                )
            ) from error
        raise CaptureError(
            message(
                "The step does something whose shape or course depends on a tensor's values.",
                f"The step is one graph for all calls ({type(error).__name__}: {str(error).splitlines()[0]}).",
                "Use a form of fixed shape (a mask and torch.where instead of indexing by a mask or nonzero()), or do "
                "it outside the step.",
                str(user_frame_of(error) or ""),
            )
        ) from error
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise CaptureError(
                message(
                    "The step calls backward a second time on a graph that the first call freed.",
                    "Eager PyTorch fails here too.",
                    "Pass retain_graph=True to the first backward, or add the losses and call backward once.",
                    str(user_frame_of(error) or ""),
                )
            ) from error
        error.add_note(_note(train_step, error))
        raise
    except Exception as error:
        error.add_note(_note(train_step, error))
        raise


def _note(train_step: Callable[..., Any], error: BaseException) -> str:
    name = getattr(train_step, "__name__", type(train_step).__name__)
    return f"fsdp_fx: raised by the user's code while '{name}' was traced, at {user_frame_of(error)}"
