"""place_borders: tell the local from the sharded domain and make every local read of a parameter explicit.

Before    t = aten.t(p_weight)                                 # forward
          addmm = aten.addmm(p_bias, x, t)
          ...
          reduce_gradient = fsdp_fx.reduce_gradient(t_5, 'weight')
          mul_ = aten.mul_(p_weight, decay)                    # optimizer
After     gather_parameter = fsdp_fx.gather_parameter(p_weight, 'weight')
          t = aten.t(gather_parameter)
          gather_parameter_1 = fsdp_fx.gather_parameter(p_bias, 'bias')
          addmm = aten.addmm(gather_parameter_1, x, t)
          ...
          reduce_gradient = fsdp_fx.reduce_gradient(t_5, 'weight')
          mul_ = aten.mul_(p_weight, decay)                    # sharded: reads the shard itself
Requires  captured
Ensures   domains: `node.meta["domain"]` is "local" or "sharded"; within a segment local nodes come first.

A node is sharded if it depends on a gradient border, on a kept gradient or on optimizer state, if it
writes a parameter or optimizer state, or if it serves sharded nodes alone and depends on nothing of this
rank's own batch. Everything else is local. A parameter that is written and then read again by the local
domain (two optimizers in one step) is gathered anew behind the write; that begins a new segment.
"""

from __future__ import annotations

import torch.fx as fx

from fsdp_fx.errors import CaptureError, message
from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.ops import gather_parameter, reduce_gradient
from fsdp_fx.signature import (
    BatchInput,
    BufferInput,
    GradientInput,
    HyperparameterInput,
    OptimizerStateInput,
    ParameterInput,
)
from fsdp_fx.step_graph import Aliases, StepGraph, is_random

__all__ = ["place_borders"]


@graph_pass(requires={"captured"}, ensures={"domains"})
def place_borders(step: StepGraph) -> StepGraph:
    if "domains" in step.properties:
        return step
    aliases = Aliases(step.graph)
    sharded = _sharded_nodes(step, aliases)
    segment_of = _insert_gathers(step, aliases, sharded)
    for node in step.graph.nodes:
        if node.op == "placeholder":
            node.meta["domain"] = "input"
        else:
            node.meta["domain"] = "sharded" if node in sharded else "local"
            node.meta["segment"] = segment_of[node]
        if node in sharded:
            node.meta["phase"] = "sharded"
    _local_first(step, segment_of)
    _drop_unused_inputs(step)
    return step


def _sharded_nodes(step: StepGraph, aliases: Aliases) -> set[fx.Node]:
    state = step.nodes_of(ParameterInput, GradientInput, OptimizerStateInput)
    seeds = step.nodes_of(GradientInput, OptimizerStateInput)
    parameters = step.nodes_of(ParameterInput)
    sharded: set[fx.Node] = set()
    own: set[fx.Node] = set(step.nodes_of(BatchInput, BufferInput))  # depends on this rank's own values
    for node in step.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # A parameter after an in-place update is still that parameter: reading it is no reading of gradients.
        arguments = [p if (p := aliases.tensor_itself(a)) in parameters else a for a in node.all_input_nodes]
        if (
            any(a in seeds or a in sharded or a.target is reduce_gradient for a in arguments)
            or any(root in state for root in aliases.writes(node))
        ) and node.target is not reduce_gradient:
            sharded.add(node)
        elif is_random(node) or any(a in own for a in arguments):
            own.add(node)
    output = step.output_node()
    for node in reversed(step.graph.nodes):
        if node.op == "placeholder" or node in sharded or node in own or node is output or not node.users:
            continue
        if node.target is not reduce_gradient and all(user in sharded for user in node.users):
            sharded.add(node)
    _refuse_return(step, sharded)
    return sharded


def _refuse_return(step: StepGraph, sharded: set[fx.Node]) -> None:
    """The local domain may not read optimizer state or reduced gradients."""
    for node in step.graph.nodes:
        if node.target is reduce_gradient and node.args[0] in sharded:
            frame = node.args[0].meta.get("frame")
            raise CaptureError(
                message(
                    f"The gradient of '{node.args[1]}' depends on gradients or optimizer state of the same step.",
                    "Reduced gradients exist as shards only; a rank's own forward cannot read them.",
                    "Split the step in two: compute the gradients in one, use them in the next.",
                    str(frame or ""),
                )
            )


def _insert_gathers(step: StepGraph, aliases: Aliases, sharded: set[fx.Node]) -> dict[fx.Node, int]:
    """Inserts a border before the first local read of each version of a parameter; returns nodes' segments."""
    parameters = step.nodes_of(ParameterInput)
    current: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    segment = 0
    segment_of: dict[fx.Node, int] = {}
    for node in list(step.graph.nodes):
        if node.op == "placeholder":
            continue
        segment_of[node] = segment
        if node in sharded:
            for root in aliases.writes(node):
                if root in parameters:
                    current.pop(root, None)
                    written.add(root)
            continue
        for read in node.all_input_nodes:
            argument = aliases.tensor_itself(read)
            spec = parameters.get(argument)
            if not isinstance(spec, ParameterInput):
                continue
            if argument not in current:
                if argument in written:
                    segment += 1
                    written.clear()
                    segment_of[node] = segment
                with step.graph.inserting_before(node):
                    border = step.graph.create_node(
                        "call_function",
                        gather_parameter,
                        (argument, spec.name),
                        name="gather_" + argument.name.removeprefix("p_"),
                    )
                first = node if node.op != "output" else argument
                border.meta = {**first.meta, "val": argument.meta["val"], "phase": first.meta.get("phase", "forward")}
                current[argument] = border
                segment_of[border] = segment
            node.replace_input_with(read, current[argument])
    return segment_of


def _local_first(step: StepGraph, segment_of: dict[fx.Node, int]) -> None:
    """Within each segment moves sharded nodes behind the local ones, keeping both orders."""
    nodes = [n for n in step.graph.nodes if n.op not in ("placeholder", "output")]
    wanted = sorted(nodes, key=lambda n: (segment_of[n], n.meta["domain"] == "sharded"))
    if wanted != nodes:
        output = step.output_node()
        for node in wanted:
            output.prepend(node)


def _drop_unused_inputs(step: StepGraph) -> None:
    """Hyperparameters that nothing reads (flags kept as floats) need not be passed on every call."""
    kept = []
    for node, spec in list(step.inputs()):
        if isinstance(spec, HyperparameterInput) and not node.users:
            step.graph.erase_node(node)
        else:
            kept.append(spec)
    step.signature = type(step.signature)(tuple(kept), step.signature.outputs)
