"""After compile a rank holds shards only: 1/world of parameters, gradients and optimizer state, plus padding."""

import gc

import cases
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_fx import fsdp_compile


def held_bytes():
    """Bytes of memory behind all living tensors, each byte counted once (shards are views of flat buffers)."""
    gc.collect()
    seen = set()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):
            tensors = [candidate]
            if hasattr(candidate, "_local_tensor"):
                tensors = [candidate._local_tensor]
            for tensor in tensors:
                if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter):
                    storage = tensor.untyped_storage()
                    seen.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = end = 0
    for begin, stop in sorted(seen):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def measure():
    before = held_bytes()
    model = cases.gpt(layers=2, d=128)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert held_bytes() - before >= parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(model, x, y):
        optimizer.zero_grad()
        loss = cases.loss_of(model, x, y)
        loss.backward()
        optimizer.step()  # gradients are kept
        return loss.detach()

    step = fsdp_compile(train_step, model)
    batch = cases.tokens(0)
    after_sharding = held_bytes() - before
    step(*batch)
    step(*batch)
    return parameters, after_sharding, held_bytes() - before, dist.get_world_size()


def test_shards_only(ranks):
    for world in (2, 4):
        for parameters, sharded, trained, size in ranks(world, measure):
            slack = 32 * 1024  # padding, batches, step counts
            assert sharded <= parameters / size + slack
            # Parameters, two moments and the kept gradients.
            assert trained <= 4 * parameters / size + slack
            assert trained >= 4 * parameters / size


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def leak():
    model = cases.gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fsdp_compile(cases.clipped_step(optimizer), model)
    for i in range(20):
        step(*cases.tokens(i))
    tensors, memory = held_bytes(), resident()
    for i in range(100):
        step(*cases.tokens(i))
    return held_bytes() - tensors, resident() - memory


def test_steps_leak_nothing(ranks):
    for tensors, memory in ranks(2, leak):
        assert tensors <= 1024
        assert memory < 8 * 2**20
