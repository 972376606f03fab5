"""Rows of all ranks' parts of a training batch, where a script asks a framework for them.

`accelerator.gather_for_metrics(predictions)` returns the batch's predictions, for any number of
processes; in a script of `dlio run` the framework knows of one.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import torch

from dlio.comm import Communicator
from dlio.comm.survival.recovery import uniform
from dlio.integrations.objects import gather_tensors
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.script_assigner import ScriptBatch


def joined_rows(
    mine: Any, batches: Sequence[ScriptBatch], comm: Communicator, guard: ScriptGuard
) -> Any:
    """Return the rows of a divided batch, in its order, where `mine` is a tensor or a list of as
    many rows for each sample of this rank's part; a number that is one of the part gets its sum
    over the ranks. Anything else is returned as it is, and told if it has rows. `batches` are those
    that the rows may be of, the likeliest first: of one that every rank has whole, as in an
    evaluation, they are complete. Collective.
    """
    is_list = isinstance(mine, list | tuple)
    is_whole = not batches or not batches[0].divided
    batches = [each for each in batches if each.divided]
    is_number = isinstance(mine, torch.Tensor) and not mine.ndim
    if is_whole or not (is_list or isinstance(mine, torch.Tensor)):
        return mine
    guard.meet("accelerator.gather")
    if is_number:
        return _number(mine, batches[0], comm)
    is_text = is_list and all(isinstance(row, str | int | float | None) for row in mine)
    kind = str(mine.shape[1:]) if isinstance(mine, torch.Tensor) else f"list {is_text}"
    own = [[kind, _rows_each(mine, each), each.place.start, bool(each.weight)] for each in batches]
    everyone: list[Any] = uniform(comm, lambda: comm.allgather(own))
    # By what all ranks know of each other alone: they go on together, or none does.
    alike = all(len(each) == len(own) for each in everyone)
    fits = [
        parts
        for parts in (zip(*everyone, strict=True) if alike else ())
        if parts[0][1] and all(part[:2] == parts[0][:2] for part in parts)
    ]
    if not fits or (is_list and not is_text):
        guard.say(
            "accelerator.gather: what the script gathers of a training batch has not one row, or "
            "as many, of one shape for each of the rank's samples: it is of rank 0's part"
        )
        return mine
    theirs: Sequence[Any]
    if is_list:
        theirs = uniform(comm, lambda: comm.allgather(list(mine)))
    else:
        theirs = uniform(comm, lambda: gather_tensors(mine, comm))
    order = sorted(range(len(theirs)), key=lambda rank: int(fits[0][rank][2]))
    kept = [theirs[rank] for rank in order if fits[0][rank][3]]
    if is_list:
        return [row for part in kept for row in part]
    return torch.cat(kept)


def _rows_each(mine: Any, batch: ScriptBatch) -> int:
    """Return the rows for each sample of this rank's part of a batch, 0 if they do not go up."""
    each, rest = divmod(len(mine), max(len(batch.place), 1))
    return 0 if rest else each


class _RanksNumber(torch.Tensor):
    """The number of this rank's part. Accelerate would gather a vector with that of each process:
    where the script asks for the sum of these, as of counts, it gets it."""

    _reduced: dict[str, torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name = _REDUCTIONS.get(func)
        if name and len(args) == 1 and not kwargs and isinstance(args[0], _RanksNumber):
            return args[0]._reduced[name].clone()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_REDUCTIONS: Final = {
    **{getattr(torch, name): name for name in ("sum", "max", "min")},
    **{getattr(torch.Tensor, name): name for name in ("sum", "max", "min")},
}


def _number(mine: torch.Tensor, batch: ScriptBatch, comm: Communicator) -> torch.Tensor:
    """Return a number with its sum and extremes over the ranks. Collective."""
    own = mine.item(), bool(batch.weight)
    everyone: list[tuple[Any, bool]] = uniform(comm, lambda: comm.allgather(own))
    values = [value for value, counts in everyone if counts]
    if mine.is_complex() or (mine.is_floating_point() and len(set(values)) == 1):
        return mine  # A loss after `backward` is that of the whole batch.
    theirs = torch.tensor(values, dtype=mine.dtype, device=mine.device)
    number = mine.as_subclass(_RanksNumber)
    number._reduced = {"sum": theirs.sum(), "max": theirs.max(), "min": theirs.min()}
    return number


def follow_trainer(comm: Communicator, guard: ScriptGuard, counts: Callable[[], bool]) -> None:
    """Have Hugging Face's Trainer, if it is imported, add up the operations of all ranks.

    Args:
        counts: False if this rank's present batch counts on another rank, or nowhere.
    """
    kind: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if kind is None or hasattr(kind.store_flos, "__wrapped__"):
        return
    operations, store = kind.floating_point_ops, kind.store_flos

    @wraps(operations)
    def floating_point_ops(trainer: Any, inputs: Any) -> Any:
        return operations(trainer, inputs) * counts()

    @wraps(store)
    def store_flos(trainer: Any) -> Any:
        guard.meet("Trainer.store_flos")
        own = trainer.current_flos
        trainer.current_flos = sum(uniform(comm, lambda: comm.allgather(own)))
        return store(trainer)

    kind.floating_point_ops, kind.store_flos = floating_point_ops, store_flos
