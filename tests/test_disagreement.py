"""Ranks that would run different collectives get an error on all ranks, never a hang."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp_fx import CaptureError, PlanMismatchError, fsdp_compile


def different_layers():
    """Rank 1 uses another layer, so its plan differs."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])

    def train_step(model, x):
        model[dist.get_rank()](x).sum().backward()

    step = fsdp_compile(train_step, model)
    try:
        step(torch.ones(2, 4))
    except PlanMismatchError as error:
        return str(error)
    raise AssertionError("ranks disagreed unnoticed")


def test_different_plans(ranks):
    texts = ranks(2, different_layers)
    for text in texts:
        assert "Ranks 0 and 1 planned different collectives: number 0 is 'all_gather" in text
        assert "0.weight" in text
        assert "1.weight" in text


def one_rank_cannot_trace(which):
    model = nn.Linear(4, 4)

    def train_step(model, x):
        loss = model(x).sum()
        return loss.item() if dist.get_rank() == which else loss

    step = fsdp_compile(train_step, model)
    try:
        step(torch.ones(2, 4))
    except (PlanMismatchError, CaptureError) as error:
        return type(error).__name__, str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_cannot_trace_ends_the_others(ranks, which):
    results = ranks(2, one_rank_cannot_trace, which)
    assert results[which][0] == "CaptureError"
    assert ".item()" in results[which][1]
    kind, text = results[1 - which]
    assert kind == "PlanMismatchError"
    assert f"Rank {which} could not compile the step: CaptureError: The step reads a tensor's value" in text


def shape_dependent_layers():
    """Long batches go through one more layer: a retrace on rank 1 alone changes its plan."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def train_step(model, x):
        x = model[0](x)
        return (model[1](x) if x.shape[0] > 2 else x).sum()

    step = fsdp_compile(train_step, model)
    step(torch.ones(2, 4))
    if dist.get_rank() == 0:
        return None
    try:
        step(torch.ones(3, 4))
    except PlanMismatchError as error:
        return str(error)
    raise AssertionError("not refused")


def test_a_retrace_keeps_the_plan(ranks):
    text = ranks(2, shape_dependent_layers)[1]
    assert "A retrace changed the plan" in text
    assert "Make the layers used by the step independent of the batch's shape" in text
