"""Ranks that join a run get its state from one of the others, and are then where these are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator
from dlio.comm.survival.membership import messages_of
from dlio.comm.survival.recovery import MeasuredLoss, Recovery, RecoveryPart
from dlio.comm.survival.reports import Report
from dlio.train.checkpoint.state import OWED, about, part_of, restore, tensors_of
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
        tensors = {name: value.detach().cpu() for name, value in tensors_of(self._run).items()}
        flat = {name: _bytes_of(value) for name, value in tensors.items()}
        head = {
            "tensors": [
                [name, str(value.dtype).removeprefix("torch."), list(value.shape), len(flat[name])]
                for name, value in tensors.items()
            ],
            "about": about(self._run),
            "place": self._run.tell_place(),
            "ledger": None if self._ledger is None else self._ledger.written,
            "number": self._recovery.number,
            "last_counted": list(self._recovery.last_counted.items()),
            "losses": [asdict(loss) for loss in self._recovery.losses],
            "changes": [asdict(change) for change in self._recovery.changes],
        }
        text = np.frombuffer(json.dumps(head).encode(), np.uint8)
        whole = np.concatenate([np.empty(0, np.uint8), *flat.values()])
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
        head = json.loads(text.tobytes())
        tensors: dict[str, torch.Tensor] = {}
        begin = 0
        for name, kind, shape, size in head["tensors"]:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, kind))
            into = tensors[name].view(-1).view(torch.uint8).numpy()
            into[:] = whole[begin : begin + size]
            begin += size
        self._follow(head, tensors, giver)

    def _follow(
        self, head: dict[str, Any], tensors: Mapping[str, torch.Tensor], giver: int
    ) -> None:
        run, recovery = self._run, self._recovery
        restore(run, _PeerState(giver, head["about"], tensors))
        exchanged = part_of(tensors, f"rank{giver}/exchange/")
        run.exchange.load_state(
            {name: each for name, each in exchanged.items() if OWED not in name}
        )
        run.follow_place(head["place"])
        if self._ledger is not None:
            self._ledger.written = head["ledger"]
        recovery.number = head["number"]
        recovery.last_counted.update(dict(head["last_counted"]))
        recovery.losses[:] = [MeasuredLoss.from_dict(each) for each in head["losses"]]
        recovery.changes[:] = [MeasuredLoss.from_dict(each) for each in head["changes"]]


class _PeerState:
    """The state of one rank, in memory."""

    path = "the state of another rank"
    ranks = 1
    is_of_one_step = True

    def __init__(
        self, giver: int, about: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._giver, self.about, self._tensors = giver, about, tensors

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with `prefix`, without it."""
        return part_of(self._tensors, prefix.replace("rank0/", f"rank{self._giver}/", 1))


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    whole: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return whole
