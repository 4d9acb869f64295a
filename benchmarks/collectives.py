"""What `lower` relies on: each collective and its replacement on this backend, interleaved, medians.

    torchrun --nproc-per-node 2 benchmarks/collectives.py

A reduce-scatter against exchanging the pieces and averaging them locally; an all-reduce against gathering and adding.
"""

import statistics
import time

import torch
import torch.distributed as dist

ops = torch.ops._c10d_functional


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, group = dist.get_world_size(), dist.group.WORLD.group_name
    wait = ops.wait_tensor
    if dist.get_rank() == 0:
        print(f"{world} gloo ranks, torch {torch.__version__}; medians of 100, microseconds")
    for numel in (64, 4096, 262144, 1048576):
        whole, part = torch.randn(numel * world), torch.randn(numel)
        splits = [numel] * world

        def exchange(whole=whole, splits=splits, numel=numel):
            pieces = wait(ops.all_to_all_single(whole, splits, splits, group))
            return pieces.view(world, numel).mean(0)

        def gather_and_add(part=part, numel=numel):
            return wait(ops.all_gather_into_tensor(part, world, group)).view(world, numel).sum(0)

        calls = {
            "reduce_scatter": lambda whole=whole: wait(ops.reduce_scatter_tensor(whole, "avg", world, group)),
            "exchange and average": exchange,
            "all_reduce": lambda part=part: wait(ops.all_reduce(part, "sum", group)),
            "gather and add": gather_and_add,
        }
        times = {name: [] for name in calls}
        for number in range(110):
            for name, call in calls.items():
                dist.barrier()
                begun = time.perf_counter()
                call()
                if number >= 10:
                    times[name].append(1e6 * (time.perf_counter() - begun))
        if dist.get_rank() == 0:
            row = ", ".join(f"{name} {statistics.median(values):.0f}" for name, values in times.items())
            print(f"{numel * 4:8d} bytes a rank: {row}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
