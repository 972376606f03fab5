"""Pruning of models that torch.compile has compiled, or DistributedDataParallel wraps.

DDP's reducer has buckets made from shapes, and holds the autograd nodes of parameters, which cannot
be cut while it exists. So it is given up before a cut. Afterwards DDP makes another one from the
smaller parameters, as it does when it is unpickled.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.util.units import counted

# torch.compile
#
# A compiled graph has constant shapes, and does not call hooks that were added to layers later. So
# steps in which statistics are sampled run uncompiled, and a cut has the next call compile again.


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module within torch.compile's wrapper; any other module as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def without_compiler() -> AbstractContextManager[object]:
    """Context in which compiled functions run as they were written."""
    if not _is_loaded():
        return nullcontext()
    return cast("AbstractContextManager[object]", torch.compiler.set_stance("force_eager"))


def forget_graphs() -> None:
    """Have compiled functions compile again at their next call; call it before a cut.

    The guards of a graph refer to parameters, which then cannot be cut, and torch gives up
    compiling a function whose guards have failed some times.
    """
    if _is_loaded():
        torch.compiler.reset()


def _is_loaded() -> bool:
    """True if the compiler was imported: otherwise nothing is compiled."""
    return "torch._dynamo" in sys.modules


# DistributedDataParallel
_Hook = Callable[[Any, Any], Any]


def check_data_parallel(ddp: DistributedDataParallel, comm: Communicator) -> None:
    """Raise UsageError if DDP could not make its reducer again, or has other ranks than `comm`."""
    if ddp.process_group is not dist.group.WORLD:
        raise UsageError(
            "Apoptosis prunes a DistributedDataParallel of all ranks only: make it without "
            "process_group and device_mesh"
        )
    if dist.get_world_size() != comm.size:
        raise UsageError(
            f"Apoptosis has {counted(comm.size, 'rank')}, and torch.distributed "
            f"{dist.get_world_size()}: "
            "start the ranks with `dlio run`, `dlio launch` or torchrun"
        )
    options = {
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(getattr(ddp, "_delay_all_reduce_params", ())),
        "optimize_ddp='python_reducer'": bool(getattr(ddp, "_use_python_reducer", False)),
    }
    for option, is_set in options.items():
        if is_set:
            raise UsageError(
                f"Apoptosis cannot cut a DistributedDataParallel with {option}: make it without"
            )
    _hooks_of(ddp)


@contextmanager
def without_reducer(ddp: DistributedDataParallel | None) -> Iterator[None]:
    """Within a `with` statement, a DDP has no reducer, and its parameters can be cut.

    Afterwards it has a new one, with the same options and communication hooks. None does nothing.

    Raises UsageError, with nothing changed, for hooks whose state depends on shapes.
    """
    if ddp is None:
        yield
        return
    hooks = _hooks_of(ddp)
    ddp_state: Callable[[], dict[str, Any]] = ddp.__getstate__
    restore: Callable[[dict[str, Any]], None] = ddp.__setstate__
    state = ddp_state()
    # The first steps with the new reducer are again those in which DDP learns the graph.
    state |= {"_comm_hooks": [], "_has_rebuilt_buckets": False}
    if "_static_graph_delay_allreduce_enqueued" in state:
        state["_static_graph_delay_allreduce_enqueued"] = False
    _drop_reducer(ddp)
    try:
        yield
    finally:
        restore(state)
        for hook, of_hook in hooks:
            ddp.register_comm_hook(of_hook, hook)


def _drop_reducer(ddp: DistributedDataParallel) -> None:
    """Delete all references to DDP's reducer, whose end frees the parameters.

    The logger refers to it, and functions that torch.compile wraps around DDP have copies of its
    attributes, which nothing reads.
    """
    for name in ("reducer", "logger"):
        dropped = ddp.__dict__.pop(name)
        for place in gc.get_referrers(dropped):
            if isinstance(place, dict) and place.get(name) is dropped:
                del place[name]


def _hooks_of(ddp: DistributedDataParallel) -> list[tuple[_Hook, object]]:
    """Return DDP's communication hooks. Raises UsageError if one cannot be registered again."""
    hooks: list[tuple[_Hook, object]] = list(ddp._comm_hooks)
    unknown = [
        hook.__qualname__
        for hook, state in hooks
        if not (state is None or isinstance(state, dist.ProcessGroup))
    ]
    logged: Callable[[], dict[str, Any]] = ddp._get_ddp_logging_data
    if not hooks and (built_in := logged().get("comm_hook")):
        unknown = [str(built_in)]
    if unknown:
        raise UsageError(
            f"Apoptosis cannot cut the state of DDP's communication hook {unknown[0]}: register a "
            "hook whose state is None or a process group, or use dlio.distribute"
        )
    return hooks
