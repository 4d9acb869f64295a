"""Ranks agree on their collectives before they run them, through the store, never through a collective.

Every rank posts its plan; rank 0 compares them and posts a verdict; all wait for the verdict with a timeout.
A rank that fails to compile posts that, so that the others end in a sentence instead of a hang.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os

import torch.distributed as dist

from fsdp_fx._torch_private import default_store
from fsdp_fx.errors import PlanMismatchError, message

__all__ = ["Agreement", "plan_hash"]

_NUMBERS = itertools.count()


def plan_hash(plan: list[str]) -> str:
    """SHA-256 over the plan's lines: kinds, dtypes, bytes and parameters in order."""
    return hashlib.sha256("\n".join(plan).encode()).hexdigest()


class Agreement:
    """The talk of one compiled step's ranks about their plans; silent in a world of one or a simulated one."""

    def __init__(self, rank: int, world: int, simulated: bool):
        self.rank = rank
        self.world = world
        self.quiet = world == 1 or simulated
        # All ranks call fsdp_compile in the same order, so the n-th step of each rank is the same step; the store
        # counts, so that a new process group starts anew.
        self.number = next(_NUMBERS) if self.quiet else default_store().add(f"fsdp_fx/steps of rank {rank}", 1)
        self.rounds = 0
        seconds = float(os.environ.get("FSDP_FX_AGREE_TIMEOUT", "300"))
        self.timeout = datetime.timedelta(seconds=seconds)

    def _key(self, what: str) -> str:
        return f"fsdp_fx/{self.number}/{self.rounds}/{what}"

    def agree(self, plan: list[str]) -> None:
        """Returns once all ranks hold this plan; raises `PlanMismatchError` on all of them if not."""
        self._talk({"hash": plan_hash(plan), "plan": plan})

    def failed(self, error: BaseException) -> None:
        """Tells the others that this rank cannot compile; never raises, never waits."""
        if self.quiet or not dist.is_initialized():
            return
        try:
            entry: dict[str, object] = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            self._post(entry)
            if self.rank == 0:  # the verdict is clear; nobody has to be waited for
                default_store().set(self._key("verdict"), _compare([entry]))
        except RuntimeError:
            pass
        self.rounds += 1

    def _post(self, entry: dict[str, object]) -> None:
        default_store().set(self._key(str(self.rank)), json.dumps(entry))

    def _talk(self, entry: dict[str, object]) -> None:
        if self.quiet:
            return
        self._post(entry)
        if self.rank == 0:
            self._decide()
        try:
            default_store().wait([self._key("verdict")], self.timeout)
            verdict = default_store().get(self._key("verdict")).decode()
        except RuntimeError as error:
            raise PlanMismatchError(_missing(self.rank, "rank 0's verdict", self.timeout)) from error
        self.rounds += 1
        if verdict:
            raise PlanMismatchError(verdict)

    def _decide(self) -> None:
        store = default_store()
        keys = [self._key(str(rank)) for rank in range(self.world)]
        try:
            store.wait(keys, self.timeout)
            entries = [json.loads(store.get(key).decode()) for key in keys]
            verdict = _compare(entries)
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            verdict = _missing(0, f"the plan of ranks {absent}", self.timeout)
        store.set(self._key("verdict"), verdict)


def _missing(rank: int, what: str, timeout: datetime.timedelta) -> str:
    return message(
        f"Rank {rank} waited {timeout.total_seconds():.0f} s for {what} while compiling a step.",
        "All ranks must compile the same step at the same call; running without agreement would hang.",
        "Look for an error on the other ranks, for a step that only some ranks call, or for train()/eval() flags that "
        "differ; FSDP_FX_AGREE_TIMEOUT=seconds waits longer.",
    )


def _compare(entries: list[dict[str, object]]) -> str:
    """ "" if all ranks hold rank 0's plan, else what to tell everybody."""
    for rank, entry in enumerate(entries):
        if "error" in entry:
            return message(
                f"Rank {rank} could not compile the step: {entry['error']}",
                "The other ranks would wait for its collectives for ever.",
                f"See rank {rank}'s own error.",
            )
    first = entries[0]
    for rank, entry in enumerate(entries):
        if entry["hash"] != first["hash"]:
            return message(
                f"Ranks 0 and {rank} planned different collectives: {_difference(first['plan'], entry['plan'], rank)}",
                "Ranks that run different collectives hang or mix up each other's data.",
                "Make the step use the same parameters on every rank: no `if rank == ...` and no data-dependent "
                "branches around layers.",
            )
    return ""


def _difference(ours: object, theirs: object, rank: int) -> str:
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"number {position} is '{a}' on rank 0 and '{b}' on rank {rank}"
    return f"rank 0 has {len(ours)} collectives, rank {rank} has {len(theirs)}"


def check_kept(kept: list[str], now: list[str]) -> None:
    """A retrace for new shapes must give the plan that all ranks agreed on; raises if not."""
    if kept != now:
        raise PlanMismatchError(
            message(
                f"A retrace changed the plan: {_difference(kept, now, 0).replace('on rank 0', 'in the plan kept')}",
                "Other ranks may not retrace at this call and would run the old plan.",
                "Make the layers used by the step independent of the batch's shape.",
            )
        )
