"""Any parameter shape on 1 to 8 ranks equals training in one process on averaged gradients."""

import copy

import cases
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fsdp_fx import fsdp_compile


class Odd(nn.Module):
    """Parameters of any shape, every element of each used with a weight of its own; some names are tied."""

    def __init__(self, shapes, tie):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator)) for s in shapes)
        self.again = self.values[0] if tie else None

    def forward(self, x):
        total = x.sum() * 0
        for i, p in enumerate(self.values):
            weights = torch.arange(1.0, p.numel() + 1).view(p.shape)
            total = total + (p * weights * x.mean()).sin().sum() * (i + 1)
        return total if self.again is None else total + self.again.pow(2).sum()


def train(shapes, tie, momentum, clip):
    model = Odd(shapes, tie)
    reference = copy.deepcopy(model)
    rank = dist.get_rank()

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

        def train_step(model, x):
            loss = model(x)
            loss.backward()
            return loss.detach(), finish(model)

        def finish(model):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) if clip else None
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return train_step, finish

    step = fsdp_compile(make(model)[0], model)
    finish = make(reference)[1]
    for i in range(3):
        x = torch.randn(4, generator=torch.Generator().manual_seed(10 * i + rank))
        loss, norm = step(x)
        expected = reference(x)
        expected.backward()
        for p in reference.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        expected_norm = finish(reference)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
        if clip:
            torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=1e-4)
    for (name, p), (_, q) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(cases.full(q.detach()), p.detach(), rtol=1e-4, atol=1e-5, msg=name)
    # The padding stays zero, so that sums over shards stay right.
    for layout, view in zip(step._sharded.layout.params, step._sharded.storage.views, strict=True):
        if not layout.replicated:
            assert not view[layout.local_rows(rank) :].any()


SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(0, 5), st.integers(1, 4)),
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=5,
).filter(lambda shapes: any(all(shape) for shape in shapes))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SHAPES, st.integers(1, 8), st.booleans(), st.sampled_from([0.0, 0.9]), st.booleans())
def test_any_shape_on_any_world(ranks, shapes, world, tie, momentum, clip):
    ranks(world, train, shapes, tie, momentum, clip)


def test_the_hard_ones(ranks):
    """Fewer rows than ranks, 0-d, empty, uneven, all at once, on an odd world."""
    ranks(3, train, [(), (1,), (2, 3), (0, 4), (7, 2), (4, 1, 2)], True, 0.9, True)
    ranks(8, train, [(), (1,), (2, 3), (3, 0), (9, 2)], False, 0.0, True)
