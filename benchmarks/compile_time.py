"""Compile time by depth: a GPT step for a simulated world of 1,024 ranks, parameters on meta, no hardware.

    python benchmarks/compile_time.py [--layers 12 24 48] [--world 1024] [--width 1024]

Prints seconds from capture to the last pass and how they grow: 1.0 is linear in depth.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from fsdp_fx import fsdp_compile, simulated_world

sys.path.insert(0, str(Path(__file__).parent))
from step_overhead import GPT, make_step


def seconds_for(layers, args):
    with simulated_world(args.world) as mesh:
        with torch.device("meta"):
            model = GPT(args.width, layers)
            batch = torch.zeros(2, 4, 128, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = fsdp_compile(make_step(optimizer), model, mesh=mesh)
        begun = time.perf_counter()
        step.compile(batch[0], batch[1])
        return time.perf_counter() - begun, step.report()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    seconds_for(1, args)  # imports and caches of torch
    first = None
    print(f"simulated world of {args.world} ranks, width {args.width}, torch {torch.__version__}")
    for layers in args.layers:
        seconds, report = seconds_for(layers, args)
        first = first or (layers, seconds)
        growth = seconds / first[1] / (layers / first[0])
        stages = ", ".join(f"{name} {value:.1f}" for name, value in report.seconds.items())
        print(f"{layers:3d} layers {report.nodes:6d} nodes {seconds:6.2f} s  growth {growth:.2f} of linear  ({stages})")


if __name__ == "__main__":
    main()
