"""Trains a byte-level GPT on English text, fully sharded, from an ordinary single-device training step.

    torchrun --nproc-per-node 2 examples/train_gpt.py            # two ranks (gloo on CPU, NCCL on GPUs)
    python examples/train_gpt.py                                 # one rank, no setup
    torchrun --nproc-per-node 2 examples/train_gpt.py --check    # the same run with eager fully_shard, compared

The text is Python's own: the help topics that ship with every interpreter. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import os
import pydoc_data.topics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from fsdp_fx import fsdp_compile


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, heads: int, layers: int, dropout: float):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The help topics as bytes: (training text, held-out text)."""
    topics = pydoc_data.topics.topics
    joined = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    cut = int(0.95 * len(data))
    return data[:cut], data[cut:]


def batch_of(data: torch.Tensor, generator: torch.Generator, size: int, context: int) -> tuple[torch.Tensor, ...]:
    starts = torch.randint(len(data) - context - 1, (size,), generator=generator)
    windows = torch.stack([data[s : s + context + 1] for s in starts.tolist()])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def memory() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB peak"
    with open("/proc/self/statm") as file:
        return f"{int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB"


def make_model(args: argparse.Namespace, device: str) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(args.context, args.width, args.heads, args.layers, args.dropout).to(device)


def optimizer_and_schedule(model: nn.Module, args: argparse.Namespace):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def factor(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_step(optimizer: torch.optim.Optimizer):
    """The single-device training step. Nothing in it knows of ranks, shards or collectives."""

    def train_step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return train_step


def train(step, scheduler, args: argparse.Namespace, device: str, say) -> list[float]:
    """Runs the steps on this rank's own batches; returns this rank's losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data, _ = text()
    generator = torch.Generator().manual_seed(1000 + rank)
    torch.manual_seed(2000 + rank)  # dropout masks of its own for every rank
    losses = []
    begun = time.perf_counter()
    for number in range(args.steps):
        tokens, targets = batch_of(data, generator, args.batch, args.context)
        loss, norm = step(tokens.to(device), targets.to(device))
        scheduler.step()
        losses.append(loss.item())
        if number == 0:
            say(f"first call (traces and compiles): {time.perf_counter() - begun:.1f} s")
            begun = time.perf_counter()
        elif number % args.every == 0 or number == args.steps - 1:
            speed = number * args.batch * args.context * world / (time.perf_counter() - begun)
            rate = scheduler.get_last_lr()[0]
            say(
                f"step {number:4d}  loss {loss.item():.4f}  norm {float(norm):5.2f}  lr {rate:.1e}  "
                f"{speed:7.0f} tokens/s  {memory()}"
            )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--sample", type=int, default=160, help="bytes of sampled text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="train eager fully_shard too and compare bit for bit")
    args = parser.parse_args()

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one GPU a rank
        torch.cuda.set_device(device)
    model = make_model(args, device)
    optimizer, scheduler = optimizer_and_schedule(model, args)
    step = fsdp_compile(make_step(optimizer), model)  # <- the only line that makes it sharded
    evaluate = fsdp_compile(loss_of, model)  # evaluation over the same shards
    logits = fsdp_compile(lambda model, tokens: model(tokens)[:, -1], model)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    _, held_out = text()

    @torch.no_grad()
    def held_out_loss() -> float:
        model.eval()
        generator = torch.Generator().manual_seed(7)
        batches = [batch_of(held_out, generator, args.batch, args.context) for _ in range(8)]
        total = sum(evaluate(x.to(device), y.to(device)).item() for x, y in batches)
        model.train()
        return total / len(batches)

    @torch.no_grad()
    def sample() -> str:
        model.eval()
        generator = torch.Generator().manual_seed(11)  # the same on all ranks: they gather together
        start = bytes(held_out.tolist()).find(b". The ") + 2  # a sentence of the held-out text begins it
        written = held_out[start : start + args.context].clone()
        for _ in range(args.sample):
            scores = logits(written[None, -args.context :].to(device)).cpu()
            chosen = torch.multinomial(torch.softmax(scores[0] / 0.8, 0), 1, generator=generator)
            written = torch.cat([written, chosen])
        model.train()
        return bytes(written[args.context :].tolist()).decode(errors="replace")

    world = dist.get_world_size()
    count = sum(p.numel() for p in model.parameters())
    say(f"{count:,} parameters on {world} rank{'s' if world > 1 else ''} ({dist.get_backend()})")
    say(f"held-out loss before: {held_out_loss():.4f}")
    say(f"sample before: {sample()!r}\n")
    begun = time.perf_counter()
    losses = train(step, scheduler, args, device, say)
    say(f"\n{args.steps} steps in {time.perf_counter() - begun:.1f} s; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    say(f"held-out loss after: {held_out_loss():.4f}")
    say(f"sample after: {sample()!r}\n")
    say(str(step.report()))
    if args.check:
        check(args, device, model, losses, say)
    dist.barrier()
    dist.destroy_process_group()


def check(args: argparse.Namespace, device: str, ours: nn.Module, losses: list[float], say) -> None:
    """Trains the same run with PyTorch's fully_shard and compares every loss and parameter bit for bit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    model = make_model(args, device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = optimizer_and_schedule(model, args)
    eager = make_step(optimizer)

    def step(tokens: torch.Tensor, targets: torch.Tensor):
        loss, norm = eager(model, tokens, targets)
        return loss, norm.full_tensor()

    say("\nthe same run with eager fully_shard:")
    begun = time.perf_counter()
    expected = train(step, scheduler, args, device, say)
    say(f"{args.steps} steps in {time.perf_counter() - begun:.1f} s")
    same_losses = sum(a == b for a, b in zip(losses, expected, strict=True))
    pairs = list(zip(ours.named_parameters(), model.parameters(), strict=True))
    same = sum(torch.equal(a.full_tensor(), b.full_tensor()) for (_, a), b in pairs)
    say(f"losses bitwise equal: {same_losses} of {len(losses)}; parameters bitwise equal: {same} of {len(pairs)}")
    if dist.get_world_size() <= 2 and (same_losses, same) != (len(losses), len(pairs)):
        raise SystemExit("check failed: two ranks must be bitwise equal")


if __name__ == "__main__":
    main()
