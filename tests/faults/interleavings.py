"""Callbacks that bring ranks to chosen places before one of them is lost; they run inside ranks."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from dlio.comm.mpi import MpiCommunicator
from dlio.comm.survival.recovery import recovery_of
from dlio.comm.survival.store_comm import StoreCommunicator
from dlio.errors import PeerLost
from dlio.exchange.buckets import Bucket
from dlio.exchange.gossip import Gossip
from dlio.exchange.local_sgd import LocalSgd
from dlio.exchange.node_gossip import _Forwarder
from dlio.train.callbacks import Callback, Run
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from tests.faults.named_weights import FOLDER, RANK

_DEADLINE_S = 60.0


def _come(place: str) -> None:
    (FOLDER / f"at-{place}-{RANK}").touch()


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"rank {RANK} has not seen {what}")
        time.sleep(0.002)


def _await_place(place: str, rank: int) -> None:
    _await((FOLDER / f"at-{place}-{rank}").exists, f"rank {rank} at {place}")


class LostAtTheEnd(Callback):
    """Rank 1 is lost when rank 2 has finished its last batch, and waits in the last round, and
    rank 0 is about to leave its last batch, knowing that all are to meet."""

    def __init__(self, step: int) -> None:
        """`step` is the number of the last batch, from 1."""
        self._step = step

    def begins(self, run: Run) -> None:
        finish = LocalSgd.finish

        def finishing(exchange: LocalSgd) -> None:
            if RANK == 2 and run.updates == self._step:
                _come("finish")
            finish(exchange)

        patched: Any = LocalSgd
        patched.finish = finishing

    def after_step(self, run: Run) -> None:
        if run.updates != self._step or RANK > 1:
            return
        _await_place("finish", 2)
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        recovery = recovery_of(run.comm)
        assert recovery is not None
        assert recovery.elastic is not None
        elastic = recovery.elastic

        def is_asked() -> bool:
            run.comm.poke()  # MPI tells of a loss only when it is called.
            return elastic.asked

        _await(is_asked, "that all are to meet")


class LostWhileCollected(Callback):
    """Rank 1 is lost when rank 0 has collected the tensors of a checkpoint, and rank 2, which has
    not, learns of it."""

    def begins(self, run: Run) -> None:
        state = Gossip.state

        def collecting(exchange: Gossip) -> dict[str, Any]:
            if (FOLDER / f"at-collected-{RANK}").exists():
                return state(exchange)
            if RANK == 0:
                tensors = state(exchange)
                _come("collected")
                return tensors
            _await_place("collected", 0)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _come("collected")
            recovery = recovery_of(run.comm)
            assert recovery is not None
            try:
                run.comm.barrier()
            except PeerLost:
                recovery.recover()
            return state(exchange)

        patched: Any = Gossip
        patched.state = collecting


class LostWhileForwarded(Callback):
    """Rank 2, alone on its node, is lost when all of its weights have come to rank 0, which has not
    forwarded the last of them to its own node."""

    def __init__(self, step: int) -> None:
        """`step` is the number of the step whose weights these are, from 1."""
        self._step, self._has_come = step, False

    def begins(self, run: Run) -> None:
        forward = _Forwarder.__call__

        def forwarding(forwarder: _Forwarder, number: int, bucket: Bucket) -> None:
            if number == 0 and run.updates == self._step and not self._has_come:
                self._has_come = True
                _come("forwarding")
                run.comm.barrier()  # It ends by PeerLost.
            forward(forwarder, number, bucket)

        patched: Any = _Forwarder
        patched.__call__ = forwarding

    def after_step(self, run: Run) -> None:
        if RANK == 2 and run.updates == self._step:
            _await_place("forwarding", 0)
            os.kill(os.getpid(), signal.SIGKILL)


_HURTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends": lambda: os._exit(0),
}


class LostAtCall(Callback):
    """A rank is hurt at the n-th call of one kind after it has finished some steps: in a sum, while
    others meet one that joins, or in the writing of a checkpoint."""

    def __init__(self, rank: int, step: int, number: int, kind: str, how: str) -> None:
        """`kind` is `message` or `checkpoint`, `how` one of `_HURTS`."""
        self._rank, self._step, self._left = rank, step, number
        self._kind, self._how = kind, how

    def begins(self, run: Run) -> None:
        if self._rank != RANK:
            return
        places: list[tuple[Any, str]] = [(Checkpoints, "_write")]
        if self._kind == "message":
            kinds = (MpiCommunicator, StoreCommunicator)
            places = [(each, name) for each in kinds for name in ("isend", "irecv", "iallreduce")]
        for owner, name in places:
            setattr(owner, name, self._counted(run, getattr(owner, name)))

    def _counted(self, run: Run, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: Any, **named: Any) -> object:
            if run.updates >= self._step:
                self._left -= 1
                if self._left == 0:
                    _come("hurt")
                    _HURTS[self._how]()
            return call(*arguments, **named)

        return counted
