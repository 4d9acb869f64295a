"""functionalize: free the local domain of in-place operators, so that passes may reorder it.

Before    empty_like = aten.empty_like(x)
          bernoulli_ = aten.bernoulli_(empty_like, 0.9)
          div_ = aten.div_(bernoulli_, 0.9)
          add_ = aten.add_(b_num_batches_tracked, 1)
After     empty_like = aten.empty_like(x)
          bernoulli = aten.bernoulli.p(empty_like, 0.9)
          div = aten.div(bernoulli, 0.9)
          add = aten.add(b_num_batches_tracked, 1)
          copy_ = aten.copy_(b_num_batches_tracked, add)       # declared buffer update, at the domain's end
Requires  domains
Ensures   functional

The work is torch's own (`torch.func.functionalize`, which knows views, regenerates them after a write and
appends the updates of mutated inputs); this pass cuts out each run of local nodes that holds a write,
traces it through there, and puts it back with names, lines and module paths kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fsdp_fx._torch_private import current_graph, make_fx, tracing
from fsdp_fx.annotate import META_KEYS, annotate_new_nodes
from fsdp_fx.graph_pass import graph_pass
from fsdp_fx.step_graph import Decision, StepGraph, fresh, remove_dead, written_args

__all__ = ["functionalize"]

aten = torch.ops.aten

# These write their running statistics without saying so in their schema; the "legit" form says so.
_HONEST = {aten.native_batch_norm.default: aten._native_batch_norm_legit.default}


@graph_pass(requires={"domains"}, ensures={"functional"})
def functionalize(step: StepGraph) -> StepGraph:
    _declare_hidden_writes(step)
    for run in _local_runs(step):
        written = [n for n in run if written_args(n) and not _is_update(n)]
        if written:
            _replace(step, run)
            step = step.decided(
                Decision(
                    "functionalize",
                    "step",
                    f"{len(written)} in-place operators of the local domain made functional",
                    "passes may then reorder the local domain freely",
                )
            )
    return step


def _declare_hidden_writes(step: StepGraph) -> None:
    for node in step.graph.nodes:
        honest = _HONEST.get(node.target)  # type: ignore[arg-type]
        if honest is not None and node.args[3] is not None and node.args[5]:
            node.target = honest


def _is_update(node: fx.Node) -> bool:
    """A write to an input: what functionalisation itself leaves behind."""
    return node.target is aten.copy_.default and all(a.op == "placeholder" for a in written_args(node))


def _local_runs(step: StepGraph) -> list[list[fx.Node]]:
    """Maximal runs of neighbouring local nodes, in order; constants among them stay where they are."""
    runs: list[list[fx.Node]] = []
    inside = False
    for node in step.graph.nodes:
        if node.op == "get_attr":
            continue
        local = node.meta.get("domain") == "local" and node.op != "output"
        if local:
            if not inside:
                runs.append([])
            runs[-1].append(node)
        inside = local
    return runs


class _Labelled(fx.Interpreter):
    """Runs a piece of graph under make_fx and labels the new nodes like the old ones they come from."""

    graph_written: fx.Graph | None = None
    last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        graph = current_graph()
        if graph is not None:
            meta = {k: n.meta[k] for k in (*META_KEYS, "domain", "segment") if k in n.meta}
            meta["made_for"] = n.name
            self.last = annotate_new_nodes(graph, self.last, meta)
        return result


def _replace(step: StepGraph, run: list[fx.Node]) -> None:
    inside = set(run)
    inputs = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in inside))
    outputs = [n for n in run if any(u not in inside for u in n.users)]
    piece = fx.Graph()
    mapping = {}
    for node in inputs:
        mapping[node] = piece.placeholder(node.name)
    for node in run:
        mapping[node] = piece.node_copy(node, lambda n: mapping[n])
        mapping[node].meta = dict(node.meta)
    piece.output([mapping[n] for n in outputs])
    interpreter = _Labelled(fx.GraphModule(step.module, piece))

    def functional(*values: torch.Tensor) -> Any:
        return interpreter.run(*values)

    with tracing(step.mode), torch.no_grad():
        # Fresh stand-ins: a write in this trace must not reach those that the graph's meta shows.
        values = [fresh(_value(step, n)) for n in inputs]
        traced = make_fx(torch.func.functionalize(functional))(*values)
    _splice(step, run, inputs, outputs, traced)


def _value(step: StepGraph, node: fx.Node) -> Any:
    return getattr(step.module, str(node.target)) if node.op == "get_attr" else node.meta["val"]


def _splice(
    step: StepGraph, run: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], traced: fx.GraphModule
) -> None:
    """Puts the traced piece in the run's place."""
    graph = step.graph
    after = run[-1].next
    mapping: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    results: Any = ()
    segment = run[0].meta["segment"]
    # Old nodes go first, so that the new ones get their names.
    inside = set(run)
    users = {n: [u for u in n.users if u not in inside] for n in outputs}
    holes = {n: graph.placeholder(f"hole_{n.name}") for n in outputs}
    for old, hole in holes.items():
        for user in users[old]:
            user.replace_input_with(old, hole)
    for node in reversed(run):
        graph.erase_node(node)
    with graph.inserting_before(after):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                results = node.args[0]
                continue
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = {"domain": "local", "phase": "forward", "segment": segment, **node.meta}
    _keep_names({n.name for n in run}, [n for n in mapping.values() if n not in inputs])
    for old, new in zip(outputs, results, strict=True):
        holes[old].replace_all_uses_with(mapping[new])
        graph.erase_node(holes[old])
    remove_dead(graph)


def _keep_names(before: set[str], nodes: list[fx.Node]) -> None:
    """A node made for another takes its name, so that what the
    pass did not touch reads the same before and after."""
    last = {n.meta.pop("made_for", ""): n for n in nodes}
    taken = {n.name for n in nodes}
    for name, node in last.items():
        if name in before and name not in taken:
            taken.discard(node.name)
            node.name = name
            taken.add(name)
