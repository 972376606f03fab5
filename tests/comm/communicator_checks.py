"""What every Communicator does; run by one process, under mpirun and over torch.distributed."""

import sys
import threading

import numpy as np

from dlio.comm import Communicator, Op, world
from dlio.comm.nodes import find_nodes
from dlio.errors import CommTimeout, UsageError


def check(comm: Communicator) -> None:
    values = comm.allgather((comm.rank, "x" * (100 * comm.rank)))
    assert [rank for rank, _ in values] == list(range(comm.size))
    assert [len(text) for _, text in values] == [100 * rank for rank in range(comm.size)]

    for kind in (np.float32, np.float64, np.int64):
        array = np.full(1000, comm.rank + 1, kind)
        comm.wait([comm.iallreduce(array)], "sum")
        assert (array == comm.size * (comm.size + 1) // 2).all()

        extremes: tuple[tuple[Op, int], ...] = (("max", comm.size), ("min", 1))
        for op, expected in extremes:
            array = np.full(1000, comm.rank + 1, kind)
            comm.wait([comm.iallreduce(array, op)], op)
            assert (array == expected).all()
    places = np.arange(comm.size, dtype=np.float64) * (-1) ** comm.rank
    comm.wait([comm.iallreduce(places, "max")], "maxima by place")
    assert places.tolist() == list(range(comm.size))

    for root in range(comm.size):
        value = {"root": root, "text": "ü" * 300 * root, "none": None}
        assert comm.tell(value if comm.rank == root else {}, root) == value

    weights = np.full(10, comm.rank, np.float32)
    comm.bcast(weights)
    assert (weights == 0).all()

    other = comm.dup()
    if comm.size > 1:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        inbox = [bytearray(8), bytearray(8)]
        # The same tag on two communicators: messages must not meet.
        requests = [comm.irecv(inbox[0], left, 5), other.irecv(inbox[1], left, 5)]
        requests += [other.isend(bytearray(b"other..%d" % comm.rank), right, 5)]
        requests += [comm.isend(bytearray(b"mine...%d" % comm.rank), right, 5)]
        comm.wait(requests, "a ring")
        assert inbox == [b"mine...%d" % left, b"other..%d" % left]
        never = comm.irecv(bytearray(8), left, 6)
        try:
            comm.wait([never], "a message that nobody sends", 0.2)
        except CommTimeout as error:
            assert "a message that nobody sends" in str(error)  # noqa: PT017 - runs without pytest
        else:
            raise AssertionError("no deadline")
        never.cancel()
        pretended = find_nodes(comm, comm.size)
        assert pretended.node_of.tolist() == list(range(comm.size))
        assert pretended.here == comm.rank
        assert pretended.per_machine == comm.size
    assert len(find_nodes(comm).names) == 1
    try:
        find_nodes(comm, comm.size + 1)
    except UsageError:
        pass
    else:
        raise AssertionError("more nodes than ranks")
    part = comm.split(comm.rank % 2)
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.allgather(comm.rank) == members
    total = np.full(3, comm.rank, np.int64)
    part.wait([part.iallreduce(total)], "sum of a part")
    assert (total == sum(members)).all()
    part.close()
    comm.barrier()
    other.close()


def large(comm: Communicator) -> None:
    """Messages that come before they are asked for, and larger than any socket's memory."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [bytearray([comm.rank]) * ((3 << 20) + k) for k in range(4)]
    sends = [comm.isend(data, right, 7) for data in sent]
    comm.barrier()
    got = [bytearray((3 << 20) + k) for k in range(4)]
    comm.wait([comm.irecv(into, left, 7) for into in got] + sends, "large messages")
    assert got == [bytearray([left]) * ((3 << 20) + k) for k in range(4)]


if __name__ == "__main__":
    if "torch" in sys.argv:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        check(world())
        large(world())
        dist.barrier()
        dist.destroy_process_group()
        assert world().size == 1  # The old world is closed.
        left = [thread.name for thread in threading.enumerate() if "dlio" in thread.name]
        assert left == [], left
    else:
        check(world())
        if world().size > 1:
            large(world())
    print("kept the contract", flush=True)
