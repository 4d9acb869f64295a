"""Every private torch API that fsdp_fx uses, each with the reason and the versions it was seen in.

Nothing else in the project imports a name of torch that starts with an underscore or lives in an
underscored module (`torch.ops._c10d_functional` excepted: its operators are what every released
functional collective lowers to, and they are stable from 2.1 to 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# make_fx takes fake inputs only under the mode that made them, and FakeTensorMode has no public name.
# torch.compiler and torch.export offer no way to trace a function that calls backward() and steps an
# optimizer. Seen in 2.11 to 2.13.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

# A GraphModule generates its code whenever it is made; of our stages only the last one runs. 2.3 to 2.13.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)

# TorchDispatchMode has no public home; the extension point itself is documented. 2.0 to 2.13.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "TorchDispatchMode",
    "autograd_sequence_number",
    "backend_name",
    "current_autograd_sequence",
    "current_graph",
    "default_store",
    "fake_mode",
    "fake_store",
    "local_store",
    "local_tensor",
    "make_fx",
    "python_guard",
    "record_in_place",
    "symbol_name",
    "symbolic_float",
    "tracing",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def fake_mode() -> FakeTensorMode:
    """A fake mode whose `.item()` gives a symbol (optimizers read their step count so) while operators
    with data-dependent shapes (nonzero, masked_select) raise. The ShapeEnv is private; 2.11 to 2.13."""
    return FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False),
    )


def symbolic_float(mode: FakeTensorMode, value: float, name: str) -> torch.SymFloat:
    """A float that traces as a graph input and has `value` as its hint. A branch on it (such as
    `weight_decay != 0`) records a guard in the mode's ShapeEnv. `create_unspecified_symbol` is what
    Dynamo uses for float inputs; nothing public makes one. 2.11 to 2.13."""
    from torch._dynamo.source import ConstantSource  # slow to import, needed at capture only

    env = mode.shape_env
    assert env is not None
    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    made = env.create_symfloatnode(symbol, hint=value, source=source)
    assert isinstance(made, torch.SymFloat)
    return made


def symbol_name(value: torch.SymFloat) -> str:
    """The name of the symbol behind a SymFloat from `symbolic_float`; `.node.expr` is private. 2.11 to 2.13."""
    return str(value.node.expr)


def python_guard(mode: FakeTensorMode) -> tuple[str, ...]:
    """The conditions under which the trace is valid, as Python expressions over symbol names. The
    printer is private; it is the one torch's own guards go through. 2.11 to 2.13."""
    from torch.utils._sympy.printers import PythonPrinter

    env = mode.shape_env
    assert env is not None
    printer = PythonPrinter()
    return tuple(dict.fromkeys(printer.doprint(guard.expr) for guard in env.guards))


@contextlib.contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """What make_fx needs around a call that runs backward(): a tracing context for the fake mode, so that
    nested code reuses it, and autograd on this thread. TracingContext is private; 2.11 to 2.13."""
    from torch._guards import TracingContext
    from torch._guards import tracing as torch_tracing

    with (
        mode,
        torch_tracing(TracingContext(mode)),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def autograd_sequence_number() -> int:
    """The number of the autograd node made last: links a forward operator to its backward. 2.0 to 2.13."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def current_autograd_sequence() -> int | None:
    """The number of the autograd node that runs now, None outside backward. 2.0 to 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def current_graph() -> torch.fx.Graph | None:
    """The graph that make_fx is writing, so that new nodes can be annotated as they appear. 2.11 to 2.13."""
    mode = get_proxy_mode()
    return None if mode is None else getattr(mode.tracer, "graph", None)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard itself; `to_local()` goes through autograd and costs 10 us. 2.0 to 2.13."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def record_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes a call of an in-place operator without results into the graph being traced, symbols and all.

    Operators with `float` arguments (the fused optimizers) turn a SymFloat into its value on their way through the
    dispatcher, which would bake learning rates; their arguments' proxies are therefore looked up here. 2.11 to 2.13.
    """
    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer

    def proxy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return get_proxy_slot(value, tracer, value, lambda slot: slot.proxy)
        if isinstance(value, torch.SymFloat):
            return get_proxy_slot(value, tracer).force()
        return value

    args_, kwargs_ = pytree.tree_map(proxy, (args, kwargs))
    tracer.create_proxy("call_function", op, args_, kwargs_)


def default_store() -> Store:
    """The rendezvous store of the default group: the ranks agree on plans through it without a
    collective, so that no collective can hang. No public accessor. 2.0 to 2.13."""
    return dist.distributed_c10d._get_default_store()


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """ "gloo", "nccl", "fake": what carries this group's tensors of this device. `get_backend` answers for the whole
    group, "cpu:gloo,cuda:nccl" if it has several. 2.0 to 2.13."""
    return str(group._get_backend(torch.device(device_type)).name())


def local_store() -> Store:
    """A store for a world of one; `torch.distributed.HashStore` works but is not exported for type checkers."""
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    return store


def fake_store() -> Store:
    """The store of the fake process group, which lives in torch's testing folder. 2.1 to 2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Store = FakeStore()
    return store
