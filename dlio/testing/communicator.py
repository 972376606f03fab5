"""The promises of `dlio.comm.Communicator`, each as a test that every rank runs.

    mpirun -n 3 python -m dlio.testing.communicator
    torchrun --nproc-per-node 3 -m dlio.testing.communicator
    mpirun -n 3 python -m dlio.testing.communicator my_package.comm:make

check the world's communicator, or the one that `make()` returns, and end with exit code 1 after a
broken promise. In pytest, subclass `CommunicatorTests`; `run_ranks` runs a test on ranks that are
threads.
"""

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Final

import numpy as np
import pytest

from dlio.comm import Communicator, world
from dlio.comm.comm_protocol import Buffer
from dlio.errors import CommError, CommTimeout
from dlio.testing.promises import run_promises

_DEADLINE_S: Final = 30.0
_LATE_S: Final = 0.2
_TYPES: Final = (np.float32, np.float64, np.int64)


class CommunicatorTests:
    """Tests that a communicator keeps its contract; all ranks run them in the same order."""

    def make(self) -> Communicator:
        """The communicator to check; the suite does not close it."""
        return world()

    @pytest.fixture
    def comm(self) -> Communicator:
        """This rank's communicator."""
        return self.make()

    def test_ranks_are_numbered_from_zero(self, comm: Communicator) -> None:
        assert 0 <= comm.rank < comm.size
        assert comm.allgather(comm.rank) == list(range(comm.size))

    # Values and arrays for all.

    def test_allgather_returns_every_ranks_value(self, comm: Communicator) -> None:
        values = comm.allgather({"rank": comm.rank, "text": "é" * (100 * comm.rank)})
        wanted = [{"rank": rank, "text": "é" * (100 * rank)} for rank in range(comm.size)]
        assert values == wanted

    def test_values_travel_as_json(self, comm: Communicator) -> None:
        value: dict[str, object] = {
            "none": None,
            "list": [1, 2.5, "three", True],
            "nested": {"a": {"b": []}},
        }
        assert comm.allgather(value) == [value] * comm.size

    def test_tell_returns_the_roots_value(self, comm: Communicator) -> None:
        for root in range(comm.size):
            assert comm.tell({"rank": comm.rank}, root) == {"rank": root}
        assert comm.tell(comm.rank) == 0

    def test_bcast_overwrites_with_the_roots_array(self, comm: Communicator) -> None:
        for root in range(comm.size):
            array = np.full((3, 2), comm.rank + 1, np.float32)
            comm.bcast(array, root)
            assert (array == root + 1).all()

    def test_arrays_of_any_type_are_broadcast(self, comm: Communicator) -> None:
        root = comm.size - 1
        for kind in (np.float16, np.int32, np.bool_, np.uint8, np.float64):
            array = np.full((3, 2), comm.rank == root, kind)
            comm.bcast(array, root)
            assert (array == 1).all()

    def test_a_barrier_waits_for_every_rank(self, comm: Communicator) -> None:
        needs_partners(comm)
        comm.barrier()
        if comm.rank == 0:
            time.sleep(_LATE_S)
        entered = time.monotonic()
        comm.barrier()
        left = time.monotonic()
        times = comm.allgather((socket.gethostname(), entered))
        # Clocks of one machine agree.
        last = max(at for host, at in times if host == socket.gethostname())
        assert left >= last, "a rank left the barrier before another one entered"

    # Messages.

    def test_messages_find_their_rank_and_tag(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        sends = [
            comm.isend(bytearray(b"%d to %d" % (comm.rank, tag)), right, tag) for tag in (1, 2)
        ]
        boxes = [bytearray(6), bytearray(6)]
        receives = [comm.irecv(boxes[0], left, 2), comm.irecv(boxes[1], left, 1)]
        comm.wait(receives + sends, "messages of two tags")
        assert boxes == [b"%d to 2" % left, b"%d to 1" % left]

    def test_messages_of_one_tag_arrive_in_order(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        sent = [np.full(1 + 97 * k, k, np.uint8) for k in range(40)]
        boxes = [np.zeros_like(array) for array in sent]
        sends = [comm.isend(array, right, 3) for array in sent]
        comm.wait([comm.irecv(box, left, 3) for box in boxes], "many messages")
        comm.wait(sends, "sends")
        assert [int(box[0]) for box in boxes] == list(range(40))
        assert all((box == box[0]).all() for box in boxes)

    def test_a_message_may_be_shorter_than_its_buffer(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        box, nothing = bytearray(b"." * 9), bytearray()
        requests = [comm.irecv(box, left, 4), comm.irecv(nothing, left, 5)]
        requests += [comm.isend(bytearray(b"short"), right, 4), comm.isend(nothing, right, 5)]
        comm.wait(requests, "a short and an empty message")
        assert box == b"short...."

    def test_buffers_of_every_kind_carry_messages(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        data = bytearray(b"\7" * 8)
        array = np.zeros(8, np.uint8)
        pairs: list[tuple[Buffer, Buffer]] = [
            (np.frombuffer(data, np.uint8), bytearray(8)),
            (data, memoryview(bytearray(8))),
            (memoryview(data), array),
        ]
        for sent, box in pairs:
            comm.wait([comm.irecv(box, left, 6), comm.isend(sent, right, 6)], "a message")
            assert bytes(box) == data

    def test_large_messages_may_come_before_they_are_asked_for(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        sizes = [(3 << 20) + k for k in range(4)]
        sends = [comm.isend(bytearray([comm.rank + 1]) * size, right, 7) for size in sizes]
        comm.barrier()
        boxes = [bytearray(size) for size in sizes]
        comm.wait([comm.irecv(box, left, 7) for box in boxes] + sends, "large messages")
        # Not the lists themselves: a failed assert of pytest would compare 12 MiB, byte by byte.
        intact = [
            box == bytearray([left + 1]) * size for box, size in zip(boxes, sizes, strict=True)
        ]
        assert all(intact)

    def test_done_completes_a_message_without_wait(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        box = bytearray(4)
        requests = [comm.irecv(box, left, 8), comm.isend(bytearray(b"done"), right, 8)]
        end = time.monotonic() + _DEADLINE_S
        left_over = list(requests)
        while left_over and time.monotonic() < end:
            left_over = [request for request in left_over if not request.done()]
            time.sleep(0.001)
        assert left_over == []
        assert box == b"done"

    def test_a_wait_has_a_deadline_and_names_what_it_awaits(self, comm: Communicator) -> None:
        _, left = _neighbours(comm)
        never = comm.irecv(bytearray(8), left, 9)
        with pytest.raises(CommTimeout) as caught:
            comm.wait([never], "a message that nobody sends", 0.2)
        never.cancel()
        assert "a message that nobody sends" in str(caught.value)
        comm.barrier()

    def test_a_receive_can_be_given_up(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        unwanted, wanted = bytearray(3), bytearray(3)
        assert comm.irecv(unwanted, left, 10).cancel()
        comm.barrier()
        comm.wait([comm.irecv(wanted, left, 10), comm.isend(bytearray(b"now"), right, 10)], "one")
        assert (bytes(unwanted), bytes(wanted)) == (bytes(3), b"now")

    def test_a_single_rank_has_no_partner(self, comm: Communicator) -> None:
        if comm.size > 1:
            pytest.skip("there are other ranks")
        with pytest.raises(CommError):
            comm.isend(bytearray(1), 1, 0)
        with pytest.raises(CommError):
            comm.irecv(bytearray(1), 1, 0)

    # Reductions.

    def test_reductions_sum_in_place(self, comm: Communicator) -> None:
        for kind in _TYPES:
            array = np.full(1000, comm.rank + 1, kind)
            comm.wait([comm.iallreduce(array)], "a sum")
            assert (array == comm.size * (comm.size + 1) // 2).all()

    def test_reductions_take_the_largest_and_the_least(self, comm: Communicator) -> None:
        for kind in _TYPES:
            largest = np.array([comm.rank, -comm.rank], kind)
            least = largest.copy()
            comm.wait([comm.iallreduce(largest, "max")], "a maximum")
            comm.wait([comm.iallreduce(least, "min")], "a minimum")
            assert largest.tolist() == [comm.size - 1, 0]
            assert least.tolist() == [0, 1 - comm.size]

    def test_the_largest_and_the_least_keep_a_nan_of_any_rank(self, comm: Communicator) -> None:
        for kind in (np.float32, np.float64):
            for op in ("max", "min"):
                values = np.full((comm.size + 2, 2), comm.rank, kind)
                values[comm.rank] = np.nan, -np.nan
                values[-2:] = [[np.inf, -np.inf], [-0.5 - comm.rank, 0.5 + comm.rank]]
                comm.wait([comm.iallreduce(values, op)], "a reduction with NaN")
                assert np.isnan(values[:-2]).all()
                ends = [-0.5, comm.size - 0.5] if op == "max" else [0.5 - comm.size, 0.5]
                assert values[-2:].tolist() == [[np.inf, -np.inf], ends]

    def test_memory_in_another_order_is_refused(self, comm: Communicator) -> None:
        whole = np.zeros((4, 6), np.float32)
        fixed = whole.copy()
        fixed.flags.writeable = False
        for array in (whole.T, whole[:, ::2], np.asfortranarray(whole), fixed):
            for call in (comm.bcast, comm.iallreduce):
                with pytest.raises(CommError) as caught:
                    call(array)
                assert "give a contiguous copy" in str(caught.value)

    def test_several_reductions_are_under_way_at_once(self, comm: Communicator) -> None:
        arrays = [np.full(50_000, (comm.rank + 1) * (k + 1), np.float32) for k in range(5)]
        requests = [comm.iallreduce(array) for array in arrays]
        comm.wait(requests[::-1], "five sums")
        ranks = comm.size * (comm.size + 1) // 2
        assert [array[0] for array in arrays] == [ranks * (k + 1) for k in range(5)]

    def test_types_that_it_cannot_reduce_are_refused(self, comm: Communicator) -> None:
        with pytest.raises(CommError) as caught:
            comm.iallreduce(np.zeros(4, np.float16))
        assert "float16" in str(caught.value)

    # Communicators made of it.

    def test_messages_of_a_duplicate_never_mix(self, comm: Communicator) -> None:
        right, left = _neighbours(comm)
        other = comm.dup()
        boxes = [bytearray(5), bytearray(5)]
        requests = [comm.irecv(boxes[0], left, 11), other.irecv(boxes[1], left, 11)]
        requests += [other.isend(bytearray(b"other"), right, 11)]
        requests += [comm.isend(bytearray(b"first"), right, 11)]
        comm.wait(requests, "messages on two communicators")
        other.close()
        assert boxes == [b"first", b"other"]

    def test_a_split_holds_the_ranks_of_one_number(self, comm: Communicator) -> None:
        part = comm.split(comm.rank % 2)
        members = list(range(comm.rank % 2, comm.size, 2))
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        assert part.allgather(comm.rank) == members
        total = np.full(3, comm.rank, np.int64)
        part.wait([part.iallreduce(total)], "the sum of a part")
        assert total.tolist() == [sum(members)] * 3
        part.close()

    def test_it_outlives_its_duplicates(self, comm: Communicator) -> None:
        other = comm.dup()
        other.barrier()
        other.close()
        try:
            everyone = comm.allgather(comm.rank)
        except CommError as error:
            raise AssertionError(f"closing a duplicate closed the communicator: {error}") from error
        assert everyone == list(range(comm.size))

    def test_threads_with_a_duplicate_each_work_at_once(self, comm: Communicator) -> None:
        comms = [comm.dup() for _ in range(3)]
        failures: list[BaseException] = []

        def work(mine: Communicator, number: int) -> None:
            try:
                for k in range(10):
                    array = np.full(1000, number + k, np.int64)
                    mine.wait([mine.iallreduce(array)], "a sum")
                    assert (array == (number + k) * mine.size).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(c, k)) for k, c in enumerate(comms)]
        for thread in threads:
            thread.start()
        # A library that one thread only may call is served by this one, when it calls.
        mine = comm.iallreduce(np.zeros(1, np.int64))
        end = time.monotonic() + _DEADLINE_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            mine.done()
            time.sleep(0.001)
        comm.wait([mine], "a sum")
        for thread in threads:
            thread.join(_DEADLINE_S)
        for each in comms:
            each.close()
        assert not failures, failures

    def test_a_sum_keeps_its_memory_until_it_is_done(self, comm: Communicator) -> None:
        array = np.ones(1000)
        memory = weakref.ref(array)
        if comm.rank:
            time.sleep(0.1)
        request = comm.iallreduce(array)
        del array
        assert request.done() or memory() is not None
        comm.wait([request], "a sum")

    def test_poke_returns_true_or_false(self, comm: Communicator) -> None:
        assert comm.poke() in (True, False)


def needs_partners(comm: Communicator) -> None:
    """Skip a test that one rank alone cannot run."""
    if comm.size == 1:
        pytest.skip("one rank has no partner: run it under mpirun or torchrun")


def _neighbours(comm: Communicator) -> tuple[int, int]:
    """The next and the previous rank in a ring."""
    needs_partners(comm)
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def start_torch() -> None:
    """Initialise torch.distributed where torchrun has started this process."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")


def stop_torch() -> None:
    """Take torch.distributed down again."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        world()  # The old world is closed.


def check_rank(suite: object, comm: Communicator, kept: str) -> None:
    """Run a suite on this rank, and say `kept`; end the process after a broken promise."""
    if run_promises(suite, comm, quiet=comm.rank > 0):
        os._exit(1)  # The other ranks are somewhere else: no one would answer a farewell.
    print(f"rank {comm.rank} of {comm.size}: {kept}", flush=True)


def main(arguments: list[str]) -> None:
    """Check this rank's communicator; end the process with code 1 after a broken promise."""
    start_torch()
    suite = CommunicatorTests()
    if arguments:
        made: Callable[[], Communicator] = resolve_name(arguments[0])
        comm = made()
    else:
        comm = suite.make()
    check_rank(suite, comm, "every promise is kept")
    stop_torch()


if __name__ == "__main__":
    main(sys.argv[1:])
