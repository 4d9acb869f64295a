"""The shards themselves: flat buffers, the DTensors that users see, and the swap of a model's parameters.

Rank r's shards of one dtype lie side by side in one flat buffer, in registration order. The user's view
of a shard is a `DTensor` with `Shard(0)` whose local tensor is a view of that buffer without the padding,
so checkpoints, `clip_grad_norm_` and eager optimizers work on it; the graph reads the padded view.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_fx._torch_private import local_tensor
from fsdp_fx.errors import ConfigError, StateError, message
from fsdp_fx.layout import ModelLayout, ParamLayout

__all__ = ["ShardedModel", "check_no_hooks", "contiguous_stride"]

_SLOT = "_fsdp_fx_slot"  # attribute of our parameters: which ShardedModel they belong to


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass
class _Owner:
    """One place in the module tree that holds a parameter."""

    module: nn.Module
    attribute: str
    index: int


class _Slot:
    """Ties a parameter to its `ShardedModel`; copies and pickles of the parameter are not tied."""

    def __init__(self, sharded: ShardedModel | None = None):
        self.sharded = sharded

    def __deepcopy__(self, memo: Any) -> _Slot:
        return _Slot()

    def __reduce__(self) -> Any:
        return _Slot, ()


def rebased(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own that begins with it. DTensor takes over a local tensor's
    storage offset, and copy.deepcopy of a DTensor with one fails; torch.save of a view writes its whole base."""
    if view.storage_offset() == 0 or view.device.type == "meta":
        return view
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


@dataclass
class FlatStorage:
    """One flat buffer and its padded per-parameter views, for parameters or one kind of optimizer state."""

    flats: dict[torch.dtype, torch.Tensor]
    views: list[torch.Tensor] = field(default_factory=list)


class ShardedModel:
    """A model whose parameters are shards of flat buffers; made once per model, shared by all its steps."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh):
        self.mesh = mesh
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.optimizer_shards: Any = None  # set by fsdp_compile; lives and dies with the shards
        self.rank = mesh.get_local_rank()
        world = mesh.size()
        entries = _named_parameters(model)
        device = _one_device(entries, mesh)
        self.meta = device.type == "meta"
        self.device = torch.device(mesh.device_type) if self.meta else device
        self.layout = ModelLayout.build(
            [(names[0], tuple(names[1:]), tuple(p.shape), p.dtype) for names, p, _ in entries],
            world,
            self.device,
        )
        storage_device = torch.device("meta") if self.meta else device
        flats = {
            dtype: torch.zeros(size, dtype=dtype, device=storage_device)
            for dtype, size in self.layout.storages().items()
        }
        self.storage = FlatStorage(flats)
        self.parameters: list[nn.Parameter] = []
        self.owners: list[_Owner] = []
        self.replaced: dict[int, int] = {}  # id of the parameter before -> index, for rebinding optimizers
        self._kept_alive = [p for _, p, _ in entries]
        # The user may keep lists of the parameters of before; weak, since an id is used again after its object.
        self._before = [(weakref.ref(p), i) for i, (_, p, _) in enumerate(entries)]
        for names, old, _ in entries:
            check_no_hooks(old, names[0])
        for layout, (_, old, owners) in zip(self.layout.params, entries, strict=True):
            view = self._padded_view(flats[layout.dtype], layout)
            self.storage.views.append(view)
            self._fill(view, old.detach(), layout)
            new = nn.Parameter(self.as_dtensor(view, layout), requires_grad=old.requires_grad)
            new.__dict__.update({k: v for k, v in old.__dict__.items() if k != _SLOT})
            setattr(new, _SLOT, _Slot(self))
            if old.grad is not None:
                shard = torch.zeros_like(view)
                self._fill(shard, old.grad, layout)
                new.grad = self.as_dtensor(shard, layout)
            self.parameters.append(new)
            self.replaced[id(old)] = layout.index
            self.owners += [_Owner(module, attribute, layout.index) for module, attribute in owners]
        for owner in self.owners:
            setattr(owner.module, owner.attribute, self.parameters[owner.index])

    def release_replaced(self) -> None:
        """Forgets the full parameters once nothing needs to be rebound to their shards any more."""
        self.replaced.clear()
        self._kept_alive.clear()

    def known_objects(self) -> dict[int, int]:
        """Index by id of every living object that stands for a parameter: the shards, and what they replaced as
        far as the user still holds it."""
        found = {id(p): i for i, p in enumerate(self.parameters)}
        for ref, index in self._before:
            old = ref()
            if old is not None:
                found[id(old)] = index
        return found

    @staticmethod
    def of(model: nn.Module) -> ShardedModel | None:
        """The sharding that `fsdp_compile` gave this model earlier, if any."""
        slots = [slot for p in model.parameters() if (slot := getattr(p, _SLOT, None)) is not None]
        found = {id(slot.sharded): slot.sharded for slot in slots if slot.sharded is not None}
        if not found:
            return None
        sharded: ShardedModel = next(iter(found.values()))
        if len(found) > 1 or len(list(model.parameters())) != len(sharded.parameters):
            raise ConfigError(
                message(
                    "The model mixes parameters that were sharded by fsdp_compile together with others.",
                    "All parameters of one model share one layout.",
                    "Call fsdp_compile once on the outermost module, and compile further steps with that module.",
                )
            )
        return sharded

    def _padded_view(self, flat: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
        return flat.narrow(0, layout.offset, layout.shard_numel).view(layout.shard_shape)

    def _fill(self, view: torch.Tensor, full: torch.Tensor, layout: ParamLayout) -> None:
        if self.meta:
            return
        with torch.no_grad():
            rows = layout.local_rows(self.rank)
            if layout.replicated:
                view.copy_(full)
            elif rows and layout.numel:
                view[:rows].copy_(full.narrow(0, self.rank * layout.shard_rows, rows))

    def as_dtensor(self, view: torch.Tensor, layout: ParamLayout) -> DTensor:
        """The user's DTensor over a padded shard: same memory, padding out of sight."""
        if layout.replicated:
            return DTensor.from_local(rebased(view), self.mesh, [Replicate()], run_check=False)
        return self.rows_as_dtensor(view, layout.shape)

    def rows_as_dtensor(self, view: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
        """A DTensor of `shape` over this rank's padded rows of it."""
        mine = view.shape[0]
        return DTensor.from_local(
            rebased(view)[: min(mine, max(0, shape[0] - self.rank * mine))],
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=contiguous_stride(shape),
        )

    def new_storage(self, dtype_of: dict[int, torch.dtype]) -> FlatStorage:
        """A zeroed buffer laid out like the parameters `dtype_of` names (index -> dtype of its entries).

        `views` holds a view for each of those parameters and an empty tensor for the others.
        """
        device = torch.device("meta") if self.meta else self.device
        offsets: dict[int, int] = {}
        sizes: dict[torch.dtype, int] = {}
        for layout in self.layout.params:
            if layout.index in dtype_of:
                dtype = dtype_of[layout.index]
                offsets[layout.index] = sizes.get(dtype, 0)
                sizes[dtype] = offsets[layout.index] + layout.span
        flats = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}
        storage = FlatStorage(flats)
        for layout in self.layout.params:
            if layout.index in offsets:
                flat = flats[dtype_of[layout.index]]
                view = flat.narrow(0, offsets[layout.index], layout.shard_numel).view(layout.shard_shape)
            else:
                view = torch.empty(0)
            storage.views.append(view)
        return storage

    def padded_local(self, tensor: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
        """This rank's padded shard of a tensor shaped like a parameter: a DTensor in any placement, or a
        full tensor. Shares memory where the tensor already is an unpadded `Shard(0)` without padding."""
        if isinstance(tensor, DTensor):
            wanted = Replicate() if layout.replicated else Shard(0)
            if tuple(tensor.placements) != (wanted,):
                tensor = tensor.redistribute(self.mesh, [wanted])
            local = local_tensor(tensor)
        elif layout.replicated:
            return tensor
        else:
            local = tensor.narrow(0, *self._range(layout))
        if layout.padded or not local.is_contiguous():
            padded = local.new_zeros(layout.shard_shape)
            padded[: local.shape[0]].copy_(local)
            return padded
        return local

    def show_gradient(self, index: int, padded: torch.Tensor) -> None:
        """Puts a padded gradient shard into `p.grad`."""
        shown = self.as_dtensor(padded, self.layout.params[index])
        self.parameters[index].grad = shown
        self._gradients[index] = (shown, padded)

    def gradient(self, index: int) -> torch.Tensor:
        """The padded shard behind `p.grad`, taken in first if somebody else put it there; writes to it show."""
        grad = self.parameters[index].grad
        assert grad is not None
        known = self._gradients.get(index)
        if known is None or known[0] is not grad:
            self.show_gradient(index, self.padded_local(grad, self.layout.params[index]))
        return self._gradients[index][1]

    def clear_gradient(self, index: int) -> None:
        self.parameters[index].grad = None
        self._gradients.pop(index, None)

    def _range(self, layout: ParamLayout) -> tuple[int, int]:
        rows = layout.local_rows(self.rank)
        return min(self.rank * layout.shard_rows, layout.rows), rows

    def check_parameters(self) -> None:
        """Raises if a module no longer holds the parameter that this object shards."""
        for owner in self.owners:
            if owner.module._parameters.get(owner.attribute) is not self.parameters[owner.index]:
                name = self.layout.params[owner.index].name
                raise StateError(
                    message(
                        f"Parameter '{name}' of the model was replaced by another object after fsdp_compile.",
                        "The compiled step holds this parameter's shard; the new object would never be trained.",
                        "Copy values in place (model.load_state_dict, `with torch.no_grad(): p.copy_(...)`), or "
                        "call fsdp_compile again on a fresh model.",
                    )
                )

    def nbytes(self) -> int:
        """Bytes of this rank's parameter shards, padding included."""
        return sum(math.prod(flat.shape) * flat.itemsize for flat in self.storage.flats.values())


def _named_parameters(
    model: nn.Module,
) -> list[tuple[list[str], nn.Parameter, list[tuple[nn.Module, str]]]]:
    """(all names, parameter, all places) per distinct parameter, in registration order."""
    found: dict[int, tuple[list[str], nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ConfigError(
                    message(
                        f"Parameter '{prefix}.{attribute}' is not initialised yet (a Lazy module).",
                        "Its shape decides which rows each rank owns.",
                        "Run one forward on a small batch before fsdp_compile.",
                    )
                )
            names, _, owners = found.setdefault(id(parameter), ([], parameter, []))
            names.append(f"{prefix}.{attribute}" if prefix else attribute)
            owners.append((module, attribute))
    for names, parameter, _ in found.values():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                message(
                    f"Parameter '{names[0]}' is a DTensor already.",
                    "fsdp_compile shards plain parameters; it does not yet compose with other parallelisms.",
                    "Pass the model before fully_shard or parallelize_module is applied.",
                )
            )
    return list(found.values())


def check_no_hooks(parameter: nn.Parameter, name: str) -> None:
    """Raises for hooks that a compiled step would not run."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            message(
                f"Parameter '{name}' has a gradient hook (register_hook).",
                "The compiled step works on shards of the parameter and would never call it.",
                "Edit the gradient inside the step, between backward() and optimizer.step(): p.grad.mul_(...).",
            )
        )


def _one_device(entries: list[Any], mesh: DeviceMesh) -> torch.device:
    places: dict[torch.device, str] = {}
    for names, parameter, _ in entries:
        places.setdefault(parameter.device, names[0])
    if len(places) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in places.items())
        raise ConfigError(
            message(
                f"The model's parameters lie on {len(places)} devices: {listed}.",
                "Each rank trains on one device; shards of one collective must lie together.",
                f"Move the model to one device first: model.to('{mesh.device_type}').",
            )
        )
    device = next(iter(places)) if places else torch.device(mesh.device_type)
    if device.type not in ("meta", mesh.device_type):
        raise ConfigError(
            message(
                f"The model is on {device}, the mesh on '{mesh.device_type}'.",
                "Shards are communicated by the mesh's process group, on its device.",
                f"model.to('{mesh.device_type}') before fsdp_compile, or pass a mesh of '{device.type}'.",
            )
        )
    return device
