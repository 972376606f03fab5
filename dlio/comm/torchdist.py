"""A communicator over torch.distributed, for ranks without MPI (`torchrun`).

Collectives use gloo with the group's store, under key names of their own: they never mix with the
user's collectives, whichever groups the user creates or destroys. Messages go through
`dlio.comm.torch_mail`.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dlio.comm.comm_protocol import Array, Buffer, Communicator, Op, Request
from dlio.comm.common_store import serve_store
from dlio.comm.communicator_base import CommunicatorBase, check_memory
from dlio.comm.deadlines import default_timeout_s
from dlio.comm.gloo import allgather_json, bytes_of, sum_options
from dlio.comm.net.address import meeting_address
from dlio.comm.net.gloo_gate import GlooGate
from dlio.comm.single import SingleCommunicator
from dlio.comm.torch_mail import Mail
from dlio.errors import CommError, CommTimeout
from dlio.util.limits import OPEN_FILES, lacks_files

_T = TypeVar("_T")
_Gloo: Final[Any] = dist.ProcessGroupGloo


def torch_world(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return a communicator of the ranks of a process group, or the default one. Collective over
    them.
    """
    if dist.get_world_size(group) == 1:
        return SingleCommunicator()
    whole: Any = group if group is not None else dist.group.WORLD
    store, rank = whole.get_group_store(), dist.get_rank(group)
    # All ranks call this equally often, so that the count is a name on which they agree.
    name = f"dlio/{store.add(f'dlio/calls/{rank}', 1)}"
    return TorchCommunicator(store, name, rank, dist.get_world_size(group))


@cache
def environment_world() -> Communicator:
    """The communicator of the ranks that torch's variables describe (`torchrun`). Collective.

    Uses the store that they name, and leaves torch's default group alone.

    Raises CommError if the ranks do not meet.
    """
    timeout_s = default_timeout_s()
    try:
        server = _served(timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        del server
    except (OSError, RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CommError(
            f"the ranks of torchrun do not meet at {place} (MASTER_ADDR, MASTER_PORT): is that "
            f"address rank 0's, and its port free? ({str(error).splitlines()[0]})"
        ) from error
    return TorchCommunicator(store, "dlio/environment", rank, size)


def _served(timeout_s: float) -> Store | None:
    """Serve torch's store on rank 0, at the address that the others are told and no other.

    torch would listen at all interfaces. Groups that a script makes use the same store.
    """
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        address = socket.gethostbyname(host)
        if address.startswith("127.") and host not in (address, "localhost"):
            return None  # Debian's /etc/hosts: this node's name is another address to other nodes.
        listener = socket.create_server((address, port))
    except OSError:
        return None  # The others reach it by an address that is not its own, or torch says why not.
    with listener:
        return serve_store(listener, host, timeout_s, multi_tenant=True)


class _GlooReduction:
    """A reduction of gloo; within `errors`, its errors become CommTimeout."""

    def __init__(
        self, work: dist.Work, errors: Callable[[str], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._work = work
        self._errors = errors

    def done(self) -> bool:
        # Asked first: `wait` blocks, and the caller may have other requests to move.
        if not self._work.is_completed():
            return False
        with self._errors("reduction"):
            self._work.wait()
        return True

    def cancel(self) -> bool:
        return self.done()


class TorchCommunicator(CommunicatorBase):
    """Ranks of torch.distributed. Owns its group, sockets and thread.

    `name` is the prefix of its keys in the store that all ranks share, the same on all ranks, used
    once. It listens at `address`; without one it finds it with the others.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, address: str | None = None
    ) -> None:
        super().__init__()
        self._store: Store | None = store
        self._name = name
        self._duplicates = 0
        self.rank = rank
        self.size = size
        limit = timedelta(seconds=self._timeout_s)
        with self._errors("meeting the other ranks"):
            self._address = address or meeting_address(
                lambda place: _gathered(PrefixStore(f"{name}/place", store), rank, size, place)
            )
            # A group of its own in place of `new_group`: torch gives these names that depend on
            # which groups the user has made.
            options = _Gloo._Options()
            gate = GlooGate(self._address)
            options._devices = [gate.device]
            options._timeout = limit
            with gate.opened():
                self._group: Any = _Gloo(PrefixStore(name, store), rank, size, options)
        # gloo reports the arrival of a message only to a caller that blocks for it: messages go
        # over connections of our own.
        self._mail = Mail(self.rank, self.allgather, self._address)

    def allgather(self, value: _T) -> list[_T]:
        with self._errors("allgather"):
            return allgather_json(
                value, self.size, lambda into, mine: self._group.allgather(into, mine).wait()
            )

    def barrier(self) -> None:
        with self._errors("barrier"):
            self._group.barrier().wait()

    def bcast(self, array: Array, root: int = 0) -> None:
        check_memory(array)
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        with self._errors("broadcast"):
            self._group.broadcast(flat, root).wait()

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return self._mail.send(bytes_of(data), self._peer(dest), tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return self._mail.receive(bytes_of(into), self._peer(source), tag)

    def _reduction(self, array: Array, op: Op) -> Request:
        options = sum_options(op)
        with self._errors("reduction"):
            work = self._group.allreduce([torch.from_numpy(array)], options)
        return _GlooReduction(work, self._errors)

    def dup(self) -> "TorchCommunicator":
        self._duplicates += 1
        name = f"{self._name}/{self._duplicates}"
        return TorchCommunicator(self._open_store(), name, self.rank, self.size, self._address)

    def split(self, group: int) -> Communicator:
        self._duplicates += 1
        members = [k for k, theirs in enumerate(self.allgather(group)) if theirs == group]
        if len(members) == 1:
            return SingleCommunicator()
        name = f"{self._name}/{self._duplicates}.{group}"
        mine = members.index(self.rank)
        return TorchCommunicator(self._open_store(), name, mine, len(members), self._address)

    def close(self) -> None:
        self._mail.close()
        self._group = self._store = None

    def _open_store(self) -> Store:
        if self._store is None:
            raise CommError(f"the communicator {self._name} is closed")
        return self._store

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise CommError(f"no rank {rank} among {self.size}")
        return rank

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn gloo's errors into CommTimeout, and CommError where this process is the cause."""
        try:
            yield
        except RuntimeError as error:
            if lacks_files(error):
                raise CommError(
                    f"{what} failed: this process may open no more: {OPEN_FILES}"
                ) from error
            raise CommTimeout(
                f"rank {self.rank} of {self.size}: {what} failed: another rank is stopped, far "
                f"behind, or left the run (DLIO_TIMEOUT sets the deadline): {error}"
            ) from error


def _gathered(store: Store, rank: int, size: int, value: str) -> list[str]:
    """Return every rank's value, by a store that no other call uses. Collective."""
    store.set(str(rank), value)
    return [bytes(store.get(str(each))).decode() for each in range(size)]
