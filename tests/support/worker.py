"""A long-lived test process: imports torch once, then runs functions as one rank of worlds of any size."""

import importlib.util
import os
import sys
import traceback
from multiprocessing.connection import Client

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist

_MODULES = {}


def load(path):
    """The test module at a path, imported once (test files have no importable name)."""
    if path not in _MODULES:
        name = "rank_side_" + os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _MODULES[path] = module
    return _MODULES[path]


def call(path, name, args, rank, world, store):
    torch.manual_seed(0)
    function = getattr(load(path), name)
    function = getattr(function, "rank_side", function)
    if world == 0:
        return function(*args)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        result = function(*args)
        if dist.is_initialized():
            dist.barrier()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    with Client(sys.argv[1], family="AF_UNIX") as connection:
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, call(*job)))
            except BaseException:
                connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main()
