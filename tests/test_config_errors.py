"""What `fsdp_compile` refuses before anything is traced, and a step that outlives its process group."""

import os
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import RankError, Ranks
from torch.distributed.device_mesh import init_device_mesh

import fsdp_fx
from fsdp_fx import ConfigError, fsdp_compile


def forward(model, x):
    return model(x)


def message_of(call, kind):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def wrong_meshes():
    half = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    model = nn.Linear(4, 4)
    two_dimensional = message_of(lambda: fsdp_compile(forward, model, mesh=half), ConfigError)
    sub_mesh = message_of(
        lambda: fsdp_compile(forward, model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]),
        ConfigError,
    )
    assert type(model.weight) is nn.Parameter  # nothing was sharded
    return two_dimensional, sub_mesh


def test_a_mesh_must_be_flat_and_cover_the_world(ranks):
    two_dimensional, sub_mesh = ranks(4, wrong_meshes)[0]
    assert "2 dimensions (2, 2)" in two_dimensional
    assert "fix: Pass a 1-D mesh" in two_dimensional
    assert "The mesh has 2 ranks, the world 4." in sub_mesh
    assert "init_device_mesh('cpu', (4,))" in sub_mesh


def bad_models():
    found = {}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    found["mixed"] = message_of(lambda: fsdp_compile(forward, mixed), ConfigError)
    found["lazy"] = message_of(lambda: fsdp_compile(forward, nn.LazyLinear(3)), ConfigError)
    found["order"] = message_of(lambda: fsdp_compile(nn.Linear(2, 2), forward), ConfigError)
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: 2 * grad)
    found["hook"] = message_of(lambda: fsdp_compile(forward, hooked), ConfigError)
    found["input"] = message_of(
        lambda: fsdp_compile(forward, nn.Linear(2, 2))(2 * torch.ones(1, 2, requires_grad=True)),
        fsdp_fx.CaptureError,
    )
    sharded = cases.eager_sharded(nn.Linear(4, 4))
    found["dtensor"] = message_of(lambda: fsdp_compile(forward, sharded), ConfigError)
    model = nn.Linear(4, 4)
    step = fsdp_compile(forward, model)
    found["unread"] = message_of(lambda: step.graph, fsdp_fx.FsdpFxError)
    step(torch.ones(2, 4))
    model.weight = nn.Parameter(torch.zeros(4, 4))
    found["replaced"] = message_of(lambda: step(torch.ones(2, 4)), fsdp_fx.StateError)
    return found


def test_models_that_cannot_be_sharded(ranks):
    found = ranks(2, bad_models)[0]
    assert "lie on 2 devices: '0.weight' on cpu, '1.weight' on meta" in found["mixed"]
    assert "model.to('cpu')" in found["mixed"]
    assert "not initialised yet (a Lazy module)" in found["lazy"]
    assert "Parameter 'weight' has a gradient hook" in found["hook"]
    assert "computed with gradients outside the step (MulBackward0)" in found["input"]
    assert "got (Linear, function)" in found["order"]
    assert "'weight' is a DTensor already" in found["dtensor"]
    assert "has not been compiled yet" in found["unread"]
    assert "Parameter 'weight' of the model was replaced" in found["replaced"]


def outlive():
    model = nn.Linear(4, 4)
    step = fsdp_compile(forward, model)
    step(torch.ones(2, 4))
    dist.barrier()
    dist.destroy_process_group()
    return message_of(lambda: step(torch.ones(2, 4)), fsdp_fx.CollectiveError)


def test_a_step_after_its_process_group(ranks):
    for text in ranks(2, outlive):
        assert "called after its process group was destroyed" in text
        assert "fix: Call destroy_process_group() after the last step" in text


def other_rank_dies(path):
    model = nn.Linear(4, 4)
    step = fsdp_compile(forward, model)
    step(torch.ones(2, 4))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    text = message_of(lambda: [step(torch.ones(2, 4)) for _ in range(3)], fsdp_fx.CollectiveError)
    Path(path).write_text(text)


def test_a_rank_that_dies_ends_in_a_sentence(tmp_path):
    own = Ranks()  # this test kills a process
    try:
        with pytest.raises(RankError, match="rank 1:"):
            own(2, other_rank_dies, str(tmp_path / "text"))
    finally:
        own.close()
    text = (tmp_path / "text").read_text()
    assert "Rank 0 of 2: a collective failed at node" in text
    assert "fix: Look for the first error among the other ranks' logs" in text
    assert "test_config_errors.py" in text  # the user's line that needs the collective


@pytest.mark.parametrize("value", [None, 3])
def test_a_step_must_be_callable(value):
    with pytest.raises(ConfigError, match="needs a function"):
        fsdp_compile(value, nn.Linear(2, 2))
