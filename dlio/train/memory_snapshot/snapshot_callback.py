"""Copies of a run's state in the memory of its nodes, made between two optimizer steps.

Each rank copies its own tensors, and one rank of each node those that are equal on all ranks. The
latter are weights and the optimizer's state: nothing changes them until the next step of the
optimizer, so a thread copies them while the next batch is computed.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, TypedDict

import torch

from dlio.comm.survival.recovery import uniform
from dlio.launch.node.snapshot_slots import SnapshotSlots
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.checkpoint.state import about, copy_to, places_of, tensors_of
from dlio.train.memory_snapshot.journal import Journal
from dlio.train.memory_snapshot.snapshot_state import COMMON, MEMBER, turn_of
from dlio.train.report import EpochReport
from dlio.train.sample_ledger import SampleLedger
from dlio.train.worker import Worker
from dlio.util.threads import Workers

_SMALL: Final = 64 << 20
"""Bytes of a node's copy up to which each step is copied."""
_AT_ONCE: Final = 1 << 20
"""Bytes that are copied without a thread."""
_SHARE: Final = 0.01
"""Share of the time that larger copies may take."""
_FIRST: Final = 3
"""Copies that are timed before the steps between two of them are chosen."""
_COPY_TIMEOUT_S: Final = 60.0
_ALL: Final = "all/"


class SlotFacts(TypedDict):
    """Facts about a slot; see `dlio.train.memory_snapshot.snapshot_state.SlotPart`."""

    apart: bool
    era: list[int]
    members: list[int]
    about: Mapping[str, object]


class Snapshots(Callback):
    """Copies the state of a run to its nodes' memory, in the folder of this one. One per rank.

    `numbers` are those of this start's ranks when the job began, `start` the times that all have
    begun again, `after` the turn that was restored, -1 if none was.
    """

    def __init__(
        self, worker: Worker, folder: str, numbers: Sequence[int], start: int = 0, after: int = -1
    ) -> None:
        self._worker, self._folder, self._numbers = worker, folder, numbers
        self._me = worker.comm.rank
        self._folders = worker.comm.allgather(folder)
        self._after = after
        self._own = SnapshotSlots(folder, f"{MEMBER}{numbers[self._me]}", after)
        self._common: SnapshotSlots | None = None
        self._copying: Workers | None = None
        together = worker.recovery is not None and worker.exchange.peer_steps is None
        self._apart = not (worker.exchange.alike or together)
        """True if ranks step without waiting for each other: each then keeps its own journal, and
        its own part of the state that is equal on all ranks."""
        writer = f"-{numbers[self._me]}" if self._apart else ""
        self._common_name = f"{COMMON}{writer}"
        self._start, self._begun_at = start, worker.updates
        self.journal = Journal(folder, numbers, start, self._common_name)
        self.incidents = 0
        """Number of the launcher's incidents that losses and changes tell of."""
        self._newest = -1
        self.ledger: SampleLedger | None = None
        """The trace, if there is one."""
        self._every = 1
        self._is_large = False
        self._costs: list[float] = []
        self._steps: list[float] = []
        self._since = time.perf_counter()
        self._failed = False

    def __exit__(self, *_: object) -> None:
        self._wait()
        self._own.close()
        if self._common is not None:
            self._common.close()

    def begins(self, run: Run) -> None:
        if self._keeps_lines:
            self._worker.assigner.keeps_trail = True

    def before_step(self, run: Run) -> bool:
        self._wait()
        return True

    def after_step(self, run: Run) -> None:
        if self._worker.recovery is None and self._keeps_lines:
            self._worker.assigner.commit_step(range(run.comm.size))
        if self._is_large and len(self._costs) == _FIRST and self._every == 1:
            self._choose_interval()
        if run.updates % self._every == 0 and self._worker.assigner.is_settled:
            self._copy(run, turn_of(run.updates, False))

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        self._copy(run, turn_of(run.updates, True))

    def complete(self, run: Run) -> None:
        """Copy the changes since the last copy; returns when it is whole."""
        turn = turn_of(run.updates, False)
        if turn > self._newest and self._worker.assigner.is_settled:
            self._copy(run, turn)
        self._wait()

    def _choose_interval(self) -> None:
        """Agree on the steps between two copies. Collective."""
        cost, step = max(self._costs[1:]), min(self._steps[1:])
        comm = self._worker.comm
        costs = uniform(comm, lambda: comm.allgather(cost / max(step - cost, 1e-6)))
        self._every = max(1, math.ceil(max(costs) / _SHARE))

    def _copy(self, run: Run, turn: int) -> None:
        """Copy the state; returns when all that the next batch changes has been copied."""
        if self._failed:
            return
        began = time.perf_counter()
        self._steps = [*self._steps, began - self._since][-_FIRST:]
        self._since = began
        self._wait()
        try:
            self._write(run, turn)
        except OSError as error:
            self._failed = True
            sys.stderr.write(
                f"dlio: no more copies of the state in {self._folder} ({error.strerror}): if a "
                "node is lost, the job goes on from the last one; free some memory there\n"
            )
        cost = time.perf_counter() - began
        self._costs = [*self._costs, cost][-_FIRST:]

    def _write(self, run: Run, turn: int) -> None:
        worker, me = self._worker, f"rank{run.comm.rank}/"
        tensors = tensors_of(worker)
        own = {n.removeprefix(me): t for n, t in tensors.items() if not n.startswith(_ALL)}
        common = {n.removeprefix(_ALL): t for n, t in tensors.items() if n.startswith(_ALL)}
        self._newest = turn
        self._is_large = sum(t.nbytes for t in tensors.values()) > _SMALL
        write_slot(self._own, turn, own, self._facts({"heard": self._heard()}))
        here = (m for m in self._living() if self._folders[m] == self._folder)
        if not self._apart and self._me != next(here):  # Another rank of the node leads it.
            return
        if self._keeps_lines and not turn % 2:  # Between epochs, the lines are in the trace.
            self.journal.write(turn, run.epoch_number, worker.assigner, worker.finished)
        if self._common is None:
            self._common = SnapshotSlots(self._folder, self._common_name, self._after)
        slots = self._common
        head = self._facts(
            {
                **about(worker),
                "losses": [asdict(loss) for loss in worker.losses],
                "changes": [asdict(change) for change in worker.changes],
                "incidents": self.incidents,
                "trace_bytes": 0 if self.ledger is None else self.ledger.written,
            }
        )
        if sum(tensor.nbytes for tensor in common.values()) <= _AT_ONCE:
            write_slot(slots, turn, common, head)
            return
        self._copying = Workers(
            "dlio-snapshot",
            lambda _: write_slot(slots, turn, common, head),
            stop_timeout_s=_COPY_TIMEOUT_S,
        ).start()

    @property
    def _keeps_lines(self) -> bool:
        """True if the batches that are in the model are wanted: for the trace, or to deal those
        again that only lost weights have seen."""
        return self.ledger is not None or self._apart

    def _heard(self) -> list[tuple[int, int]]:
        """Return the number of each rank, and the turn up to which this one has its steps."""
        hearing = self._worker.exchange.peer_steps
        heard = {} if hearing is None else hearing.heard
        return [
            (self._numbers[member], turn_of(self._begun_at + step, False))
            for member, step in heard.items()
        ]

    def _facts(self, about: Mapping[str, object]) -> SlotFacts:
        members = [self._numbers[member] for member in self._living()]
        recovery = self._worker.recovery
        era = [self._start, 0 if recovery is None else recovery.membership.number]
        return {"apart": self._apart, "era": era, "members": members, "about": about}

    def _living(self) -> Sequence[int]:
        recovery = self._worker.recovery
        return range(len(self._folders)) if recovery is None else recovery.membership.members

    def _wait(self) -> None:
        if self._copying is not None:
            self._copying.wait(_COPY_TIMEOUT_S)
            self._copying = None


def write_slot(
    slots: SnapshotSlots, turn: int, tensors: Mapping[str, torch.Tensor], facts: SlotFacts
) -> None:
    """Copy tensors to a slot, whose text has the facts and the tensors' places."""
    places, size = places_of(tensors)
    head = json.dumps({**facts, "tensors": places}).encode()
    with slots.writing(turn, head, size) as memory:
        copy_to(memory, places, tensors)
