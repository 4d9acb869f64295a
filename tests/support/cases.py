"""Models, batches and steps that several tests share."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down, self.drop = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(p)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.out(a))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class GPT(nn.Module):
    """Tied weights, dropout, biases, LayerNorm, causal attention."""

    def __init__(self, vocab=256, d=64, layers=3, p=0.1):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(**kwargs):
    torch.manual_seed(0)
    return GPT(**kwargs)


def tokens(i, b=2, t=32, vocab=256):
    """A different batch for every rank and step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * rank + i)
    return torch.randint(0, vocab, (b, t), generator=generator), torch.randint(0, vocab, (b, t), generator=generator)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def clipped_step(optimizer, max_norm=1.0):
    def train_step(model, x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return train_step


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    # The key projection's bias has a gradient of zero but for rounding, which a small eps turns into full steps.
    "adamw_large_eps": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def eager_sharded(model):
    """The anchor: PyTorch's `fully_shard`, a group a block."""
    where = mesh()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=where)
    return fully_shard(model, mesh=where)


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def snapshot(model, optimizer=None):
    """Parameters and optimizer state as full tensors by name."""
    found = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            for key, value in optimizer.state[p].items():
                found[f"{name}/{key}"] = full(value).clone() if isinstance(value, torch.Tensor) else value
    return found


def differences(a, b):
    """Names whose values are not bit for bit equal."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return [name for name in a if not torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name]))]
