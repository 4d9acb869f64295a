"""Host cost of a step: a tiny GPT on all ranks, ours beside eager `fully_shard` and DDP, interleaved in one run.

    torchrun --nproc-per-node 2 benchmarks/step_overhead.py [--rounds 60] [--layers 3] [--width 64]

The model is so small that compute hardly counts: what is timed is Python, dispatch and the latency of collectives.
Prints medians in milliseconds and their ratios to `fully_shard` (one group a block, its default).
"""

import argparse
import platform
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_fx import fsdp_compile


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_step(optimizer):
    def train_step(model, tokens, targets):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build():
        torch.manual_seed(0)
        return GPT(args.width, args.layers)

    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    sharded = build()
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = DistributedDataParallel(build())
    own = build()
    eager_step, ddp_step = make_step(optimizer_of(sharded)), make_step(optimizer_of(replicated))
    contenders = {
        "fully_shard": lambda *batch: eager_step(sharded, *batch),
        "DDP": lambda *batch: ddp_step(replicated, *batch),
        "fsdp_fx": fsdp_compile(make_step(optimizer_of(own)), own, mesh=mesh),
    }
    batch = torch.randint(256, (2, 2, 32), generator=torch.Generator().manual_seed(dist.get_rank()))
    times = {name: [] for name in contenders}
    for number in range(args.rounds + 5):
        for name, step in contenders.items():
            dist.barrier()
            begun = time.perf_counter()
            step(batch[0], batch[1])
            if number >= 5:
                times[name].append(1e3 * (time.perf_counter() - begun))
    if dist.get_rank() == 0:
        anchor = statistics.median(times["fully_shard"])
        count = sum(p.numel() for p in own.parameters())
        print(
            f"{count:,} parameters, {dist.get_world_size()} gloo ranks, torch {torch.__version__}, "
            f"{platform.machine()}, {args.rounds} rounds"
        )
        for name, values in times.items():
            median = statistics.median(values)
            low, high = statistics.quantiles(values, n=20)[0], statistics.quantiles(values, n=20)[-1]
            print(
                f"{name:12s} {median:7.2f} ms  (5 % {low:.2f}, 95 % {high:.2f})  {median / anchor:.2f} of fully_shard"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
