"""The shuffle: plans windows of steps ahead and pushes payloads between nodes.

One thread per rank and epoch. For each window it plans the samples that this rank consumes and
sends, posts the receives, packs and pushes the messages, one per pair of ranks, and hands on each
step's samples. Both sides compute the same plan, so nothing is requested, and there is no
collective operation between the first window and the last.

At most two windows are under way: the one that is being consumed and the next. No rank waits for
another to make room: a rank that has planned window w needs others to have planned w, which they
do before they consume w - 1.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import leave
from dlio.comm.funnel import wait_serving
from dlio.comm.survival.membership import messages_of
from dlio.data.reader_contract import abilities_of
from dlio.errors import DlioError, PeerLost
from dlio.loader.shuffle.sample_message import (
    ENTRY_BYTES,
    SizedReceive,
    UncheckedPayload,
    announce,
    message_bytes,
    message_of,
    pack_message,
    pack_payloads,
    unpack_message,
)
from dlio.plan.epoch import EpochPlan, WindowPlan, plan_epoch
from dlio.plan.schedule import RankWindow, window_steps
from dlio.storage.hierarchy import Hierarchy
from dlio.util.buffer_pool import BufferPool
from dlio.util.closable import Closable
from dlio.util.threads import Workers

_FIRST_WINDOW_STEPS = 2
"""Short, so that the first batch does not wait for a long window's messages."""
_MOST_WINDOW_STEPS = 32


def windows_of(plan: EpochPlan, mean_bytes: float) -> list[range]:
    """Return the steps of each window, the same on all ranks, for samples of this mean size in
    bytes.

    On one node a window needs no memory but its plan, so windows are as long as possible there.
    """
    length = _MOST_WINDOW_STEPS
    if plan.ranks.nodes > 1:
        length = min(length, window_steps(mean_bytes, max(plan.shares.counts), plan.window_bytes))
    first = min(length, _FIRST_WINDOW_STEPS, plan.steps)
    edges = sorted({0, *range(first, plan.steps, length), plan.steps})
    return [range(start, stop) for start, stop in pairwise(edges)]


_T = TypeVar("_T")

_WINDOW_TAGS = 2047
_GENERATIONS = 16
"""Passes with tags of their own; tags stay below 32,767, which every MPI provides."""
_IDLE_S = 0.001
_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class StepSamples:
    """One rank's samples of one step, and the payloads that have arrived for them."""

    number: int
    samples: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    senders: npt.NDArray[np.int32]
    """Rank that pushes each sample, -1 where this rank reads it itself."""
    payloads: list[UncheckedPayload | None]
    """Payloads that have arrived from peers, by slot; checked by whoever uses them."""
    is_own: bool = False
    """True if no sample comes from a peer."""
    ready: list[int] = field(default_factory=list)
    """Slots that can be decoded, until the step has a listener."""
    listener: Callable[[list[int]], None] | None = None


@dataclass(slots=True, eq=False)
class _WindowReceive:
    request: Request
    buffer: npt.NDArray[np.uint8]
    window: int
    sender: int
    steps: list[StepSamples] = field(default_factory=list)
    """The steps that want its samples."""


class Shuffle(Closable):
    """Carries out an epoch's plan for one rank. Owner: the pipeline, which closes it.

    The communicator is for this shuffle's messages alone, and used by its thread only; `memory` for
    messages is shared by passes, whose `generation` is the same on all ranks. Without a `planner`
    of the plan, the thread makes one. An `alone` rank reads all of its samples from its tiers or
    the source, and exchanges none: a rank of the plan has been lost. It comes to that, too, when
    one is lost meanwhile.
    """

    def __init__(
        self,
        comm: Communicator,
        hierarchy: Hierarchy,
        plan: EpochPlan,
        generation: int,
        memory: BufferPool,
        planner: WindowPlan | None,
        alone: bool,
    ) -> None:
        self._messages = messages_of(comm)
        self._alone = alone
        self._hierarchy = hierarchy
        self._plan = plan
        self._planner = planner
        # A message of an earlier pass that is late must not be taken for one of this pass.
        self._tag_base = (generation % _GENERATIONS) * (_WINDOW_TAGS + 1)
        self._windows = windows_of(plan, float(hierarchy.reader.sizes.mean()))
        self._announced = abilities_of(hierarchy.reader).sizes_are_estimates
        """Sizes of samples are not known before they are read: messages are announced."""
        # Ranks of a node read the same tiers: samples travel between nodes only.
        self._moves = plan.ranks.nodes > 1
        self._condition = threading.Condition()
        self._steps: dict[int, StepSamples] = {}
        self._planned = 0
        self._consumed_step = 0
        self._receives: list[_WindowReceive] = []
        self._sends: list[tuple[Request, Any]] = []
        self._memory = memory
        self._give_up = -1
        self._late: set[int] = set()
        """Ranks whose message was given up; nobody waits for them until one of theirs arrives."""
        self._error: BaseException | None = None
        self._worker = Workers(
            "dlio-shuffle", self._run, wake=self._wake, stop_timeout_s=2 * _CLOSE_TIMEOUT_S
        )
        self._closing = self._worker.stopping
        self._worker.start()

    def planned(self, number: int) -> bool:
        """True if step `number` is planned, so that `attach` does not wait."""
        with self._condition:
            return number in self._steps

    def attach(
        self,
        number: int,
        listen: Callable[[StepSamples], Callable[[list[int]], None]],
        timeout_s: float,
    ) -> None:
        """Take step `number` once it is planned.

        `listen` gets the step and returns a listener, which is called with lists of slots that can
        be decoded: by this thread now, and by the shuffle's thread later.

        Raises the error that ended the shuffle's thread, if any; DlioError after `timeout_s`.
        """
        with self._condition:
            planned = wait_serving(
                lambda limit_s: self._condition.wait_for(
                    lambda: number in self._steps or self._error is not None, limit_s
                ),
                timeout_s,
            )
            if self._error is not None:
                raise self._error
            if not planned:
                raise DlioError(
                    f"step {number} was not planned within {timeout_s:.0f} s: the source or a "
                    "peer may hang (DLIO_TIMEOUT sets the deadline)"
                )
            step = self._steps.pop(number)
            listener = step.listener = listen(step)
            ready, step.ready = step.ready, []
        if ready:
            listener(ready)

    def take_own(self, number: int, most: int) -> list[StepSamples]:
        """Take step `number` and those that follow it, `most` at a time, as far as they are planned
        and no sample of theirs comes from a peer. Does not wait; they need no listener."""
        taken: list[StepSamples] = []
        with self._condition:
            while len(taken) < most:
                step = self._steps.get(number + len(taken))
                if step is None or not step.is_own:
                    break
                taken.append(self._steps.pop(step.number))
        return taken

    def check(self) -> None:
        """Raise the error that ended the shuffle's thread, if any."""
        if self._error is not None:
            raise self._error

    def consumed(self, number: int) -> None:
        """Say that step `number` was handed to the user, so that another window may be planned."""
        with self._condition:
            self._consumed_step = number + 1
            # The thread is woken only for what it waits for: each time takes it 0.1 ms.
            planned, windows = self._planned, self._windows
            if planned == len(windows):
                due = self._plan.steps
            else:
                due = windows[max(0, planned - 1)].start
            if self._consumed_step >= due:
                self._condition.notify_all()

    @property
    def sent(self) -> int:
        """Number of steps whose samples have been read for the ranks that need them."""
        return self._windows[self._planned - 1].stop if self._planned else 0

    def give_up(self, number: int) -> None:
        """Stop waiting for peers' samples up to step `number`; these are read from the source."""
        with self._condition:
            self._give_up = max(self._give_up, number)
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread, after the messages under way, within a deadline."""
        self._worker.close()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _run(self, _: int) -> None:
        try:
            while self._planned < len(self._windows) and self._wait_for_turn():
                self._start(self._planned)
                with self._condition:
                    self._planned += 1
                    self._condition.notify_all()
            # MPI moves a long message only inside of calls to it: this thread calls until the last
            # one is done.
            while not self._closing.is_set() and (self._busy or not self._consumed_all):
                self._progress()
                self._pause()
            try:
                self._finish()
            except PeerLost:
                self._go_alone()
        except BaseException as error:
            self._failed(error)
            # Keep alive the memory that MPI may still read and write.
            for receive in self._receives:
                leave(receive.request, receive.buffer)
            for send in self._sends:
                leave(*send)

    def _go_alone(self) -> None:
        """A rank is lost: drop all messages, whose samples are read here, and exchange no more."""
        self._alone = True
        receives, self._receives = self._receives, []
        for receive in receives:
            leave(receive.request, receive.buffer)
            self._deliver(receive, None)
        for send in self._sends:
            leave(*send)
        self._sends = []

    def _failed(self, error: BaseException) -> None:
        """Raise the first error in whoever waits for steps."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def _wait_for_turn(self) -> bool:
        """Wait until the next window may be planned. False when the shuffle is being closed."""
        while True:
            with self._condition:
                if self._closing.is_set():
                    return False
                previous = self._windows[max(0, self._planned - 1)]
                # No message says that there is room: a peer plans window w before it consumes w -
                # 1, so both ranks have at most two windows in memory.
                if self._consumed_step >= previous.start or self._planned == 0:
                    return True
            self._progress()
            self._pause()

    def _pause(self) -> None:
        with self._condition:
            if not self._closing.is_set():
                # MPI has no call that waits for one of several messages or for a condition of this
                # process.
                self._condition.wait(_IDLE_S if self._busy else 0.1)

    @property
    def _busy(self) -> bool:
        return bool(self._receives or self._sends)

    @property
    def _consumed_all(self) -> bool:
        return self._consumed_step >= self._plan.steps

    def _start(self, number: int) -> None:
        steps = self._windows[number]
        window = self._window(number)
        incoming = [] if self._alone else self._receive_window(window, number)
        # A peer that was late once is not waited for: each of its steps would cost a deadline.
        late = np.isin(window.senders, list(self._late))
        self._hierarchy.counters.add("late", int(late.sum()))
        here = late | self._alone
        awaited = np.where(here, np.int32(-1), window.senders)
        blocks, places = self._hierarchy.reader.layout.locate(window.samples)
        made = []
        for k, step in enumerate(steps):
            part = slice(window.starts[k], window.starts[k + 1])
            senders = awaited[part]
            made.append(
                StepSamples(
                    step,
                    window.samples[part],
                    blocks[part],
                    places[part],
                    senders,
                    [None] * len(senders),
                    is_own=bool((senders < 0).all()),
                    ready=np.flatnonzero(senders < 0).tolist(),
                )
            )
        # A late peer's message is received all the same, for it may match none that is posted
        # later.
        for receive in incoming:
            receive.steps = [] if receive.sender in self._late else made
        self._receives += incoming
        tag = self._tag(number)
        with self._condition:
            self._steps.update((step.number, step) for step in made)
            self._condition.notify_all()
        for dest, samples in window.sends.items():
            if self._alone:
                break
            message = self._pack(samples)
            try:
                if self._announced:
                    self._sends += announce(self._messages, message, dest, tag)
                else:
                    self._sends.append((self._messages.isend(message, dest, tag), message))
            except PeerLost:
                self._go_alone()
            self._progress()

    def _receive_window(self, window: RankWindow, number: int) -> list[_WindowReceive]:
        """Post the receives of a window; nothing if a rank is lost meanwhile."""
        incoming: list[_WindowReceive] = []
        try:
            for sender in np.unique(window.senders[window.senders >= 0]).tolist():
                owed = window.samples[window.senders == sender]
                incoming.append(self._receive(sender, owed, number))
        except PeerLost:
            for receive in incoming:
                leave(receive.request, receive.buffer)
            self._go_alone()
            return []
        return incoming

    def _receive(self, sender: int, owed: npt.NDArray[np.int64], number: int) -> _WindowReceive:
        """Post the receive of a window's message with the samples that a rank owes."""
        tag = self._tag(number)
        if self._announced:
            buffer = np.empty(0, np.uint8)
            request: Request = SizedReceive(self._messages, self._memory, sender, tag)
        else:
            buffer = self._memory.lend(message_bytes(self._hierarchy.reader.sizes[owed]))
            request = self._messages.irecv(buffer, sender, tag)
        return _WindowReceive(request, buffer, number, sender)

    def _tag(self, window: int) -> int:
        return self._tag_base + window % _WINDOW_TAGS

    def _window(self, number: int) -> RankWindow:
        # In this thread: planning an epoch of a mixture takes a while, and the user's thread does
        # not wait for it.
        if self._planner is None:
            self._planner = plan_epoch(self._plan)
        return self._planner.window(self._windows[number])

    def _pack(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        hierarchy = self._hierarchy
        # All at once: of a source with a latency, samples would come one after another otherwise.
        hierarchy.fetcher.expect(samples)
        blocks, places = hierarchy.reader.layout.locate(samples)
        sizes = np.asarray(hierarchy.reader.sizes[samples], np.int64)
        where = list(zip(samples.tolist(), blocks.tolist(), places.tolist(), strict=True))

        def read(k: int, into: memoryview) -> tuple[int, int] | None:
            return self._attempt(lambda: hierarchy.read_stored(*where[k], into))

        if self._announced:
            payloads = [self._attempt(partial(hierarchy.read, *each)) for each in where]
            message = pack_payloads([None if each is None else each[0] for each in payloads])
        else:
            message = pack_message(self._memory.lend(message_bytes(sizes)), sizes, read)
        hierarchy.counters.add("sent", len(message) - ENTRY_BYTES * len(samples))
        hierarchy.counters.add("messages")
        return message

    def _attempt(self, read: Callable[[], _T]) -> _T | None:
        """Read a sample for a peer; None where it cannot be read."""
        try:
            return read()
        except DlioError:
            return None  # The receiver gets the same error, and names the sample.
        except Exception as error:
            # Peers still expect the message; the error is raised in this rank.
            self._failed(error)
            return None

    def _progress(self) -> None:
        try:
            self._test_all()
        except PeerLost:
            self._go_alone()

    def _test_all(self) -> None:
        self._sends = [send for send in self._sends if not send[0].done()]
        waiting = []
        for receive in self._receives:
            if receive.request.done():
                self._late.discard(receive.sender)
                self._deliver(receive, message_of(receive.request, receive.buffer))
                receive.steps = []  # Not again, if a rank is lost now.
            elif receive.steps and receive.steps[0].number <= self._give_up:
                self._late.add(receive.sender)
                self._deliver(receive, None)
                # If it does arrive, it is received and dropped, and not mistaken for a later one.
                receive.steps = []
                waiting.append(receive)
            else:
                waiting.append(receive)
        self._receives = waiting

    def _deliver(self, receive: _WindowReceive, message: npt.NDArray[np.uint8] | None) -> None:
        """Hand on a message's samples; without a message they are read from the source."""
        if not receive.steps:
            return  # Received only so that the peer's send ends; nobody needs it.
        slots = [np.flatnonzero(step.senders == receive.sender) for step in receive.steps]
        samples = [step.samples[here] for step, here in zip(receive.steps, slots, strict=True)]
        count = sum(len(here) for here in slots)
        payloads: list[UncheckedPayload | None] = [None] * count
        if message is not None:
            sizes = self._hierarchy.reader.sizes[np.concatenate(samples)]
            payloads = unpack_message(message.data, count if self._announced else sizes)
        self._hierarchy.counters.add("late", payloads.count(None))
        arrived = iter(payloads)
        for step, here in zip(receive.steps, slots, strict=True):
            if not len(here):
                continue
            with self._condition:
                for slot in here:
                    step.payloads[slot] = next(arrived)
                listener = step.listener
                if listener is None:
                    step.ready.extend(here.tolist())
            if listener is not None:
                listener(here.tolist())

    def _finish(self) -> None:
        """Complete or cancel all messages under way.

        After a whole epoch every message has been planned by both sides. After an early end, which
        all ranks reach alike, some may have planned more windows than others. Each rank sends the
        number to its peers, receives the messages of windows that only a peer has planned, and
        cancels those that a peer will never send.
        """
        if not self._moves or self._alone:
            return
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        # After a whole epoch both sides know all messages; nobody has to be asked.
        if not self._consumed_all:
            self._agree_on_end(deadline)
        while self._busy and time.monotonic() < deadline:
            self._progress()
            time.sleep(_IDLE_S)
        # Messages of a peer that was given up stay posted, in memory that is never freed: a
        # cancelled one could match a later message, and MPI_Finalize wrote into memory that Python
        # had freed.
        for receive in self._receives:
            if receive.steps:
                self._cancel(receive)
            else:
                leave(receive.request, receive.buffer)
        for send in self._sends:
            leave(*send)

    @staticmethod
    def _cancel(receive: _WindowReceive) -> None:
        if not receive.request.cancel():
            leave(receive.request, receive.buffer)

    def _agree_on_end(self, deadline: float) -> None:
        plan, tag = self._plan, self._tag_base + _WINDOW_TAGS
        here = plan.ranks.node_of[plan.rank]
        peers = np.flatnonzero(plan.ranks.node_of != here).tolist()
        mine = bytearray(self._planned.to_bytes(8, "little"))
        self._sends.extend((self._messages.isend(mine, peer, tag), mine) for peer in peers)
        answers = {peer: bytearray(8) for peer in peers}
        asked = {peer: self._messages.irecv(answers[peer], peer, tag) for peer in peers}
        while asked and time.monotonic() < deadline:
            self._progress()
            for peer in [peer for peer, request in asked.items() if request.done()]:
                del asked[peer]
                self._settle(peer, int.from_bytes(answers[peer], "little"))
            time.sleep(_IDLE_S)
        for peer, request in asked.items():
            if not request.cancel():
                leave(request, answers[peer])

    def _settle(self, peer: int, planned: int) -> None:
        """Settle the messages of windows that only this rank or only `peer`, with so many planned,
        has planned."""
        for receive in [r for r in self._receives if r.sender == peer and r.window >= planned]:
            self._cancel(receive)
            self._receives.remove(receive)
        for number in range(self._planned, planned):
            window = self._window(number)
            owed = window.samples[window.senders == peer]
            if len(owed):
                self._receives.append(self._receive(peer, owed, number))
