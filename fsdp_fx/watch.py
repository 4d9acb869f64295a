"""What a step may not do inside one graph: refused at the user's line, while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_fx._torch_private import DATA_DEPENDENT, FakeTensor, record_in_place
from fsdp_fx.errors import CaptureError, message, user_frame, user_frame_of
from fsdp_fx.printing import type_text

__all__ = ["Watch", "translated"]


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


class Watch(TorchFunctionMode):
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


@contextlib.contextmanager
def translated(train_step: Callable[..., Any], watch: Watch) -> Iterator[None]:
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
