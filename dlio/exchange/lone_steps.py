"""Notice of a training whose ranks have shares of the data, and share nothing else."""

import linecache
import re
import sys
import sysconfig
import types
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from dlio.util.printable import log_warning
from dlio.util.units import counted

_OWN: Final = ("dlio", "mpi4py")
_INSTALLED: Final = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_NAMED: Final = re.compile(r"\bmpi4py\b")
_hook: RemovableHandle | None = None
_are_exchanged = False


def note_exchange() -> None:
    """Note that ranks exchange gradients or weights."""
    global _are_exchanged
    _are_exchanged = True


def watch_steps(rank: int, ranks: int) -> None:
    """Look at the first step of an optimizer in this process, once, whatever loaders call this."""
    global _hook
    if _hook is None and ranks > 1:
        _hook = register_optimizer_step_post_hook(lambda of, *_: _stepped(of, rank, ranks))


def _stepped(optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
    trains = any(
        isinstance(each, torch.nn.Parameter) and each.grad is not None
        for group in optimizer.param_groups
        for each in group["params"]
    )
    if not trains or _hook is None:
        return
    _hook.remove()
    if not rank and not (_are_exchanged or _script_may_exchange()):
        log_warning(
            f"each of {counted(ranks, 'rank')} trains on its own share of the data, and nothing "
            "averages their gradients: each has a model of its own. Call dlio.distribute(model, "
            "optimizer), wrap the model in DistributedDataParallel, or start a script for one "
            "process by `dlio run`"
        )


def _script_may_exchange() -> bool:
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return True
    modules = list(sys.modules.items())
    several = [each for name, each in modules if name.partition(".")[0] not in _OWN]
    return "horovod.torch" in sys.modules or any(map(_names_mpi, several))


def _names_mpi(module: types.ModuleType) -> bool:
    """True if a module has something of mpi4py, or is a file of the user's that writes its name, as
    where a function or a method imports it."""
    for value in list(getattr(module, "__dict__", {}).values()):
        of = value.__name__ if type(value) is types.ModuleType else type(value).__module__
        if str(of).partition(".")[0] == "mpi4py":
            return True
    file = str(getattr(module, "__file__", None) or "")
    return not file.startswith(_INSTALLED) and any(map(_NAMED.search, linecache.getlines(file)))
