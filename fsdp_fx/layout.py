"""Which rank owns which rows of which parameter: pure arithmetic, no tensors.

The rule (DESIGN, "Storage"): rank r owns rows [r*c, (r+1)*c) of dimension 0, c = ceil(rows / world), the
last ones padded with zeros. That is `torch.chunk`'s split, so an unpadded shard is exactly the local
tensor of a `DTensor` with `Shard(0)`. A 0-d parameter has no rows and is replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["ALIGNMENT", "ModelLayout", "ParamLayout"]

ALIGNMENT = 16
"""Every parameter starts at a multiple of this many bytes in its flat buffer (vector loads, grouped_mm)."""


@dataclass(frozen=True)
class ParamLayout:
    """One parameter tensor: its full shape and where its shard lies.

    `name` is the first name under which the model holds it, `aliases` all others (tied weights).
    `offset` and `span` count elements of the flat buffer of this dtype; `span` includes alignment.
    """

    name: str
    aliases: tuple[str, ...]
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    world: int
    offset: int
    span: int

    @property
    def replicated(self) -> bool:
        """0-d: every rank holds it whole and gradients are all-reduced."""
        return not self.shape

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def shard_rows(self) -> int:
        """Rows per rank, padding included."""
        return -(-self.rows // self.world) if self.shape else 1

    @property
    def padded(self) -> bool:
        """True if the last rank's rows (or more) are padding."""
        return not self.replicated and self.shard_rows * self.world != self.rows

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of every rank's storage, padding included."""
        return (self.shard_rows, *self.shape[1:]) if self.shape else ()

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the gathered parameter before padding is dropped."""
        return (self.shard_rows * self.world, *self.shape[1:]) if self.shape else ()

    @property
    def shard_numel(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return self.numel * self.dtype.itemsize

    def local_rows(self, rank: int) -> int:
        """Rows that `rank` owns, padding excluded."""
        if not self.shape:
            return 1
        return min(self.shard_rows, max(0, self.rows - rank * self.shard_rows))


@dataclass(frozen=True)
class ModelLayout:
    """All parameters of a model in registration order; flat buffers are one per dtype."""

    params: tuple[ParamLayout, ...]
    world: int
    device: torch.device

    def __getitem__(self, name: str) -> ParamLayout:
        return self._by_name[name]

    @property
    def _by_name(self) -> dict[str, ParamLayout]:
        found = self.__dict__.get("_cache")
        if found is None:
            found = {p.name: p for p in self.params}
            object.__setattr__(self, "_cache", found)
        return found

    def storages(self) -> dict[torch.dtype, int]:
        """Elements of each flat buffer."""
        sizes: dict[torch.dtype, int] = {}
        for p in self.params:
            sizes[p.dtype] = max(sizes.get(p.dtype, 0), p.offset + p.span)
        return sizes

    @staticmethod
    def build(
        named: list[tuple[str, tuple[str, ...], tuple[int, ...], torch.dtype]],
        world: int,
        device: torch.device,
    ) -> ModelLayout:
        """Lays parameters (name, aliases, full shape, dtype) out one after the other per dtype."""
        ends: dict[torch.dtype, int] = {}
        params = []
        for index, (name, aliases, shape, dtype) in enumerate(named):
            rows = (-(-shape[0] // world),) if shape else ()
            numel = math.prod((*rows, *shape[1:]))
            step = max(1, ALIGNMENT // dtype.itemsize)
            span = -(-numel // step) * step
            offset = ends.get(dtype, 0)
            ends[dtype] = offset + span
            params.append(ParamLayout(name, aliases, index, shape, dtype, world, offset, span))
        return ModelLayout(tuple(params), world, device)
