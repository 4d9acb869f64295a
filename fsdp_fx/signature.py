"""Roles of a step graph's inputs and outputs, as dataclasses that print themselves.

In the manner of `torch.export`'s graph signature: passes ask the signature what a node is, never its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BatchInput",
    "BufferInput",
    "GradientInput",
    "GradientOutput",
    "HyperparameterInput",
    "InputGradientOutput",
    "InputSpec",
    "OptimizerStateInput",
    "OptimizerStateOutput",
    "OutputSpec",
    "ParameterInput",
    "StepSignature",
    "StorageInput",
    "UserOutput",
    "safe_name",
]


def safe_name(text: str) -> str:
    """A part of a node's name: letters, digits and underscores only."""
    return "".join(c if c.isalnum() else "_" for c in text)


@dataclass(frozen=True)
class ParameterInput:
    """A parameter: whole in the capture, this rank's padded shard once `shard_parameters` has run."""

    node: str
    name: str

    def __str__(self) -> str:
        return f"parameter {self.name}"


@dataclass(frozen=True)
class StorageInput:
    """The flat buffer of all parameter shards of one dtype; parameter inputs are views of it."""

    node: str
    dtype: str

    def __str__(self) -> str:
        return f"storage {self.dtype}"


@dataclass(frozen=True)
class GradientInput:
    """`p.grad` as it was before the step (kept from an earlier call)."""

    node: str
    parameter: str

    def __str__(self) -> str:
        return f"gradient of {self.parameter}"


@dataclass(frozen=True)
class BufferInput:
    node: str
    name: str

    def __str__(self) -> str:
        return f"buffer {self.name}"


@dataclass(frozen=True)
class OptimizerStateInput:
    """`optimizer.state[parameter][key]`; sharded if it has the parameter's shape, else whole."""

    node: str
    optimizer: int
    parameter: str
    key: str

    def __str__(self) -> str:
        return f"optimizer[{self.optimizer}] {self.key} of {self.parameter}"


@dataclass(frozen=True)
class HyperparameterInput:
    """`optimizer.param_groups[group][key]` (`[index]` of it for tuples), read anew on every call."""

    node: str
    optimizer: int
    group: int
    key: str
    index: int | None = None

    def __str__(self) -> str:
        item = "" if self.index is None else f"[{self.index}]"
        return f"optimizer[{self.optimizer}] group {self.group} {self.key}{item}"


@dataclass(frozen=True)
class BatchInput:
    """A tensor among the step's arguments; `path` is how the user reaches it, e.g. `args[0]['x']`."""

    node: str
    leaf: int
    path: str

    def __str__(self) -> str:
        return f"batch {self.path}"


InputSpec: TypeAlias = (
    ParameterInput | StorageInput | GradientInput | BufferInput | OptimizerStateInput | HyperparameterInput | BatchInput
)


@dataclass(frozen=True)
class UserOutput:
    """A tensor that the step returns; `leaf` is its position among the leaves of the returned tree.

    `placement` is "local" (this rank's own value), "replicated" or "sharded" (returned as a DTensor of
    `shape`)."""

    leaf: int
    placement: str = "local"
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"user output {self.leaf} ({self.placement})"


@dataclass(frozen=True)
class GradientOutput:
    """A gradient that is still in `p.grad` when the step returns."""

    parameter: str

    def __str__(self) -> str:
        return f"gradient of {self.parameter}"


@dataclass(frozen=True)
class InputGradientOutput:
    """The gradient of a batch tensor that requires one; this rank's own, added to the `.grad` of leaf `leaf`."""

    leaf: int
    path: str

    def __str__(self) -> str:
        return f"gradient of batch {self.path}"


@dataclass(frozen=True)
class OptimizerStateOutput:
    """Optimizer state that the step created or replaced."""

    optimizer: int
    parameter: str
    key: str

    def __str__(self) -> str:
        return f"optimizer[{self.optimizer}] {self.key} of {self.parameter}"


OutputSpec: TypeAlias = UserOutput | GradientOutput | InputGradientOutput | OptimizerStateOutput


@dataclass(frozen=True)
class StepSignature:
    """Inputs in placeholder order, outputs in the order of the output node's tuple."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def __str__(self) -> str:
        lines = [f"in  {spec.node}: {spec}" for spec in self.inputs]
        lines += [f"out {position}: {spec}" for position, spec in enumerate(self.outputs)]
        return "\n".join(lines)
