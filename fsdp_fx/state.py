"""Optimizer state on shards: created sharded, found again on every call, adopted when the user loads another."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_fx.lazy_state import StateInit
from fsdp_fx.storage import FlatStorage, ShardedModel

__all__ = ["OptimizerShards"]


class OptimizerShards:
    """The padded shards behind the state that optimizers show; one per model, shared by all its steps."""

    def __init__(self, sharded: ShardedModel):
        self.sharded = sharded
        # optimizer -> (parameter index, key) -> (the object in optimizer.state, what the graph works on)
        self._known: weakref.WeakKeyDictionary[Optimizer, dict[tuple[int, str], tuple[Any, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def has(self, optimizer: Optimizer, index: int, key: str) -> bool:
        entries = optimizer.state.get(self.sharded.parameters[index])
        return entries is not None and isinstance(entries.get(key), torch.Tensor)

    def local(self, optimizer: Optimizer, index: int, key: str) -> torch.Tensor:
        """The tensor that the graph reads and writes for this state; what it writes the user sees."""
        value = optimizer.state[self.sharded.parameters[index]][key]
        known = self._known.setdefault(optimizer, {})
        entry = known.get((index, key))
        if entry is not None and entry[0] is value:
            return entry[1]
        return self._adopt(optimizer, index, key, value)

    def _adopt(self, optimizer: Optimizer, index: int, key: str, value: torch.Tensor) -> torch.Tensor:
        """Takes in state that somebody else put there (load_state_dict, an eager step)."""
        layout = self.sharded.layout.params[index]
        if layout.replicated or tuple(value.shape) != layout.shape:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if whole is not value:
                optimizer.state[self.sharded.parameters[index]][key] = whole
            self._known[optimizer][index, key] = (whole, whole)
            return whole
        return self.put(optimizer, index, key, self.sharded.padded_local(value, layout).contiguous())

    def put(self, optimizer: Optimizer, index: int, key: str, padded: torch.Tensor) -> torch.Tensor:
        """Shows a padded shard (or a whole value) as this state; returns what the graph works on."""
        layout = self.sharded.layout.params[index]
        shown: torch.Tensor = padded
        if not layout.replicated and tuple(padded.shape) == layout.shard_shape:
            shown = self.sharded.as_dtensor(padded, layout)
        optimizer.state[self.sharded.parameters[index]][key] = shown
        self._known.setdefault(optimizer, {})[index, key] = (shown, padded)
        return padded

    def create(self, optimizers: list[Optimizer], inits: list[tuple[StateInit, float | int]]) -> None:
        """Makes lazily created state, each with its fill value; shards of one kind share a flat buffer."""
        dtypes: dict[tuple[int, str], dict[int, torch.dtype]] = {}
        index_of = {p.name: p.index for p in self.sharded.layout.params}
        for init, _ in inits:
            if init.like_parameter:
                dtypes.setdefault((init.optimizer, init.key), {})[index_of[init.parameter]] = init.dtype
        storages: dict[tuple[int, str], FlatStorage] = {
            kind: self.sharded.new_storage(dtype_of) for kind, dtype_of in dtypes.items()
        }
        for init, value in inits:
            index = index_of[init.parameter]
            optimizer = optimizers[init.optimizer]
            if init.like_parameter:
                padded = storages[init.optimizer, init.key].views[index]
                layout = self.sharded.layout.params[index]
                if value != 0:
                    padded[: layout.local_rows(self.sharded.rank)].fill_(value)
                self.put(optimizer, index, init.key, padded)
            else:
                whole = torch.full(init.shape, value, dtype=init.dtype, device=init.device)
                self.put(optimizer, index, init.key, whole)
