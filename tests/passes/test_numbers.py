"""Every pass leaves the numbers as they are: the pipeline cut off after each pass gives the same bits."""

import cases
import pytest
import torch

import fsdp_fx.api
from fsdp_fx import PASSES, Pipeline, fsdp_compile


def losses_after(count):
    """Five steps with the first `count` passes only."""
    whole = fsdp_fx.api.Pipeline
    fsdp_fx.api.Pipeline = lambda: Pipeline(PASSES[:count])
    try:
        model = cases.gpt(layers=1, d=16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = fsdp_compile(cases.clipped_step(optimizer), model)
        torch.manual_seed(torch.distributed.get_rank())
        history = [step(*cases.tokens(i, t=8)) for i in range(5)]
    finally:
        fsdp_fx.api.Pipeline = whole
    assert list(step.graphs) == ["capture", *(p.name for p in PASSES[:count])]
    return [(loss.item(), norm.item()) for loss, norm in history], cases.snapshot(model, optimizer)


def compare(counts):
    results = [losses_after(count) for count in counts]
    return [(r[0] == results[0][0], cases.differences(results[0][1], r[1])) for r in results]


def test_every_stage_runs_alike_on_one_rank(ranks):
    assert ranks(1, compare, range(len(PASSES) + 1)) == [[(True, [])] * (len(PASSES) + 1)]


def test_every_sharded_stage_runs_alike_on_two_ranks(ranks):
    counts = range([p.name for p in PASSES].index("shard_optimizer") + 1, len(PASSES) + 1)
    for result in ranks(2, compare, counts):
        assert result == [(True, [])] * len(counts)


def small_buckets(limit):
    """Many buckets, prefetched and with several reduces under way, against one bucket."""
    from fsdp_fx.passes import bucket

    results = []
    for size in (bucket.BUCKET_BYTES, limit):
        before, bucket.BUCKET_BYTES = bucket.BUCKET_BYTES, size
        try:
            model = cases.gpt(layers=2, d=16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step = fsdp_compile(cases.clipped_step(optimizer), model)
            torch.manual_seed(torch.distributed.get_rank())
            history = [step(*cases.tokens(i, t=8))[0].item() for i in range(4)]
            results.append((history, cases.snapshot(model, optimizer)))
            count = sum(1 for c in step.report().collectives if c.kind == "all_gather")
        finally:
            bucket.BUCKET_BYTES = before
    return count, results[0][0] == results[1][0], cases.differences(results[0][1], results[1][1])


@pytest.mark.parametrize(("limit", "gathers"), [(0, 27), (1, 27), (4096, 12), (2**40, 1)])
def test_bucket_limits(ranks, limit, gathers):
    for count, same, differences in ranks(2, small_buckets, limit):
        assert count == gathers
        assert same
        assert differences == []
