"""Promises of communicators over torch.distributed beyond the contract; each rank runs this file.

Usage: python torchdist_checks.py CHECK, as torchrun starts it.
"""

import os
import sys
import threading
import time

import numpy as np
import torch.distributed as dist

from dlio.comm import Communicator
from dlio.comm.torchdist import TorchCommunicator, torch_world
from dlio.errors import CommError, CommTimeout
from dlio.testing import CommunicatorTests
from dlio.testing.promises import run_promises


def contract(comm: Communicator) -> None:
    """The promises of every communicator."""
    assert run_promises(CommunicatorTests(), comm, quiet=True) == []


def lengths(comm: Communicator) -> None:
    """A message may be empty or shorter than the receiver's memory; a longer one is refused."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for early in (False, True):
        inbox, nothing = bytearray(b"." * 9), bytearray()
        sends = [comm.isend(bytearray(b"short"), right, 1), comm.isend(nothing, right, 2)]
        if early:
            comm.wait(sends, "sends")
            comm.barrier()
        receives = [comm.irecv(inbox, left, 1), comm.irecv(nothing, left, 2)]
        comm.wait(receives + sends, "short messages")
        assert inbox == b"short....", inbox
    send = comm.isend(bytearray(b"long"), right, 3)
    try:
        comm.wait([comm.irecv(bytearray(2), left, 3), send], "a longer message")
    except CommError as error:
        assert "4 bytes came where 2" in str(error)  # noqa: PT017 - runs without pytest
    else:
        raise AssertionError("cut short in silence")


def order(comm: Communicator) -> None:
    """Many messages at once arrive in order within a tag; tags do not wait for each other."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [np.full(1 + 997 * k, k, np.uint8) for k in range(60)]
    got = [np.zeros_like(array) for array in sent]
    sends = [comm.isend(array, right, k % 3) for k, array in enumerate(sent)]
    for tag in (2, 0, 1):
        comm.wait([comm.irecv(array, left, tag) for array in got[tag::3]], "one tag")
    comm.wait(sends, "sends")
    for array, expected in zip(got, sent, strict=True):
        assert (array == expected).all()


def cancelled(comm: Communicator) -> None:
    """A receive can be cancelled; the next receive of that tag gets the next message."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    unwanted, wanted = bytearray(3), bytearray(3)
    assert comm.irecv(unwanted, left, 1).cancel()
    comm.barrier()
    comm.wait([comm.irecv(wanted, left, 1), comm.isend(bytearray(b"now"), right, 1)], "a message")
    assert bytes(unwanted) == bytes(3)
    assert bytes(wanted) == b"now"


def threads(comm: Communicator) -> None:
    """Threads with a communicator each are independent."""
    failures: list[BaseException] = []

    def work(mine: Communicator, number: int) -> None:
        right, left = (mine.rank + 1) % mine.size, (mine.rank - 1) % mine.size
        try:
            for k in range(20):
                inbox = bytearray(1 << 16)
                sent = bytearray([number * 20 + k]) * (1 << 16)
                mine.wait([mine.irecv(inbox, left, 1), mine.isend(sent, right, 1)], "a ring")
                assert inbox == sent
                array = np.full(1000, number, np.int64)
                mine.wait([mine.iallreduce(array)], "a sum")
                assert (array == number * mine.size).all()
        except BaseException as error:
            failures.append(error)

    comms = [comm.dup() for _ in range(3)]
    running = [threading.Thread(target=work, args=(c, k)) for k, c in enumerate(comms)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not failures, failures
    for one in comms:
        one.close()


def types(comm: Communicator) -> None:
    """Reductions take types that every implementation knows; broadcasts take any type."""
    try:
        comm.iallreduce(np.zeros(4, np.float16))
    except CommError as error:
        assert "float16" in str(error)  # noqa: PT017 - runs without pytest
    else:
        raise AssertionError("summed float16")
    for kind in (np.float16, np.int32, np.bool_):
        array = np.full((3, 2), comm.rank == comm.size - 1, kind)
        comm.bcast(array, root=comm.size - 1)
        assert (array == 1).all()


def deadline(comm: Communicator) -> None:
    """Collectives that a rank does not join end at DLIO_TIMEOUT."""
    if comm.rank == comm.size - 1:
        time.sleep(1.0 + float(os.environ["DLIO_TIMEOUT"]))
    else:
        start = time.monotonic()
        for call in (comm.barrier, lambda: comm.allgather(1)):
            try:
                call()
            except CommTimeout as error:
                assert "DLIO_TIMEOUT" in str(error)  # noqa: PT017 - runs without pytest
            else:
                raise AssertionError("no deadline")
        assert time.monotonic() - start < 30


def bereaved(comm: Communicator) -> None:
    """Sending to a rank that has ended fails; receiving from it ends at the deadline."""
    last = comm.size - 1
    inbox = bytearray(1)
    if comm.rank < last:
        comm.wait([comm.irecv(inbox, last, 1), comm.isend(inbox, last, 1)], "a greeting")
        try:
            for _ in range(100):
                comm.wait([comm.isend(bytearray(1 << 20), last, 2)], "a send", 1)
                time.sleep(0.01)
        except CommError as error:
            assert f"rank {last}" in str(error) or "a send" in str(error)  # noqa: PT017
        else:
            raise AssertionError("sent to nobody")
        owed = comm.irecv(inbox, last, 3)
        try:
            comm.wait([owed], "what is owed", 0.2)
        except CommTimeout as error:
            assert "what is owed" in str(error)  # noqa: PT017 - runs without pytest
        assert owed.cancel()
        return
    requests = [comm.isend(inbox, rank, 1) for rank in range(last)]
    requests += [comm.irecv(bytearray(1), rank, 1) for rank in range(last)]
    comm.wait(requests, "greetings")
    time.sleep(0.2)  # Greetings of new connections may be in transit.
    print("kept the promise", flush=True)
    os._exit(0)


def closed(comm: Communicator) -> None:
    """Closing a duplicate ends its threads, sockets and group, with receives pending too."""
    before = _held()
    for _ in range(2):
        other = comm.dup()
        other.barrier()
        left = (other.rank - 1) % other.size
        other.isend(bytearray(1 << 16), left, 1)
        other.irecv(bytearray(1), left, 2)
        other.close()
        del other
        comm.barrier()
    end = time.monotonic() + 5
    while (after := _held()) != before and time.monotonic() < end:
        time.sleep(0.05)  # torch ends its own threads later.
    assert after == before, (before, after)


def _held() -> tuple[list[str], int]:
    """Return the names of this process's threads, and the number of its sockets."""
    files = "/proc/self/fd"
    kinds = [os.readlink(f"{files}/{name}") for name in os.listdir(files) if _is_open(name)]
    names = sorted(thread.name for thread in threading.enumerate())
    return names, sum(kind.startswith("socket") for kind in kinds)


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


UNFINISHED = (deadline, bereaved)
"""Checks after which the ranks cannot communicate any more."""
CHECKS = {
    check.__name__: check
    for check in (contract, lengths, order, cancelled, threads, types, closed, *UNFINISHED)
}


def main(names: list[str]) -> None:
    dist.init_process_group("gloo")
    comm = torch_world()
    assert isinstance(comm, TorchCommunicator)
    for name in names:
        CHECKS[name](comm)
    if CHECKS[names[-1]] not in UNFINISHED:
        dist.barrier()
    comm.close()
    left = [thread.name for thread in threading.enumerate() if "dlio" in thread.name]
    assert left == [], left
    print("kept the promise", flush=True)
    if CHECKS[names[-1]] in UNFINISHED:
        os._exit(0)  # torch would wait for ranks that have ended.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
