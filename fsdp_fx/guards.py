"""What a compiled graph is valid for: the key under which it is found again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.utils import _pytree as pytree

from fsdp_fx.storage import ShardedModel

__all__ = ["Guards"]


class Guards:
    """Computes keys: batch tree, shapes, dtypes, devices, other leaves, flags of model and process.

    Optimizers' guards are each program's own (`Program.why_not`), since which optimizers are stepped is known only
    after tracing.
    """

    NAMES = (
        "the structure of the arguments",
        "shapes, dtypes or values of the arguments",
        "train()/eval() flags",
        "requires_grad flags",
        "which parameters have a gradient",
        "grad mode or autocast",
    )

    def __init__(self, model: nn.Module, sharded: ShardedModel):
        self._modules = list(model.modules())
        self._parameters = sharded.parameters
        self._device_type = sharded.device.type

    def key(self, leaves: list[Any], tree: pytree.TreeSpec) -> tuple[Any, ...]:
        return (
            tree,
            tuple([_leaf(leaf) for leaf in leaves]),
            tuple([m.training for m in self._modules]),
            tuple([p.requires_grad for p in self._parameters]),
            tuple([p.grad is not None for p in self._parameters]),
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled(self._device_type),
                torch.get_autocast_dtype(self._device_type),
            ),
        )

    def structure(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key without batch shapes: programs of one structure share one plan."""
        tree, leaves, *rest = key
        kinds = tuple(
            ("tensor", leaf[2]) if isinstance(leaf, tuple) and leaf[0] == "tensor" else leaf for leaf in leaves
        )
        return (tree, kinds, *rest)

    def difference(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        """What changed between two keys, in words."""
        changed = []
        for name, old, new in zip(self.NAMES, before, now, strict=True):
            if old != new:
                if name == self.NAMES[1]:
                    pairs = [_pair(a, b) for a, b in zip(old, new, strict=False) if a != b]
                    name = f"{name} ({', '.join(pairs[:3])})"
                changed.append(name)
        return " and ".join(changed) + " changed" if changed else "no compiled graph fits"


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # The stride of a dimension of size 1 means nothing, and slices of growing tensors have any.
        stride = tuple([s if n != 1 else 0 for n, s in zip(leaf.shape, leaf.stride(), strict=True)])
        return ("tensor", leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, stride)
    if isinstance(leaf, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return (type(leaf), leaf)  # True == 1 == 1.0, but they trace differently
    return ("object", id(leaf))


def _pair(before: Any, now: Any) -> str:
    if before[0] == now[0] == "tensor":
        fields = ("shape", "dtype", "device", "requires_grad", "stride")
        shown = [
            f"{name} {_plain(a)} -> {_plain(b)}"
            for name, a, b in zip(fields, before[1:], now[1:], strict=True)
            if a != b
        ]
        return " and ".join(shown)
    return f"{before[1]} -> {now[1]}"


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
