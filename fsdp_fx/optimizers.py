"""Optimizers: found because they hold the model's parameters, used because they are stepped.

Reads hyperparameters and state for every call, and swaps both for traced stand-ins while a step is captured.
"""

from __future__ import annotations

import contextlib
import gc
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_fx.errors import CaptureError, message, user_frame
from fsdp_fx.storage import ShardedModel

__all__ = [
    "Hyperparameter",
    "find_optimizers",
    "rebind_optimizers",
    "read_hyperparameter",
    "static_settings",
    "swapped",
]


@dataclass(frozen=True)
class Hyperparameter:
    """Where a value that may change between calls lies: `param_groups[group][key]`, `[index]` if a tuple."""

    group: int
    key: str
    index: int | None = None


def find_optimizers(parameters: Mapping[int, Any]) -> list[Optimizer]:
    """All living optimizers that hold at least one of these parameters (by id), oldest object first.

    A walk over the garbage collector's objects finds them in closures, globals and attributes alike; it
    costs tens of milliseconds and happens when a step is compiled, never when it runs.
    """
    found = []
    for candidate in gc.get_objects():
        # type(), not isinstance(): a proxy object's __class__ may run its owner's code.
        if issubclass(type(candidate), Optimizer) and hasattr(candidate, "param_groups"):
            held = (id(p) for group in candidate.param_groups for p in group["params"])
            if any(p in parameters for p in held):
                found.append(candidate)
    return found


def rebind_optimizers(sharded: ShardedModel) -> None:
    """Points optimizers built before `fsdp_compile` at the shards, their existing state sharded likewise."""
    for optimizer in find_optimizers(sharded.replaced):
        for group in optimizer.param_groups:
            group["params"][:] = [_shard_of(p, sharded) for p in group["params"]]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter, entries in optimizer.state.items():
            index = sharded.replaced.get(id(parameter))
            if index is None:
                state[parameter] = entries
                continue
            layout = sharded.layout.params[index]
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not layout.replicated:
                    value = sharded.as_dtensor(sharded.padded_local(value, layout).clone(), layout)
                state[sharded.parameters[index]][key] = value
        optimizer.state = state


def _shard_of(parameter: Any, sharded: ShardedModel) -> Any:
    index = sharded.replaced.get(id(parameter))
    return parameter if index is None else sharded.parameters[index]


def _is_input(value: Any) -> bool:
    """Floats, numpy's among them (schedulers make those), and tensors; not ints and flags."""
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def hyperparameters(optimizer: Optimizer) -> list[Hyperparameter]:
    """Every float (and tensor) of every group: these are graph inputs. Flags, ints and None are guards."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key in ("params", "param_names") or key.startswith("initial_"):
                continue  # initial_lr belongs to schedulers; optimizers do not read it
            if _is_input(value):
                found.append(Hyperparameter(number, key))
            elif isinstance(value, (tuple, list)):
                found += [Hyperparameter(number, key, i) for i, item in enumerate(value) if _is_input(item)]
    return found


def read_hyperparameter(optimizer: Optimizer, where: Hyperparameter) -> Any:
    """The value now: a tensor, or a Python float."""
    value = optimizer.param_groups[where.group][where.key]
    if where.index is not None:
        value = value[where.index]
    return value if isinstance(value, torch.Tensor) else float(value)


def static_settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """What of the param groups is baked into a trace, as a hashable guard."""
    settings: list[Any] = []
    for group in optimizer.param_groups:
        settings.append(len(group["params"]))
        for key, value in group.items():
            if key in ("params", "param_names") or key.startswith("initial_"):
                continue
            settings.append((key, _static(value)))
    return tuple(settings)


def _static(value: Any) -> Any:
    if _is_input(value):
        return "tensor" if isinstance(value, torch.Tensor) else "float"
    if isinstance(value, (tuple, list)):
        return tuple(_static(item) for item in value)
    if isinstance(value, (numbers.Number, str, type(None))):
        return value
    return id(value)


@contextlib.contextmanager
def swapped(
    optimizers: list[Optimizer],
    parameter_of: Callable[[Any], Any],
    hyper_of: Callable[[int, Hyperparameter], Any],
    state_of: Callable[[int, Any], dict[str, Any]],
    gone: Callable[[Optimizer, Any], Exception],
    watch: Any,
) -> Iterator[list[Optimizer]]:
    """While the context is open the optimizers hold stand-ins; afterwards everything is as it was, to the object.

    `parameter_of(p)` gives the stand-in of a parameter (None if the model does not own it), `hyper_of` that of a
    hyperparameter, `state_of(position, p)` that of its state. Yields the optimizers stepped so far, in order;
    one that steps a parameter the model does not own raises `gone(optimizer, parameter)`.
    `watch.in_optimizer` is above zero while a step runs.
    """
    stepped: list[Optimizer] = []
    strangers: dict[int, list[Any]] = {}

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise CaptureError(
                message(
                    f"{type(optimizer).__name__}.step was given a closure.",
                    "A closure is run an unknown number of times, so the step has no single graph.",
                    "Call loss.backward() yourself and then optimizer.step() without arguments.",
                    str(user_frame() or ""),
                )
            )
        known = id(optimizer) in strangers
        if not known or strangers[id(optimizer)]:
            stranger = strangers[id(optimizer)][0] if known else optimizer.param_groups[0]["params"][0]
            raise gone(optimizer, stranger)
        if not any(o is optimizer for o in stepped):
            stepped.append(optimizer)
        watch.in_optimizer += 1

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watch.in_optimizer -= 1

    with contextlib.ExitStack() as stack:
        for position, optimizer in enumerate(optimizers):
            stack.callback(_restore, optimizer, _snapshot(optimizer))
            wheres = hyperparameters(optimizer)
            values = {w: hyper_of(position, w) for w in wheres}
            strangers[id(optimizer)] = []
            state: defaultdict[Any, Any] = defaultdict(dict)
            for number, group in enumerate(optimizer.param_groups):
                stand_ins = []
                for p in group["params"]:
                    stand_in = parameter_of(p)
                    if stand_in is None:
                        strangers[id(optimizer)].append(p)
                        stand_ins.append(p)
                    else:
                        stand_ins.append(stand_in)
                        entries = state_of(position, p)
                        if entries:
                            state[stand_in] = entries
                group["params"][:] = stand_ins
                for key, value in list(group.items()):
                    if Hyperparameter(number, key) in values:
                        group[key] = values[Hyperparameter(number, key)]
                    elif isinstance(value, (tuple, list)) and key not in ("params", "param_names"):
                        group[key] = type(value)(
                            values.get(Hyperparameter(number, key, i), item) for i, item in enumerate(value)
                        )
            optimizer.state = state
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        yield stepped


def _snapshot(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = [(group, dict(group), group["params"], list(group["params"])) for group in optimizer.param_groups]
    return dict(optimizer.__dict__), groups


def _restore(optimizer: Optimizer, snapshot: tuple[Any, ...]) -> None:
    attributes, groups = snapshot
    optimizer.__dict__.clear()
    optimizer.__dict__.update(attributes)
    for group, items, params, elements in groups:
        group.clear()
        group.update(items)
        params[:] = elements
