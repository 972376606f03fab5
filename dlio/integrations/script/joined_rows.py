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
    mine: Any, batch: ScriptBatch | None, comm: Communicator, guard: ScriptGuard
) -> Any:
    """Return the rows of a divided batch, in its order, where `mine` is a tensor or a list of as
    many rows for each sample of this rank's part. Anything else is returned as it is, and told if
    it has rows. Collective.
    """
    is_list = isinstance(mine, list | tuple)
    if (
        batch is None
        or not batch.divided
        or not (is_list or (isinstance(mine, torch.Tensor) and mine.ndim))
    ):
        return mine
    guard.meet("accelerator.gather")
    each, rest = divmod(len(mine), len(batch.place))
    is_text = is_list and all(isinstance(row, str | int | float | None) for row in mine)
    kind = str(mine.shape[1:]) if isinstance(mine, torch.Tensor) else f"list {is_text}"
    own = [batch.place.start, 0 if rest else each, kind, bool(batch.weight)]
    parts: list[Any] = uniform(comm, lambda: comm.allgather(own))
    if not each or any(part[1:3] != own[1:3] for part in parts) or (is_list and not is_text):
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
    order = sorted(range(len(parts)), key=lambda rank: int(parts[rank][0]))
    kept = [theirs[rank] for rank in order if parts[rank][3]]
    if is_list:
        return [row for part in kept for row in part]
    return torch.cat(kept)
