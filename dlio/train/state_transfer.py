"""Ranks that join a run get its state from one of the others, and are then where these are."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.survival.membership import messages_of
from dlio.comm.survival.recovery import MeasuredLoss, Recovery, RecoveryPart
from dlio.comm.survival.reports import Report
from dlio.train.checkpoint.state import (
    OWED,
    SavedState,
    about,
    copy_to,
    places_of,
    restore,
    tensors_at,
    tensors_of,
)
from dlio.train.sample_ledger import SampleLedger
from dlio.train.worker import Worker

_TAG: Final = 7001


class StateTransfer(RecoveryPart[Report]):
    """The part of a recovery that passes the state of a run to ranks that join it.

    Each of these gets all of it from one of the ranks that have it; several of them at a time if
    several join.
    """

    def __init__(self, run: Worker, recovery: Recovery, ledger: SampleLedger | None) -> None:
        self._run, self._recovery, self._ledger = run, recovery, ledger
        recovery.register(self)

    def close(self) -> None:
        """Take no part in later recoveries."""
        self._recovery.unregister(self)

    def report(self) -> Report:
        return Report()

    def reconcile(self, reports: Sequence[Report], comm: Communicator) -> None:
        newcomers = self._recovery.newcomers
        givers = [rank for rank in range(comm.size) if rank not in newcomers]
        pairs = [(givers[k % len(givers)], rank) for k, rank in enumerate(newcomers)]
        for giver, rank in pairs:
            if comm.rank == giver:
                self._give(comm, rank)
            elif comm.rank == rank:
                self._take(comm, giver)

    def _give(self, comm: Communicator, rank: int) -> None:
        tensors = tensors_of(self._run)
        places, size = places_of(tensors)
        hearing = self._run.exchange.peer_steps
        head = {
            "tensors": places,
            "about": about(self._run),
            "place": self._run.tell_place(),
            "ledger": None if self._ledger is None else self._ledger.tell_place(),
            "number": self._recovery.number,
            "heard": None if hearing is None else hearing.carried(self._run.assigner.made).tolist(),
            "begun": 0 if hearing is None else hearing.begun,
            "last_counted": list(self._recovery.last_counted.items()),
            "losses": [asdict(loss) for loss in self._recovery.losses],
            "changes": [asdict(change) for change in self._recovery.changes],
        }
        text = np.frombuffer(json.dumps(head).encode(), np.uint8)
        whole = np.empty(size, np.uint8)
        copy_to(whole, places, tensors)
        lengths = np.array([len(text), len(whole)], np.int64)
        to = messages_of(comm)
        parts = [lengths.view(np.uint8), text, whole]
        comm.wait([to.isend(part, rank, _TAG) for part in parts], f"rank {rank} to take the state")

    def _take(self, comm: Communicator, giver: int) -> None:
        source, what = messages_of(comm), f"the state from rank {giver}"
        lengths = np.empty(2, np.int64)
        comm.wait([source.irecv(lengths.view(np.uint8), giver, _TAG)], what)
        text, whole = (np.empty(int(length), np.uint8) for length in lengths)
        comm.wait([source.irecv(text, giver, _TAG), source.irecv(whole, giver, _TAG)], what)
        self._follow(json.loads(text.tobytes()), whole, giver)

    def _follow(self, head: dict[str, Any], whole: npt.NDArray[np.uint8], giver: int) -> None:
        run, recovery = self._run, self._recovery
        mine = f"rank{giver}/"
        tensors = {
            f"rank0/{name.removeprefix(mine)}" if name.startswith(mine) else name: tensor
            for name, tensor in tensors_at(head["tensors"], whole).items()
        }
        state = SavedState("the state of another rank", 1, head["about"], tensors=tensors)
        restore(run, state)
        exchanged = state.read("rank0/exchange/")
        run.exchange.load_state(
            {name: each for name, each in exchanged.items() if OWED not in name}
        )
        run.exchange.join()
        if run.exchange.peer_steps is not None:
            # A newcomer counts steps as the others do, not from those that it has not made.
            run.exchange.peer_steps.begun = head["begun"]
            run.exchange.peer_steps.take_in(head["heard"])
        run.follow_place(head["place"])
        if self._ledger is not None:
            self._ledger.follow_place(head["ledger"])
        recovery.number = head["number"]
        recovery.last_counted.update(dict(head["last_counted"]))
        recovery.losses[:] = [MeasuredLoss.from_dict(each) for each in head["losses"]]
        recovery.changes[:] = [MeasuredLoss.from_dict(each) for each in head["changes"]]
