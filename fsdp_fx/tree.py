"""Trees of values going into and coming out of a step: pytrees, and any other object that holds tensors.

A dataclass or plain object that pytree does not know counts as a node whose children are its attributes, so a step
may take and return it; what is rebuilt is a new object of the same class, made without calling `__init__`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn as nn
from torch.utils import _pytree as pytree

__all__ = ["flatten", "flatten_with_paths"]

_PLAIN = {torch.Tensor, nn.Parameter, int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device}
_DEPTH = 16


class _Record:
    """Stands for an object in a tree, opened to its attributes."""

    def __init__(self, kind: type, values: dict[str, Any]):
        self.kind = kind
        self.values = values


def _rebuilt(children: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)
    for name, value in zip(names, children, strict=True):
        object.__setattr__(made, name, value)  # frozen dataclasses, too
    return made


pytree.register_pytree_node(
    _Record,
    lambda record: (list(record.values.values()), (record.kind, tuple(record.values))),
    _rebuilt,
    flatten_with_keys_fn=lambda record: (
        [(pytree.GetAttrKey(name), value) for name, value in record.values.items()],
        (record.kind, tuple(record.values)),
    ),
)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; `pytree.tree_unflatten` gives an equal value back."""
    leaves, spec = pytree.tree_flatten(value)
    if any(type(leaf) not in _PLAIN for leaf in leaves):
        return pytree.tree_flatten(_opened(value, _DEPTH))
    return leaves, spec


def flatten_with_paths(value: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """As `flatten`, each leaf with the expression that reaches it, such as `[0]['x']`."""
    pairs, spec = pytree.tree_flatten_with_path(_opened(value, _DEPTH))
    return [(pytree.keystr(path), leaf) for path, leaf in pairs], spec


def _opened(value: Any, depth: int) -> Any:
    return pytree.tree_map(lambda leaf: _open(leaf, depth), value)


def _open(leaf: Any, depth: int) -> Any:
    """The object as a record if there is a tensor anywhere in it, else itself."""
    if type(leaf) in _PLAIN or isinstance(leaf, (torch.Tensor, nn.Module, type)) or depth == 0:
        return leaf
    if dataclasses.is_dataclass(leaf):
        values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
        values.update(getattr(leaf, "__dict__", {}))
    else:
        values = getattr(leaf, "__dict__", {})
    if not values or callable(leaf):
        return leaf
    opened = {name: _opened(item, depth - 1) for name, item in values.items()}
    if not any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(opened)):
        return leaf
    return _Record(type(leaf), opened)
