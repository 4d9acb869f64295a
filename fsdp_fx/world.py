"""The mesh a step runs on: given, from torchrun's environment, a world of one, or simulated."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_fx._torch_private import fake_store, local_store
from fsdp_fx.errors import CollectiveError, ConfigError, message

__all__ = ["check_alive", "find_mesh", "is_simulated", "simulated_world"]


def find_mesh(mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """The given mesh, checked; or a 1-D mesh over the world, which is initialised if need be."""
    if mesh is not None:
        return _checked(mesh)
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if device_type == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("gloo" if device_type == "cpu" else None)
        else:
            dist.init_process_group("gloo", store=local_store(), rank=0, world_size=1)
        atexit.register(_goodbye)
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _goodbye() -> None:
    """Destroys the group that we made, before the interpreter tears threads down under it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _checked(mesh: DeviceMesh) -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            message(
                "A mesh was given but torch.distributed is not initialised.",
                "The mesh's process group is gone.",
                "Call torch.distributed.init_process_group and make the mesh anew.",
            )
        )
    if mesh.ndim != 1:
        raise ConfigError(
            message(
                f"The mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}.",
                "Parameters are sharded over one dimension; hybrid meshes are not supported yet.",
                "Pass a 1-D mesh: init_device_mesh(device_type, (world_size,)).",
            )
        )
    world = dist.get_world_size()
    if mesh.size() != world:
        raise ConfigError(
            message(
                f"The mesh has {mesh.size()} ranks, the world {world}.",
                "Ranks outside the mesh would never call its collectives, nor agree on the plan.",
                f"Make the mesh over all ranks: init_device_mesh('{mesh.device_type}', ({world},)).",
            )
        )
    return mesh


def is_simulated() -> bool:
    """True on the fake process group, whose collectives do nothing."""
    return dist.is_initialized() and str(dist.get_backend()) == "fake"


def check_alive(mesh: DeviceMesh) -> None:
    """Raises if the process group behind the mesh was destroyed."""
    if mesh.size() > 1 and not dist.is_initialized():
        raise CollectiveError(
            message(
                "The compiled step was called after its process group was destroyed.",
                f"Its collectives have no ranks to talk to (the mesh had {mesh.size()}).",
                "Call destroy_process_group() after the last step; to go on, initialise and fsdp_compile anew.",
            )
        )


@contextlib.contextmanager
def simulated_world(world_size: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh of any size in one process, for compiling without hardware: rank 0 of `world_size` ranks.

    Uses PyTorch's fake process group: collectives do nothing, so steps are compiled, not run.

        with fsdp_fx.simulated_world(1024) as mesh, torch.device("meta"):
            model = GPT()
            step = fsdp_compile(train_step, model, mesh=mesh).compile(tokens, labels)
            print(step.report())

    Raises `ConfigError` if a process group exists already, or for a device type that this process cannot use.
    """
    if device_type != "cpu" and not getattr(torch, device_type).is_available():
        raise ConfigError(
            message(
                f"A simulated world on '{device_type}' needs a torch and a machine with that device.",
                "Autograd keeps a thread per device, also for tensors without memory, and crashes where there is none.",
                "Simulate on 'cpu': shapes, collectives and bytes are the same.",
            )
        )
    if dist.is_initialized():
        raise ConfigError(
            message(
                "simulated_world needs a process without a process group.",
                "The simulated group becomes the default one.",
                "Run the simulation in a process of its own.",
            )
        )
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh(device_type, (world_size,))
    finally:
        dist.destroy_process_group()
