"""The order of passes is checked when a pipeline is built, and `verify` finds what a broken pass leaves behind."""

import pytest
import staging
import torch

from fsdp_fx import PASSES, GraphPass, Pipeline, VerifyError, graph_pass
from fsdp_fx.step_graph import StepGraph
from fsdp_fx.verify import verify


def test_the_line_of_passes_fits_together():
    assert [p.name for p in Pipeline().passes] == [
        "place_borders",
        "functionalize",
        "shard_parameters",
        "shard_optimizer",
        "bucket",
        "schedule",
        "lower",
    ]


def test_a_wrong_order_is_refused_when_built():
    with pytest.raises(ValueError, match=r"pass 0 'functionalize' requires \['domains'\], which nothing before it"):
        Pipeline(PASSES[1:])


def test_a_pass_without_what_it_needs_is_refused_when_run():
    found = staging.stages(*staging.tiny())
    with pytest.raises(ValueError, match=r"pass 'bucket' needs \['optimizer_sharded'\]"):
        PASSES[4](found["capture"].copy())


def test_unknown_properties_are_refused():
    with pytest.raises(ValueError, match="unknown properties"):

        @graph_pass(requires={"nonsense"}, ensures=set())
        def broken(step: StepGraph) -> StepGraph:
            return step


def test_a_pass_is_a_value_with_a_contract():
    one = PASSES[0]
    assert isinstance(one, GraphPass)
    assert (one.requires, one.ensures) == (frozenset({"captured"}), frozenset({"domains"}))


def drop_wait(step):
    node = next(n for n in step.graph.nodes if "wait_tensor" in str(n.target))
    node.replace_all_uses_with(node.args[0])
    step.graph.erase_node(node)


def second_wait(step):
    node = next(n for n in step.graph.nodes if "wait_tensor" in str(n.target))
    with step.graph.inserting_after(node):
        extra = step.graph.node_copy(node)
    extra.meta = dict(node.meta)


def write_locally(step):
    node = next(n for n in step.graph.nodes if n.meta.get("domain") == "local" and n.op == "call_function")
    with step.graph.inserting_after(node):
        extra = step.graph.call_function(torch.ops.aten.relu_.default, (node,))
    extra.meta = {**node.meta}


def drop_draw(step):
    node = next(n for n in step.graph.nodes if "bernoulli" in str(n.target))
    node.replace_all_uses_with(node.args[0])
    step.graph.erase_node(node)


def whole_parameter(step):
    node = step.placeholders()[0]
    with step.mode:
        node.meta["val"] = torch.empty(3, 2)


def local_reads_sharded(step):
    local = [n for n in step.graph.nodes if n.meta.get("domain") == "local"][-1]
    sharded = next(n for n in step.graph.nodes if n.meta.get("domain") == "sharded")
    with step.graph.inserting_after(sharded):
        extra = step.graph.call_function(torch.ops.aten.neg.default, (sharded,))
    extra.meta = {**local.meta, "domain": "local"}


def update_before_the_gather(step):
    """A write that no edge ties to the gather behind it."""
    parameter = step.placeholders()[0]
    first = next(n for n in step.graph.nodes if n.op == "call_function")
    with step.graph.inserting_before(first):
        extra = step.graph.call_function(torch.ops.aten.mul_.Tensor, (parameter, 0.5))
    extra.meta = {"val": parameter.meta["val"], "domain": "sharded", "phase": "sharded", "segment": 0}


def lose_an_input(step):
    step.signature = type(step.signature)(step.signature.inputs[1:], step.signature.outputs)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (drop_wait, "has 0 waits"),
        (second_wait, "has 2 waits"),
        (write_locally, "in place"),
        (drop_draw, "order or number of random draws changed"),
        (whole_parameter, "parameter input '0.weight' is not a shard of shape"),
        (local_reads_sharded, "of the sharded domain"),
        (update_before_the_gather, "behind its update"),
        (lose_an_input, "are not the signature's inputs"),
    ],
)
def test_verify_finds(harm, complaint):
    step = staging.stages(*staging.tiny(dropout=True))["schedule"]
    harmed = step.copy()
    harm(harmed)
    with pytest.raises(VerifyError) as caught:
        verify(harmed, "harm", step)
    assert complaint in str(caught.value)
    assert "after 'harm'" in str(caught.value)
    assert "please report the graph" in str(caught.value)
