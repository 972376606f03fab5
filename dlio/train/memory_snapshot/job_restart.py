"""Going on after all ranks were started again: the state, the trace, and the report's losses."""

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from dlio.comm import Communicator
from dlio.comm.survival.recovery import MeasuredLoss, Recovery, uniform
from dlio.errors import CommError
from dlio.launch.node.agent_protocol import PAUSED, STATE
from dlio.launch.node.job_starts import Incident, JobStart
from dlio.train.checkpoint.state import restore
from dlio.train.ledger_file import LedgerLine
from dlio.train.memory_snapshot.journal import divided, lines_until
from dlio.train.memory_snapshot.snapshot_callback import Snapshots
from dlio.train.memory_snapshot.snapshot_state import SnapshotState, newest_state
from dlio.train.sample_ledger import SampleLedger
from dlio.train.worker import Worker
from dlio.util.settings import AGENT
from dlio.util.whole_files import write_whole

_PAUSE_TIMEOUT_S: Final = 60.0


class JobRestart:
    """One rank's part in a start of a job, which the rank began at `began`, in seconds since the
    epoch.

    There is no `start` if the launcher does not start ranks again: then nothing is continued, and
    nothing copied. The methods are collective, apart from `end_phase`.
    """

    def __init__(self, start: JobStart | None, began: float) -> None:
        self._start = start
        self.begun = None if start is None else start.begun
        """Ranks when the job began; None for those of this start."""
        self.is_again = start is not None and start.number > 0
        """True if ranks were started before."""
        agent = None if start is None else os.environ.get(AGENT)
        self._folder = None if agent is None else os.path.join(agent, STATE)
        launched = began if start is None else start.launched
        self._ends = {"stop": launched, "start": began, "meet": time.time()}
        """When the phases of this start ended, in their order; see `MeasuredLoss.phases`."""
        self._state: SnapshotState | None = None
        self._told: list[LedgerLine] = []
        """The epoch's lines up to the state."""
        self._lines: list[LedgerLine] = []
        """Those whose steps are in its weights."""
        self._without: list[LedgerLine] = []
        """The others."""

    def describe(self, recovery: Recovery) -> None:
        """Tell the recovery of the ranks' numbers when the job began."""
        if self._start is not None:
            recovery.numbers = self._start.ranks

    def end_phase(self, name: str) -> None:
        """Note the end of a phase of this start; see `MeasuredLoss.phases`."""
        self._ends[name] = time.time()

    def find(self, comm: Communicator) -> bool:
        """Get the newest state of the nodes' memory, for `restore`; False if there is none."""
        if self.is_again and self._folder is not None:
            self._state = newest_state(comm, self._folder)
        return self._state is not None

    def restore(self, run: Worker) -> None:
        """Take the state that was found."""
        assert self._state is not None
        assert self._folder is not None
        self._read_lines(run.comm, self._state)
        restore(run, self._state)
        state = self._state = replace(self._state, tensors={})  # Their memory can be freed.
        kept = state.about
        losses: Any = kept.get("losses", [])
        run.earlier_losses = [MeasuredLoss.from_dict(each) for each in losses]
        changes: Any = kept.get("changes", [])
        run.earlier_changes = [MeasuredLoss.from_dict(each) for each in changes]

    def _read_lines(self, comm: Communicator, state: SnapshotState) -> None:
        """Read the epoch's lines, and have samples come again that only lost weights have seen."""
        assert self._folder is not None
        loader: Any = state.about["loader"]
        lines: list[LedgerLine] = []
        folders = comm.allgather(self._folder)
        if folders.index(self._folder) == comm.rank:
            epoch, at = loader["epoch"], state.choice
            lines = lines_until(self._folder, epoch, at.turn, at.writer, at.start)
        # A node whose ranks had not started yet has none.
        everyone = comm.allgather(len(lines))
        giver = everyone.index(max(everyone))
        self._told = comm.tell(lines, giver)
        self._lines, self._without = divided(self._told, state.reached)
        if self._without:
            again = itertools.chain.from_iterable(line["samples"] for line in self._without)
            loader = {**loader, "again": [*loader.get("again", ()), *again]}
            self._state = replace(state, about={**state.about, "loader": loader})

    def snapshots(self, run: Worker, ledger: SampleLedger | None) -> Snapshots | None:
        """Return the callback that copies the state; None if no agent keeps it."""
        if self._start is None or self._folder is None:
            return None
        after = -1 if self._state is None else self._state.choice.turn
        copies = Snapshots(run, self._folder, self._start.ranks, self._start.number, after)
        copies.ledger = ledger
        copies.incidents = len(self._start.incidents)
        if after >= 0 and not after % 2:
            copies.journal.begin(run.epoch_number, after, self._told, self._without)
        return copies

    def open_ledger(self, run: Worker, path: str) -> SampleLedger:
        """Open the trace, which continues where the state was copied."""
        if self._start is None:
            return SampleLedger(path, run.comm)
        written: Any = 0 if self._state is None else self._state.about.get("trace_bytes", 0)
        ledger = SampleLedger(
            path,
            run.comm,
            numbers=self._start.ranks,
            token=self._start.token,
            written=written,
            start=self._start.number,
        )
        earlier: list[LedgerLine] = [
            line if line["rank"] in self._start.ranks else {**line, "lost": True}
            for line in self._lines
        ]
        ledger.earlier(earlier)
        return ledger

    def note_losses(self, run: Worker) -> None:
        """Add the ends of former starts to the report, when training is about to continue."""
        if self._start is None:
            return
        now, state = time.time(), self._state
        noted: Any = 0 if state is None else state.about.get("incidents", 0)
        again = 0 if state is None else max(0, state.choice.newest // 2 - run.updates)
        for incident in self._start.incidents[noted:]:
            is_last = incident.noticed == self._start.incidents[-1].noticed
            ends = self._ends if is_last else {}
            starts = (incident.noticed, *ends.values())
            met = self._ends["meet"]
            ranks = unreported_ranks(incident, run.earlier_losses)
            change = MeasuredLoss(
                ranks=tuple(rank for rank, _ in ranks),
                nodes=tuple(node for _, node in ranks),
                epoch=run.epoch_number,
                step=run.updates,
                generation=0,
                left=run.comm.size,
                seconds=max(0.0, now - incident.noticed),
                renew_s=max(0.0, met - incident.noticed),
                settle_s=max(0.0, now - met),
                kind=incident.kind,
                steps_again=again if is_last else 0,
                phases={
                    each: end - start
                    for start, (each, end) in zip(starts, ends.items(), strict=False)
                },
            )
            is_loss = incident.kind == "restart"
            (run.earlier_losses if is_loss else run.earlier_changes).append(change)
            if run.comm.rank == 0:
                print(change.sentence(), flush=True)

    def pause(self, run: Worker, copies: Snapshots) -> NoReturn:
        """Complete the copies of the state, and wait until the launcher ends this rank."""
        assert self._start is not None
        paused = time.time()
        uniform(run.comm, lambda: copies.complete(run))
        uniform(run.comm, run.comm.barrier)  # All are whole.
        if run.comm.rank == 0:
            name = os.path.join(os.environ[AGENT], f"{PAUSED}{self._start.number}")
            write_whole(name, lambda file: file.write(str(paused).encode()))
        time.sleep(_PAUSE_TIMEOUT_S)
        raise CommError(
            f"the launcher has not started other ranks within {_PAUSE_TIMEOUT_S:.0f} s after all "
            "had paused"
        )


def unreported_ranks(incident: Incident, losses: Sequence[MeasuredLoss]) -> list[tuple[int, str]]:
    """Return the ranks that an incident took, with their nodes, after the losses so far. Pure.

    Ranks of a node may be lost one by one before the others end, and each is then told of.
    """
    known: set[int] = set()
    if incident.kind != "restart":
        losses = ()
    for loss in losses:
        known = set() if loss.kind == "restart" else known | set(loss.ranks)
    return [
        each for each in zip(incident.ranks, incident.nodes, strict=True) if each[0] not in known
    ]
