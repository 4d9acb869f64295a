"""The arithmetic of storage, for all shapes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fx.layout import ALIGNMENT, ModelLayout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@given(SHAPES, st.integers(1, 8), st.data())
def test_every_row_has_one_owner(shapes, world, data):
    named = [(f"p{i}", (), shape, data.draw(DTYPES)) for i, shape in enumerate(shapes)]
    layout = ModelLayout.build(named, world, torch.device("cpu"))
    for p in layout.params:
        full = torch.empty(p.shape)
        if p.replicated:
            assert p.shard_shape == ()
            continue
        # DTensor's Shard(0) splits as torch.chunk does; ours must be the same rows.
        chunks = [c.shape[0] for c in torch.chunk(full, world)] if p.rows else []
        chunks += [0] * (world - len(chunks))
        assert [p.local_rows(rank) for rank in range(world)] == chunks
        assert p.padded_shape[0] == p.shard_rows * world >= p.rows
        assert p.padded == (p.padded_shape != p.shape)


@given(SHAPES, st.integers(1, 8), st.data())
def test_slices_are_disjoint_and_aligned(shapes, world, data):
    named = [(f"p{i}", (), shape, data.draw(DTYPES)) for i, shape in enumerate(shapes)]
    layout = ModelLayout.build(named, world, torch.device("cpu"))
    ends = {}
    for p in layout.params:
        assert p.offset == ends.get(p.dtype, 0)  # in order, no gap but alignment
        assert p.offset * p.dtype.itemsize % ALIGNMENT == 0
        assert p.shard_numel <= p.span < p.shard_numel + ALIGNMENT // p.dtype.itemsize
        ends[p.dtype] = p.offset + p.span
    assert layout.storages() == ends
