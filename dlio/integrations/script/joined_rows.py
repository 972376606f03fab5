"""Rows of all ranks' parts of a training batch, where a script asks a framework for them.

`accelerator.gather_for_metrics(predictions)` returns the batch's predictions, for any number of
processes; in a script of `dlio run` the framework knows of one.
"""

from collections.abc import Sequence
from typing import Any

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
    many rows for each sample of this rank's part. Anything else is returned as it is, and told if
    it has rows. `batches` are those that the rows may be of, the likeliest first: of one that every
    rank has whole, as in an evaluation, they are complete. Collective.
    """
    is_list = isinstance(mine, list | tuple)
    is_whole = not batches or not batches[0].divided
    batches = [each for each in batches if each.divided]
    if is_whole or not (is_list or (isinstance(mine, torch.Tensor) and mine.ndim)):
        return mine
    guard.meet("accelerator.gather")
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
