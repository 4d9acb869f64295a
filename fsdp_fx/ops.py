"""The two border operators between the local and the sharded domain.

They are in the graph from capture on, so no pass ever guesses where a parameter enters or a gradient
leaves. On one device both are the identity (a copy, since an operator may not return its input).
"""

from __future__ import annotations

import torch

__all__ = ["BORDERS", "gather_parameter", "reduce_gradient"]

_LIBRARY = torch.library.Library("fsdp_fx", "DEF")


def _border(name: str) -> torch._ops.OpOverload:
    _LIBRARY.define(f"{name}(Tensor tensor, str parameter) -> Tensor")
    # Plain strides: the gathered parameter is contiguous, and so is the gradient that is reduced.
    _LIBRARY.impl(
        name, lambda tensor, parameter: tensor.clone(memory_format=torch.contiguous_format), "CompositeExplicitAutograd"
    )
    op: torch._ops.OpOverload = getattr(torch.ops.fsdp_fx, name).default
    return op


gather_parameter = _border("gather_parameter")
"""`(parameter, name) -> parameter`: the local domain's read of a parameter."""

reduce_gradient = _border("reduce_gradient")
"""`(gradient, name) -> gradient`: this rank's gradient in, the mean over ranks out."""

BORDERS = (gather_parameter, reduce_gradient)
