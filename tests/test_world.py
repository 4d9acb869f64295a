"""Where the mesh comes from when none is given, and what its backend is called."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_fx import fsdp_compile
from fsdp_fx._torch_private import backend_name


def without_setup():
    """Plain python: a world of one is made, and only when it is needed."""
    assert not dist.is_initialized()
    model = nn.Linear(3, 3)
    step = fsdp_compile(lambda model, x: model(x).sum(), model)
    value = step(torch.ones(2, 3)).item()
    world = dist.get_world_size()
    dist.destroy_process_group()
    return value, world, [str(d.reason) for d in step.report().decisions]


def test_a_world_of_one_needs_no_setup(ranks):
    value, world, reasons = ranks(0, without_setup)[0]
    assert isinstance(value, float)
    assert world == 1
    assert "the world has one rank" in reasons


def several_backends():
    """A group made without naming a backend has one per device; ours is that of the mesh's device."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    name = backend_name(dist.group.WORLD, "cpu")
    dist.destroy_process_group()
    return name


def test_backend_of_a_group_with_several(ranks):
    assert ranks(0, several_backends) == ["gloo"]


def torchrun_environment():
    """What torchrun sets is enough: the group is made from it."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        fsdp_compile(lambda model, x: model(x).sum(), nn.Linear(3, 3))(torch.ones(2, 3))
        return dist.get_world_size(), dist.get_backend()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)


def test_the_environment_of_torchrun(ranks):
    assert ranks(0, torchrun_environment) == [(1, "gloo")]
