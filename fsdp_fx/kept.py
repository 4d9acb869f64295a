"""Everything of the user's that a trace changes for its own time, put back afterwards, also when it fails."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch
import torch.nn as nn

__all__ = ["grad_mode_kept", "modules_kept", "rng_kept"]


@contextlib.contextmanager
def rng_kept() -> Iterator[None]:
    """Tracing draws no random numbers on tensors, but the user's Python code may."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Puts every attribute of every submodule back, the contents of lists and dicts included."""
    saved = []
    for module in model.modules():
        containers = [
            (value, value.copy()) for value in module.__dict__.values() if isinstance(value, (list, dict, set))
        ]
        saved.append((module, dict(module.__dict__), containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            for container, content in containers:
                container.clear()
                if isinstance(container, list):
                    container.extend(content)
                else:
                    container.update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)


@contextlib.contextmanager
def grad_mode_kept() -> Iterator[None]:
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(before)
        torch.clear_autocast_cache()  # it may hold casts of stand-ins
