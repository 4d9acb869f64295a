"""Says of every traced node where it comes from: user's line, module path, forward or backward.

Backward nodes get the line and module of their forward, matched by autograd's sequence numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from fsdp_fx._torch_private import (
    TorchDispatchMode,
    autograd_sequence_number,
    current_autograd_sequence,
    current_graph,
)
from fsdp_fx.errors import Frame, user_frame

__all__ = ["Annotator", "annotate_new_nodes", "module_paths"]

META_KEYS = ("frame", "stack_trace", "nn_module_stack", "phase")


def annotate_new_nodes(graph: fx.Graph, last: fx.Node | None, meta: dict[str, Any]) -> fx.Node | None:
    """Gives `meta` to the nodes appended behind `last`; returns the new last node."""
    newest = next(iter(reversed(graph.nodes)), None)
    node = newest
    while node is not None and node is not last and node.op != "root":
        for key, value in meta.items():
            node.meta.setdefault(key, value)
        node = node.prev
    return newest


class module_paths:
    """While open, `current` is the dotted path of the innermost running submodule of `model` ("" outside)."""

    def __init__(self, model: nn.Module):
        self._names = {id(m): (name, type(m)) for name, m in model.named_modules()}
        self._stack: list[tuple[str, type]] = []
        self._cached: dict[tuple[str, ...], dict[str, tuple[str, type]]] = {}

    def __enter__(self) -> module_paths:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(self._names.get(id(module), ("", type(module))))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()

        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def stack(self) -> dict[str, tuple[str, type]]:
        """In the format of torch's `nn_module_stack`: path -> (path, class), outermost first."""
        key = tuple(name for name, _ in self._stack)
        if key not in self._cached:
            self._cached[key] = {name: (name, cls) for name, cls in self._stack}
        return self._cached[key]


class Annotator(TorchDispatchMode):
    """Sits above make_fx's own mode and labels the nodes of each operator as it appears."""

    def __init__(self, modules: module_paths):
        super().__init__()
        self._modules = modules
        self._last: fx.Node | None = None
        self._forward: dict[int, dict[str, Any]] = {}
        self._texts: dict[Frame, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        graph = current_graph()
        if graph is not None:
            self._last = annotate_new_nodes(graph, self._last, self._meta())
        return result

    def _meta(self) -> dict[str, Any]:
        sequence = current_autograd_sequence()
        if sequence is not None:
            forward = self._forward.get(sequence)
            if forward is not None:
                return {**forward, "phase": "backward"}
            return self._here("backward")
        meta = self._here("forward")
        # The first operator after an autograd node was made is that node's own; later ones without a node
        # of their own (no_grad code) must not replace it.
        self._forward.setdefault(autograd_sequence_number(), meta)
        return meta

    def _here(self, phase: str) -> dict[str, Any]:
        frame = user_frame(3)
        return {
            "frame": frame,
            "stack_trace": self._text(frame),
            "nn_module_stack": self._modules.stack(),
            "phase": phase,
        }

    def _text(self, frame: Frame | None) -> str | None:
        if frame is None:
            return None
        if frame not in self._texts:
            text = str(frame)
            _, _, code = text.partition(": ")
            self._texts[frame] = f'  File "{frame.file}", line {frame.line}, in {frame.function}\n    {code}\n'
        return self._texts[frame]
