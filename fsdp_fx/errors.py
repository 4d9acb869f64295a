"""The errors users meet, and how the user's own line is found for them.

Every message has the same three parts: what is wrong (with the line), why it matters, what to do.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = [
    "CaptureError",
    "CollectiveError",
    "ConfigError",
    "FsdpFxError",
    "PlanMismatchError",
    "StateError",
    "VerifyError",
]


class FsdpFxError(RuntimeError):
    """Base class of every error that fsdp_fx raises on purpose."""


class ConfigError(FsdpFxError):
    """`fsdp_compile` was asked for something that this model, mesh or process cannot do."""


class CaptureError(FsdpFxError):
    """The training step does something that cannot be put into one graph."""


class StateError(FsdpFxError):
    """Parameters, buffers or optimizer state changed in a way the compiled step cannot follow."""


class PlanMismatchError(FsdpFxError):
    """The ranks do not agree on their collectives; running would hang."""


class CollectiveError(FsdpFxError):
    """A collective failed while a compiled step ran; usually another rank died."""


class VerifyError(FsdpFxError):
    """A pass broke an invariant of the design: a bug in fsdp_fx, never in the user's code."""


def message(what: str, why: str, fix: str, at: str | None = None, graph: str | None = None) -> str:
    """Joins the parts of an error text, one a line; `at` is a user's location, `graph` some graph lines."""
    lines = [what]
    if at:
        lines.append(f"  at:  {at}")
    lines += [f"  why: {why}", f"  fix: {fix}"]
    if graph:
        lines.append("  graph:")
        lines += [f"    {line}" for line in graph.splitlines()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Frame:
    """One line of the user's code: `file:line in function`."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        text = f"{self.file}:{self.line} in {self.function}"
        return f"{text}: {code}" if code else text

    def short(self) -> str:
        """`file.py:12`, the form used inside reports and printed graphs."""
        return f"{os.path.basename(self.file)}:{self.line}"


_OWN = [os.path.dirname(os.path.abspath(__file__))]
_OWN += [os.path.realpath(os.path.join(_OWN[0], part)) for part in ("passes", "kernels")]
_FRAMEWORK = tuple(os.path.join(path, "") for path in [*_OWN, os.path.dirname(torch.__file__)])
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = tuple(os.path.join(path, "") for path in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


_IS_USER: dict[str, bool] = {}  # by file name: a function of the name alone, so safe to share


def is_user_file(file: str) -> bool:
    """True for code that is neither torch's, nor ours, nor the standard library's, nor generated."""
    known = _IS_USER.get(file)
    if known is None:
        path = os.path.abspath(file)
        known = not (
            file.startswith("<")
            or path.startswith(_FRAMEWORK)
            or (path.startswith(_STDLIB) and not path.startswith(_SITE))
        )
        _IS_USER[file] = known
    return known


def _frames(frame: types.FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            yield Frame(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back


def user_frame(skip: int = 1) -> Frame | None:
    """The innermost line of the user's code on the current Python stack, or None."""
    return next(_frames(sys._getframe(skip)), None)


def user_frame_of(error: BaseException) -> Frame | None:
    """The innermost line of the user's code in a traceback, or None."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            found = Frame(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found
