"""A replay (`--replay`): the steps of a run again, as its trace has them, on the same ranks.

Each rank trains on the samples that its lines have; a rank that was lost leaves before the first
step in which it did not count. No rank is lost in the replay, so nothing is torn or repaired: if
its weights are those of the run, bit for bit, then the run's losses have changed nothing but who
trained on what.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch

from dlio.comm.planned_membership import PlannedMembership
from dlio.comm.survival.recovery import Recovery
from dlio.errors import UsageError
from dlio.loader.contract import BatchData
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset
from dlio.loader.stats import PassStats
from dlio.train.ledger_file import LedgerLine, read_lines
from dlio.util.units import counted

_NEEDED: Final = ("update", "ranks")


@dataclass(frozen=True, slots=True)
class _ReplayStep:
    counted: tuple[int, ...]
    """Ranks whose samples it used."""
    dealt: int
    """Number of ranks that its batch was dealt to."""
    update: int
    part: int
    """Times that the exchange had been finished before, in this epoch."""
    samples: Sequence[int]
    """Samples of this rank."""


class Replay:
    """The batches of a trace, in the place of `BatchAssigner`. Closed by its owner.

    Loaders are those of the training data, and others, which are dealt to the ranks that are left.
    The membership of the recovery is planned.

    Raises UsageError for a file that is not a trace, or the trace of another number of ranks.
    """

    def __init__(
        self,
        path: str,
        loaders: Sequence[DataLoader],
        recovery: Recovery,
        global_batch: int,
    ) -> None:
        assert isinstance(recovery.membership, PlannedMembership)
        self._path, self._recovery = path, recovery
        self._membership = recovery.membership
        self._loader, self._loaders, self._global_batch = loaders[0], loaders, global_batch
        self._data: Dataset = loaders[0].data
        self._epochs = groupby(read_lines(path), lambda line: line["epoch"])
        self._own: list[list[int]] = []
        """This rank's samples by step of the epoch, without steps in which it has none."""
        self._batches = DataLoader(
            self._data,
            batch_sampler=self._own,
            num_workers=loaders[0].num_workers,
            generator=torch.Generator(),  # Otherwise it draws from the one for dropout.
        )
        self._epoch = self._left = 0
        self._steps: list[_ReplayStep] = []
        self._lines_of_lost: list[LedgerLine] = []
        self._survivors = self._dealt_to = self._membership.members
        self.members: tuple[int, ...] = self._survivors
        """The ranks that the batch was dealt to, as far as their number goes."""
        self.position = self.step = 0
        """Position of the epoch's order after the batch that was yielded last, and its number."""

    @property
    def usual_batch(self) -> int:
        """Samples of a batch over all ranks."""
        return self._global_batch

    def begin_epoch(self, epoch: int) -> None:
        """Read the epoch's lines. Raises UsageError if the trace lacks it."""
        number, rows = next(self._epochs, (-1, ()))
        if number != epoch:
            raise UsageError(
                f"--replay {self._path}: has no epoch {epoch}; give the trace of a whole run, and "
                "the --epochs that it was started with"
            )
        self._epoch, self.position, self.step = epoch, 0, 0
        self._read(rows)
        for step in self._steps:
            if not set(step.counted) <= set(self._membership.members):
                raise UsageError(
                    f"--replay {self._path}: in epoch {epoch}, rank(s) "
                    f"{sorted(set(step.counted) - set(self._membership.members))} came back after "
                    "they had been lost, or joined: such a run cannot be replayed"
                )

    def batches(self) -> Iterator[BatchData]:
        """Yield this rank's batches up to the next place where all exchanges were finished."""
        steps = [each for each in self._steps if each.part == self._steps[0].part]
        del self._steps[: len(steps)]
        if not steps:
            return
        self._own[:] = [list(step.samples) for step in steps if step.samples]
        self._data.set_epoch(self._epoch)
        self._batches.set_epoch(self._epoch)
        batches = iter(self._batches)  # Collective the first time: also without samples.
        for number, step in enumerate(steps):
            self._go_on_with(step.counted)
            self.members = tuple(range(step.dealt))
            self._left = sum(each.update == step.update for each in steps[number + 1 :])
            self.position = min(self.position + self._global_batch, len(self._data))
            self._loader.last_samples = np.array(step.samples, np.int64)
            yield self._empty() if not step.samples else _as_trained(next(batches))
            self.step += 1

    def left(self) -> int:
        """Return the number of batches after this one that the same optimizer step uses."""
        return self._left

    def end_epoch(self) -> None:
        """Let the ranks leave that were lost after the epoch's last step."""
        self._go_on_with(self._survivors)

    def regroup(self) -> None:
        """Have later passes of the loaders dealt to the ranks that are left."""
        members = self._membership.members
        if members != self._dealt_to:
            self._dealt_to = members
            for loader in self._loaders:
                loader.regroup(members, self._membership.me, self._global_batch)

    def of_lost(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield (epoch, step, rank, samples) of ranks that left after these steps."""
        for line in self._lines_of_lost:
            yield line["epoch"], line["step"], line["rank"], line["samples"]

    def stats(self) -> PassStats:
        """Return this rank's counts of the epoch."""
        return self._batches.stats()

    def close(self) -> None:
        """End the threads that make batches."""
        self._batches.close()

    def _read(self, rows: Iterable[LedgerLine]) -> None:
        """Note an epoch's steps."""
        me, ranks = self._membership.me, len(self._membership.members)
        lost: set[int] = set()
        others: list[LedgerLine] = []
        for number, of_step in groupby(rows, lambda line: line["step"]):
            lines = list(of_step)
            if any(key not in line for line in lines for key in _NEEDED):
                raise UsageError(
                    f"--replay {self._path}: epoch {self._epoch} lacks what is known of step "
                    f"{number} when ranks join, or was written by an earlier version: such a run "
                    "cannot be replayed"
                )
            if not (self._epoch or number) and lines[0]["ranks"] != ranks:
                raise UsageError(
                    f"--replay {self._path}: is of {counted(lines[0]['ranks'], 'rank')}, and "
                    f"there are {ranks}; start as many (-n)"
                )
            if number != len(self._steps):
                raise UsageError(
                    f"--replay {self._path}: epoch {self._epoch} lacks step {len(self._steps)}; "
                    "see `dlio ledger`"
                )
            members = tuple(line["rank"] for line in lines)
            mine = next((line["samples"] for line in lines if line["rank"] == me), [])
            first = lines[0]
            step = _ReplayStep(members, first["ranks"], first["update"], first.get("part", 0), mine)
            self._steps.append(step)
            others += (line for line in lines if line.get("lost"))
            lost.update(line["rank"] for line in lines if line.get("lost"))
        self._survivors = tuple(each for each in self._steps[-1].counted if each not in lost)
        self._lines_of_lost = others

    def _go_on_with(self, members: tuple[int, ...]) -> None:
        """Let all other ranks leave. Raises RankLeft on them, at the end."""
        if members != self._membership.members:
            self._membership.plan(members)
            self._recovery.recover()

    def _empty(self) -> BatchData:
        side = self._data.crop.size
        return torch.empty((0, 3, side, side), dtype=torch.uint8), torch.empty(0, dtype=torch.int64)


def _as_trained(batch: BatchData) -> BatchData:
    """Return a batch in the memory format of dlio's own order, on which results depend."""
    images, labels = batch
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), labels
