"""The examples run as their docstrings say, small."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--steps", "30", "--layers", "2", "--width", "64", "--batch", "8", "--every", "10", "--warmup", "5"]


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_gpt_on_two_ranks_equals_fully_shard():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run(*torchrun, str(EXAMPLES / "train_gpt.py"), *SMALL, "--sample", "10", "--check")
    assert "on 2 ranks (gloo)" in out
    before, after = (float(re.search(rf"held-out loss {when}: ([\d.]+)", out)[1]) for when in ("before", "after"))
    assert after < before - 1
    assert "losses bitwise equal: 30 of 30; parameters bitwise equal: 28 of 28" in out
    assert "one gather for 28" in out
    assert re.search(r"step +20  loss [\d.]+  norm +[\d.]+  lr [\d.e-]+ +\d+ tokens/s  \d+ MiB", out)


def test_train_gpt_in_a_world_of_one():
    out = run(sys.executable, "-P", str(EXAMPLES / "train_gpt.py"), *SMALL, "--sample", "0")
    assert "on 1 rank (gloo)" in out
    assert "the world has one rank" in out
