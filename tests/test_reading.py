"""Graphs, diffs, reports and dumps, as a user reads them."""

import re

import cases
import expecttest
import pytest
import torch
import torch.nn as nn

import fsdp_fx
from fsdp_fx import fsdp_compile, simulated_world
from fsdp_fx.printing import diff, type_text


def compiled(layers=2, world=4):
    with simulated_world(world) as mesh:
        model = cases.gpt(layers=layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return fsdp_compile(cases.clipped_step(optimizer), model, mesh=mesh).compile(*cases.tokens(0))


@pytest.fixture(scope="module")
def step():
    return compiled()


def test_every_stage_is_a_graph_module(step):
    assert list(step.graphs) == ["capture", *(p.name for p in fsdp_fx.PASSES)]
    assert all(isinstance(graph, torch.fx.GraphModule) for graph in step.graphs.values())
    assert step.graph is step.graphs["lower"]
    assert "def forward(self, p_emb_weight" in step.graphs["capture"].code


def test_a_graph_prints_types_roles_and_lines(step):
    text = str(step.graphs["shard_parameters"])
    assert "p_emb_weight: f32[64,64]  # parameter emb.weight" in text
    assert "h0_0_lr: float  # optimizer[0] group 0 lr" in text
    assert "x_0: i64[2,32]  # batch args[0]" in text
    assert re.search(r"# forward blocks\.0\.qkv cases\.py:\d+", text)
    assert re.search(r"# backward blocks\.0\.qkv cases\.py:\d+", text)
    assert re.search(r"gather_emb_weight: f32\[256,64\] = _c10d_functional.wait_tensor", text)
    assert "# 1: user output 1" in text


def test_types_in_one_notation():
    assert type_text(torch.empty(3, 4)) == "f32[3,4]"
    assert type_text((torch.empty(2, dtype=torch.bfloat16), 1.0)) == "(bf16[2], float)"


class TestDiff(expecttest.TestCase):
    def test_marks(self):
        """`+` inserted, `-` removed, `~` changed, `>` moved."""

        def graph(names, changed=()):
            g = torch.fx.Graph()
            x = g.placeholder("x")
            for name in names:
                g.create_node("call_function", torch.neg if name not in changed else torch.abs, (x,), name=name)
            g.output(x)
            return g

        self.assertExpectedInline(
            diff(graph("abcdef"), graph("acxbef", changed="f"), context=0),
            """\
  ...
> c: none = neg(x)
+ x_1: none = neg(x)
  ...
- d: none = neg(x)
  ...
~ f: none = abs(x)
1 inserted, 1 removed, 1 changed, 1 moved, 5 unchanged
""",
        )


def test_diff_between_stages(step):
    text = step.diff("shard_parameters", "bucket")
    assert re.search(r"^\+ .*split_with_sizes_copy", text, re.M)
    assert re.search(r"^- .*all_gather_into_tensor", text, re.M)
    assert re.search(r"\d+ inserted, \d+ removed, \d+ changed, \d+ moved, \d+ unchanged$", text.strip())
    with pytest.raises(fsdp_fx.FsdpFxError, match="no stage 'nonsense'; the stages are"):
        step.diff("capture", "nonsense")


def test_report(step):
    report = step.report()
    kinds = [row.kind for row in report.collectives]
    assert kinds == ["all_gather", "reduce_scatter", "all_reduce"]
    gather = report.collectives[0]
    parameters = sum(p.numel() for p in cases.gpt(layers=2).parameters())
    assert report.parameter_bytes == 4 * parameters == gather.nbytes
    assert report.shard_bytes == parameters  # a quarter, nothing padded
    assert gather.dtype == "f32"
    assert gather.parameters[0] == "emb.weight"
    assert re.fullmatch(r"cases\.py:\d+", gather.first_use)
    assert report.communicated_bytes == int(0.75 * (gather.nbytes * 2 + 2 * report.collectives[2].nbytes))
    assert set(report.seconds) == set(step.graphs)
    assert report.traces == ("first call",)
    text = str(report)
    assert "4 ranks" in text
    assert "one gather for 27" in text
    assert "neighbours in storage" in text
    assert "compile time:" in text


def test_dump(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_FX_DUMP", str(tmp_path))
    step = compiled(layers=1)
    (folder,) = (tmp_path / "rank0").iterdir()
    names = sorted(p.name for p in folder.iterdir())
    stages = list(step.graphs)
    expected = [f"{i:02d}_{stage}.txt" for i, stage in enumerate(stages)]
    expected += [f"{i:02d}_{stage}.diff" for i, stage in enumerate(stages) if i] + ["report.txt"]
    assert names == sorted(expected)
    assert (folder / "00_capture.txt").read_text() == str(step.graphs["capture"])
    assert (folder / "report.txt").read_text() == f"{step.report()}\n"


def test_a_graph_is_for_one_world_only():
    """The plan has no batch shapes in it, so that ranks with other lengths have the same."""
    with simulated_world(4) as mesh:
        model = nn.Linear(4, 4)
        step = fsdp_compile(lambda model, x: model(x).sum(), model, mesh=mesh)
        plans = [step.compile(torch.ones(n, 4))._compiled().stages.step.plan() for n in (2, 3)]
    assert plans[0] == plans[1]
    assert len(step.traces) == 2
