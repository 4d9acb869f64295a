"""Runs a function on several gloo ranks, in processes that live as long as the test session."""

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
TIMEOUT = 180


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


class Ranks:
    """`ranks(world, function, *args)` calls a module-level function on every rank and returns their results.

    A world of 0 runs it in one process without a process group. The function must live at the top level of a test
    file; arguments and results are pickled.
    """

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._listener = Listener(os.path.join(self._folder.name, "socket"), family="AF_UNIX", backlog=16)
        self._workers = []
        self._jobs = 0

    def _start(self, count):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FSDP_FX_AGREE_TIMEOUT": "60"}
        environment.pop("FSDP_FX_DUMP", None)
        started = []
        while len(self._workers) + len(started) < count:
            started.append(subprocess.Popen([sys.executable, "-P", WORKER, self._listener.address], env=environment))
        for process in started:
            self._workers.append((process, self._listener.accept()))

    def __call__(self, world, function, *args):
        count = max(world, 1)
        self._start(count)
        self._jobs += 1
        store = os.path.join(self._folder.name, f"store{self._jobs}")
        path = function.__globals__["__file__"]
        for rank, (_, connection) in enumerate(self._workers[:count]):
            connection.send((path, function.__name__, args, rank, world, store))
        results, failures = [], []
        for rank, (_, connection) in enumerate(self._workers[:count]):
            try:
                if not connection.poll(TIMEOUT):
                    raise TimeoutError(f"no answer in {TIMEOUT} s")
                fine, value = connection.recv()
            except (EOFError, OSError, TimeoutError) as error:
                fine, value = False, f"{type(error).__name__}: {error}"
            (results if fine else failures).append(value if fine else f"rank {rank}:\n{value}")
        if failures:
            self.close_workers()  # survivors may hold half a process group
            raise RankError("\n".join(failures))
        return results

    def close_workers(self):
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.wait()
        self._workers = []

    def close(self):
        self.close_workers()
        self._listener.close()
        self._folder.cleanup()
