"""Ranks that are threads keep the contract of communicators, and the suite catches each fault."""

import json
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from dlio.comm import Communicator
from dlio.comm.comm_protocol import Array, Buffer, Op, Request
from dlio.comm.single import SingleCommunicator
from dlio.errors import CommTimeout
from dlio.testing import CommunicatorTests, ThreadCommunicator, promises_of, run_ranks
from tests.testing.faults import Fault, assert_caught, assert_complete

T = TypeVar("T")
Body = Callable[[Communicator], None]
RANKS = 3


@pytest.mark.parametrize("ranks", [1, 2, RANKS])
@pytest.mark.parametrize("promise", promises_of(CommunicatorTests))
def test_threads_keep(promise: str, ranks: int) -> None:
    run_ranks(ranks, getattr(CommunicatorTests(), promise))


class _Done:
    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


class _DoneLater(_Done):
    """Done when it is asked for the second time."""

    def __init__(self) -> None:
        self._asked = False

    def done(self) -> bool:
        before, self._asked = self._asked, True
        return before


class _CountsFromOne(ThreadCommunicator):
    def allgather(self, value: T) -> list[T]:
        values = super().allgather(value)
        return values[1:] + values[:1]


class _CutsValuesShort(ThreadCommunicator):
    def allgather(self, value: T) -> list[T]:
        values: list[T] = json.loads(json.dumps(super().allgather(value))[:300] + '"}]')
        return values


class _TakesNothingForMissing(ThreadCommunicator):
    def allgather(self, value: T) -> list[T]:
        if isinstance(value, dict):
            value = type(value)((k, v) for k, v in value.items() if v is not None)
        return super().allgather(value)


class _KeepsNothing(ThreadCommunicator):
    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        self.wait([super().iallreduce(array, op)], "a sum")
        return _DoneLater()


class _TellsTheFirst(ThreadCommunicator):
    def tell(self, value: T, root: int = 0) -> T:
        return super().tell(value, 0)


class _BroadcastsTheFirst(ThreadCommunicator):
    def bcast(self, array: Array, root: int = 0) -> None:
        super().bcast(array, 0)


class _BroadcastsWords(ThreadCommunicator):
    def bcast(self, array: Array, root: int = 0) -> None:
        if array.dtype.itemsize > 1:
            super().bcast(array, root)


class _PassesBarriers(ThreadCommunicator):
    def barrier(self) -> None:
        pass


class _IgnoresTags(ThreadCommunicator):
    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return super().isend(data, dest, 0)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return super().irecv(into, source, 0)


class _LastComesFirst(ThreadCommunicator):
    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        super().wait(requests, what, timeout_s)
        if what == "many messages":
            for each in requests:
                each._into[:] = bytes(len(each._into))  # type: ignore[attr-defined]


class _FillsBuffers(ThreadCommunicator):
    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return super().isend(
            bytearray(bytes(data).ljust(9, b"!")) if len(data) else data, dest, tag
        )


class _KnowsByteArraysOnly(ThreadCommunicator):
    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        own = into if isinstance(into, bytearray) else bytearray(len(into))
        return super().irecv(own, source, tag)


class _SmallMessagesOnly(ThreadCommunicator):
    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return super().isend(bytearray(data)[: 1 << 16], dest, tag)


class _OnlyWaitCompletes(ThreadCommunicator):
    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        class Lazy(_Done):
            def done(self) -> bool:
                return True

        super().irecv(bytearray(len(into)), source, tag)
        return Lazy()


class _NamelessTimeout(ThreadCommunicator):
    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        try:
            super().wait(requests, what, timeout_s)
        except CommTimeout as error:
            raise CommTimeout("a deadline has passed") from error


class _WaitsForNothing(ThreadCommunicator):
    def wait(self, requests: Sequence[Request], what: str, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            super().wait(requests, what, timeout_s)


class _NeverCancels(ThreadCommunicator):
    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        request = super().irecv(into, source, tag)
        request.cancel = lambda: False  # type: ignore[method-assign]
        return request


class _TalksToItself(SingleCommunicator):
    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        return _Done()


class _SumsTwice(ThreadCommunicator):
    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        np.multiply(array, 2, out=array, casting="unsafe")
        return super().iallreduce(array, op)


class _AlwaysSums(ThreadCommunicator):
    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        return super().iallreduce(array)


class _OneReductionAtATime(ThreadCommunicator):
    def __init__(self, *place: object) -> None:
        super().__init__(*place)  # type: ignore[arg-type]
        self.started = 0

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        self.started += 1
        if self.started > 1:
            return _Done()
        return super().iallreduce(array, op)


class _SumsAnything(ThreadCommunicator):
    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        if array.dtype == np.float16:
            return _Done()
        return super().iallreduce(array, op)


class _DuplicatesAreItself(ThreadCommunicator):
    def dup(self) -> ThreadCommunicator:
        return self

    def close(self) -> None:
        pass


class _SplitsNothing(ThreadCommunicator):
    def split(self, group: int) -> ThreadCommunicator:
        return super().split(0)


class _ClosesAll(ThreadCommunicator):
    def dup(self) -> ThreadCommunicator:
        other = super().dup()
        other.close = self.close  # type: ignore[method-assign]
        return other


class _SharedArray(ThreadCommunicator):
    """The array of a reduction is kept for all threads of a rank in one place."""

    place: ClassVar[dict[int, Array]] = {}

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        if len(array) == 1:
            return super().iallreduce(array, op)
        _SharedArray.place[self.rank] = array
        time.sleep(0.002)
        np.copyto(array, _SharedArray.place[self.rank])
        return super().iallreduce(array, op)


class _ComparesWithLess(ThreadCommunicator):
    """MPI and gloo do: a NaN is lost, unless it is rank 0's."""

    def iallreduce(self, array: Array, op: Op = "sum") -> Request:
        if op != "sum" and array.dtype.kind == "f":
            np.nan_to_num(array, copy=False, nan=0, posinf=np.inf, neginf=-np.inf)
        return super().iallreduce(array, op)


class _TakesAnyMemory(ThreadCommunicator):
    def bcast(self, array: Array, root: int = 0) -> None:
        super().bcast(np.array(array), root)


class _PokeCountsMessages(ThreadCommunicator):
    def poke(self) -> bool:
        return 7  # type: ignore[return-value]


def _on_ranks(kind: type[ThreadCommunicator]) -> Callable[[], object]:
    """A suite each of whose tests runs on three ranks of a broken kind."""

    class Broken(CommunicatorTests):
        def __getattribute__(self, name: str) -> object:
            test = super().__getattribute__(name)
            if not name.startswith("test_"):
                return test
            return lambda: run_ranks(RANKS, test, kind=kind, timeout_s=20)

    Broken.__name__ = kind.__name__
    return Broken


class _OneBrokenRank(CommunicatorTests):
    def test_a_single_rank_has_no_partner(self, comm: Communicator | None = None) -> None:
        super().test_a_single_rank_has_no_partner(_TalksToItself())


FAULTS = [
    Fault("test_ranks_are_numbered_from_zero", _on_ranks(_CountsFromOne)),
    Fault("test_allgather_returns_every_ranks_value", _on_ranks(_CountsFromOne)),
    Fault("test_values_travel_as_json", _on_ranks(_TakesNothingForMissing)),
    Fault("test_tell_returns_the_roots_value", _on_ranks(_TellsTheFirst)),
    Fault("test_bcast_overwrites_with_the_roots_array", _on_ranks(_BroadcastsTheFirst)),
    Fault("test_arrays_of_any_type_are_broadcast", _on_ranks(_BroadcastsWords)),
    Fault("test_a_barrier_waits_for_every_rank", _on_ranks(_PassesBarriers)),
    Fault("test_messages_find_their_rank_and_tag", _on_ranks(_IgnoresTags)),
    Fault("test_messages_of_one_tag_arrive_in_order", _on_ranks(_LastComesFirst)),
    Fault("test_a_message_may_be_shorter_than_its_buffer", _on_ranks(_FillsBuffers)),
    Fault("test_buffers_of_every_kind_carry_messages", _on_ranks(_KnowsByteArraysOnly)),
    Fault("test_large_messages_may_come_before_they_are_asked_for", _on_ranks(_SmallMessagesOnly)),
    Fault("test_done_completes_a_message_without_wait", _on_ranks(_OnlyWaitCompletes)),
    Fault("test_a_wait_has_a_deadline_and_names_what_it_awaits", _on_ranks(_NamelessTimeout)),
    Fault("test_a_wait_has_a_deadline_and_names_what_it_awaits", _on_ranks(_WaitsForNothing)),
    Fault("test_a_receive_can_be_given_up", _on_ranks(_NeverCancels)),
    Fault("test_a_single_rank_has_no_partner", _OneBrokenRank),
    Fault("test_reductions_sum_in_place", _on_ranks(_SumsTwice)),
    Fault("test_reductions_take_the_largest_and_the_least", _on_ranks(_AlwaysSums)),
    Fault("test_the_largest_and_the_least_keep_a_nan_of_any_rank", _on_ranks(_ComparesWithLess)),
    Fault("test_memory_in_another_order_is_refused", _on_ranks(_TakesAnyMemory)),
    Fault("test_several_reductions_are_under_way_at_once", _on_ranks(_OneReductionAtATime)),
    Fault("test_types_that_it_cannot_reduce_are_refused", _on_ranks(_SumsAnything)),
    Fault("test_messages_of_a_duplicate_never_mix", _on_ranks(_DuplicatesAreItself)),
    Fault("test_a_split_holds_the_ranks_of_one_number", _on_ranks(_SplitsNothing)),
    Fault("test_it_outlives_its_duplicates", _on_ranks(_ClosesAll)),
    Fault("test_threads_with_a_duplicate_each_work_at_once", _on_ranks(_SharedArray)),
    Fault("test_a_sum_keeps_its_memory_until_it_is_done", _on_ranks(_KeepsNothing)),
    Fault("test_poke_returns_true_or_false", _on_ranks(_PokeCountsMessages)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault) -> None:
    assert_caught(fault)


def test_each_promise_has_a_fault() -> None:
    assert_complete(CommunicatorTests, FAULTS)
