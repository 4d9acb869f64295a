"""Compiling for worlds that do not exist, with parameters that have no memory."""

import cases
import pytest
import torch
import torch.distributed as dist

from fsdp_fx import ConfigError, fsdp_compile, simulated_world


@pytest.mark.parametrize("world", [2, 7, 1024])
def test_any_world_on_meta(world):
    with simulated_world(world) as mesh:
        with torch.device("meta"):
            model = cases.GPT(layers=2)
            x = torch.zeros(2, 32, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = fsdp_compile(cases.clipped_step(optimizer), model, mesh=mesh).compile(x, x)
        report = step.report()
        assert report.world == world
        assert [row.kind for row in report.collectives] == ["all_gather", "reduce_scatter", "all_reduce"]
        assert report.collectives[0].operator == "all_gather"
        assert report.collectives[1].operator == "reduce_scatter"  # nothing is known of the backend
        assert report.shard_bytes >= report.parameter_bytes / world
        values = {n.meta["val"].device.type for n in step.graph.graph.find_nodes(op="placeholder") if n.name[0] in "px"}
        assert values == {"cpu"}
        with pytest.raises(ConfigError, match="on the meta device"):
            step(x, x)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would work")
def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match="Simulate on 'cpu'"), simulated_world(4, "cuda"):
        pass


def test_a_simulated_world_needs_a_free_process(ranks):
    assert "Run the simulation in a process of its own" in ranks(1, refused)[0]


def refused():
    try:
        with simulated_world(4):
            raise AssertionError("not refused")
    except ConfigError as error:
        return str(error)
