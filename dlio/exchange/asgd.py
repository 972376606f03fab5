"""ASGD (Keuper and Pfreundt, arXiv 1505.04956): asynchronous weights to random ranks.

Each rank steps on its own and sends its weights to random ranks without waiting; the receiver
merges only weights that its Parzen filter accepts.

The filter: let w be a rank's weights after its last merge and w' its weights now. Received weights
w_n are refused if they lie as far behind w as w' lies ahead of it: (w' - w) . (w_n - w) must be
-|w' - w|^2 or more. The accepted ones and w' are averaged. The paper accepts w_n if a step brings w
nearer to it, which asks for +|w' - w|^2 / 2, with w before the last step only. With millions of
weights w' - w is mostly the noise of its batches, which averaging is to remove: of a rank that has
as much noise of its own, w_n is about as near to w as to w'. The paper's bound refuses nearly all,
and 0 those that would remove the most.

Weights that arrive are old, and the rank has moved since. An average with them would take a part of
that way back: with one message a step, training would slow down by 1 / (1 + age / 2). So a rank
remembers its weights of the last steps, and merges how the sender's differ from those that it had
itself when they were sent, by the clocks of both. Clocks of nodes that differ by more than a step
cost some of this, no more (`dlio doctor` compares them).

A rank adapts how often it sends ("communication load balancing"): its interval shrinks when its
queue is below a set point and grows when it is not, so that the queue is full half of the time. It
sends only to ranks that have taken its last message: a slow rank takes a few in each of its steps,
and if the others waited for it, they would exchange as seldom with each other as with it.

A message is a notice of 32 bytes (the sender's step, version of the parameters' shapes, bytes that
follow, time), then the weights. A receiver keeps a receive posted for each rank's notice, and for
its weights where that takes little memory: a message is there at the receiver's next step then.
Otherwise it receives a few messages' weights at a time, each a step after its notice. Messages are
two-sided, so that a dead rank blocks no other. After neurons were cut, messages of an older version
are dropped. After a loss all messages under way are dropped, and nothing waits for the lost rank.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.comm import Communicator, Request
from dlio.comm.deadlines import await_end, leave
from dlio.comm.progress_thread import ProgressThread
from dlio.comm.survival.recovery import RecoveryPart
from dlio.errors import PeerLost, UsageError
from dlio.exchange.buckets import Bucket, Named
from dlio.exchange.compress import make_compressor
from dlio.exchange.compress.message_layout import pieces_of
from dlio.exchange.cut import TensorCut, reshape_flats
from dlio.exchange.exchange_base import PeerExchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.pair_buffer import add_message
from dlio.exchange.peer_steps import PeerReport, PeerSteps
from dlio.exchange.traffic import MessageTraffic

_NOTICE: Final = 1
_WEIGHTS: Final = 2
_QUEUE_BYTES: Final = 256 << 20
"""Set point of the queue: bytes of messages that have not left, one to each receiver."""
# The interval grows by a quarter, not twofold: fast ranks next to a slow one then send 0.9
# messages a step instead of 0.8, and learn faster.
_SHRINKS: Final = 0.8
"""Factor of the interval while the queue is below its set point."""
_NOTICE_FACTS: Final = 4
"""Numbers of a notice before the steps of other ranks: step, version, bytes and time."""
_MAILBOX: Final = 2
"""Messages received at a time, if not of all ranks."""
# Receives that wait for a notice bring weights a step later: held out 27.5 instead of 29.5 % after
# three epochs next to a slow rank.
_AHEAD_BYTES: Final = 64 << 20
"""Most memory for the weights of all other ranks, to receive them without waiting for a notice."""
_LONGEST: Final = 64
"""Maximum interval in steps between two messages."""
_PART: Final = 1 << 15
"""Weights merged at a time."""
_CLOSE_TIMEOUT_S: Final = 10.0
_DEPTH: Final = 4
"""Steps whose weights are remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class _OutgoingMessage:
    peer: int
    requests: list[Request]
    memory: npt.NDArray[np.uint8]
    notice: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _PostedReceive:
    request: Request
    memory: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _IncomingMessage:
    request: Request
    peer: int
    step: int
    """Optimizer steps that the sender had made."""
    version: int
    """Version of the parameters' shapes."""
    memory: npt.NDArray[np.uint8]
    count: int
    """Length in bytes."""
    sent_ns: int
    """Time at which it was sent, by the sender's clock."""
    carried: npt.NDArray[np.int64]
    """Steps of other ranks that the weights hold; see `PeerSteps.carried`."""


@dataclass(frozen=True, slots=True)
class AsgdReport(PeerReport):
    """Where ASGD stands on a rank."""

    made: int
    """Steps of the optimizer since the exchange was created."""


class WeightHistory:
    """A rank's weights after each of its last steps, with the times of these steps.

    Takes as much memory as four copies of the weights.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, torch.Tensor]] = deque()

    def note(self, time_ns: int, weights: torch.Tensor) -> None:
        """Copy the weights that the rank has from now on; shape (entries,)."""
        full = len(self._marks) == _DEPTH
        memory = self._marks.popleft()[1] if full else torch.empty_like(weights)
        self._marks.append((time_ns, memory.copy_(weights)))

    def at(self, time_ns: int) -> torch.Tensor:
        """Return the weights that the rank had at a time: the oldest known, if it was before."""
        for since, weights in reversed(self._marks):
            if since <= time_ns:
                return weights
        return self._marks[0][1]

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights, from the oldest to the newest."""
        return [weights for _, weights in self._marks]

    def replace(self, weights: Sequence[torch.Tensor]) -> None:
        """Put others in the place of `weights`, such as ones of other shapes."""
        times = [since for since, _ in self._marks]
        self._marks = deque(zip(times, weights, strict=True))


class Asgd(PeerExchange, RecoveryPart[AsgdReport]):
    """Sends weights to random ranks without waiting, and merges accepted ones."""

    def __init__(self, named: Named, context: ExchangeContext) -> None:
        self._comm = comm = context.comm
        self._progress = ProgressThread(comm)
        seed = f"{context.seed}.{comm.rank}"
        # A seed for each rank: with a common one, all ranks would send to the same receiver.
        self._random = random.Random(seed)  # noqa: S311 - the choice of partners needs no secrecy
        self._context, self._named = context, named if comm.size > 1 else []
        self._version = 0
        """Number of times that parameters have been cut."""
        self._make_bucket()
        self._before = torch.empty_like(self._now.flat)
        """Weights after the last merge."""
        self._started = False
        # Received weights are compared with this rank's own of the time at which they were sent.
        # Compared with those of now, each merge would take back a part of the way since.
        self._trail = WeightHistory()
        self._posted: dict[int, _PostedReceive] = {}
        """Receives of weights that were begun before their notices came."""
        others = len(self._named) and comm.size - 1
        self._ahead = 0 < others * self._longest <= _AHEAD_BYTES
        # Messages get shorter when neurons are cut, and longer ones may still be under way.
        self._room = self._longest
        count = 2 * others if self._ahead else _MAILBOX
        self._spare = [np.empty(self._longest, np.uint8) for _ in range(count)]
        self._out: list[npt.NDArray[np.uint8]] = []
        self._sends: list[_OutgoingMessage] = []
        self._arriving: list[_IncomingMessage] = []
        self._recovery = context.recovery
        self.peer_steps = PeerSteps(context.recovery)
        self._listen_to_all()
        self._steps, self._interval = 0, 1.0
        self._made = 0
        """Steps of the optimizer since the exchange was created."""
        if self._recovery is not None:
            self._recovery.register(self)
        self._traffic = MessageTraffic()
        self._accepted = self._refused = self._dropped = 0

    def _listen_to_all(self) -> None:
        peers = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._peers = peers
        length = _NOTICE_FACTS + len(self.peer_steps.carried())
        self._notices = {peer: np.zeros(length, np.int64) for peer in peers}
        self._expected: dict[int, Request] = {}
        self._waiting: list[tuple[int, int, int, int, int, npt.NDArray[np.int64]]] = []
        """(rank, step, version, bytes, time, steps) of notices whose weights are not yet here."""
        self._sent = dict.fromkeys(peers, 0)
        self._heard = dict.fromkeys(peers, 0)
        for peer in peers:
            self._expected[peer] = self._listen(peer)

    def _make_bucket(self) -> None:
        self._now = Bucket(self._named)
        self._codec = None
        self._longest = self._now.flat.nbytes
        compressor = self._context.spec.compressor
        if compressor is not None and self._named:
            pieces = pieces_of(self._now.tensors)
            self._codec = make_compressor(compressor, pieces, self._context.scratch)
            self._longest = self._codec.max_bytes

    @torch.no_grad()
    def before_step(self) -> None:
        if self._peers and self._now.is_narrow:
            # Others have posted receives for shorter messages.
            raise UsageError("asgd: the model became float64 after its optimizer was made")
        if self._peers and not self._started:
            self._now.read()
            self._before.copy_(self._now.flat)
            self._trail.note(time.time_ns(), self._now.flat)
            self._started = True

    def after_step(self) -> None:
        self._made += 1
        if self._peers:
            try:
                self._exchange()
            except PeerLost:
                if self._recovery is None:
                    raise
                self._recovery.recover()
        self._report_contributors()

    @torch.no_grad()
    def _exchange(self) -> None:
        # No wait for anybody: messages that have not arrived are merged at a later step.
        if not self._take():
            self._now.read()
        self._trail.note(time.time_ns(), self._now.flat)
        if self._time_to_send():
            self._send()
        if self._sends or self._arriving:
            self._progress.go()
        else:
            self._progress.rest()

    @torch.no_grad()
    def all_left(self) -> bool:
        """True if all of this rank's messages have left.

        Receives other ranks' messages, as a step does, so that theirs can leave.
        """
        self._take()
        self._clear_sent()
        return not self._sends

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        """Adapt without waiting: messages under way carry the version of their shapes."""
        before = self._now
        self._version += 1
        self._make_bucket()
        if self._peers:
            (self._before,) = reshape_flats([self._before], [before], [self._now], cuts)
            known = self._trail.weights
            self._trail.replace(
                [reshape_flats([each], [before], [self._now], cuts)[0] for each in known]
            )
        self._out = []

    def report(self) -> AsgdReport:
        return AsgdReport(self.peer_steps.report(), self._made)

    def adopt(self, report: AsgdReport) -> None:
        self._made = report.made

    def reconcile(self, reports: Sequence[AsgdReport], comm: Communicator) -> None:
        self.peer_steps.reconcile(reports)
        arriving = [each.request for each in self._arriving]
        leaving = [request for sent in self._sends for request in sent.requests]
        posted = [each.request for each in self._posted.values()]
        # Messages under way are dropped, not taken: ranks have other numbers from now on.
        await_end([*self._expected.values(), *posted, *arriving, *leaving])
        self._spare += [each.memory for each in self._arriving]
        self._out += [sent.memory for sent in self._sends if len(sent.memory) == self._longest]
        self._spare += [each.memory for each in self._posted.values()]
        self._arriving, self._sends, self._posted = [], [], {}
        self._listen_to_all()

    def state(self) -> dict[str, torch.Tensor]:
        """Messages under way are not part of the state: they may be lost."""
        # Nor is the trail: nothing that arrives after a restart was sent at its times.
        if not self._started:
            return {}
        return {
            "before": self._before,
            "interval": torch.tensor([float(self._steps), self._interval], dtype=torch.float64),
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._started = "before" in state
        if self._started:
            self._before.copy_(state["before"])
            self._steps, self._interval = int(state["interval"][0]), float(state["interval"][1])

    def statistics(self) -> dict[str, float]:
        """Also: `accepted` and `refused` messages, those `dropped` for being of another layout, and
        the present `interval` in steps."""
        return {
            **self._traffic.as_dict(),
            "accepted": float(self._accepted),
            "refused": float(self._refused),
            "dropped": float(self._dropped),
            "interval": self._interval,
        }

    def close(self) -> None:
        """Receive all remaining messages, so that none is left under way. Collective."""
        self._progress.close()
        if self._recovery is None:
            self._receive_rest()
        else:
            if not self._recovery.membership.lost:  # MPI is ended in the ordinary way.
                self._recovery.uniform(self._receive_rest)
            self._recovery.unregister(self)
        for peer, request in self._expected.items():
            if not request.cancel():
                leave(request, self._notices[peer])
        for receives in (self._arriving, self._posted.values()):
            for each in receives:
                if not each.request.cancel():
                    leave(each)
        for sent in self._sends:
            leave(sent)
        if self._named:
            self._comm.close()

    def _receive_rest(self) -> None:
        if not self._peers:
            return
        everyone = self._comm.allgather({str(peer): n for peer, n in self._sent.items()})
        owed = {peer: int(everyone[peer][str(self._comm.rank)]) for peer in self._peers}
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        # A barrier would not do: messages that arrive after it would be left in MPI's queues.
        while time.monotonic() < deadline and (
            self._sends or self._arriving or self._waiting or self._heard != owed
        ):
            self._collect()
            self._clear_sent()
            time.sleep(0.0002)

    def _listen(self, peer: int) -> Request:
        if self._ahead:
            # Ranks that join later are more than there were at first.
            memory = self._spare.pop() if self._spare else np.empty(self._room, np.uint8)
            request = self._comm.irecv(memory[: self._room], peer, _WEIGHTS)
            self._posted[peer] = _PostedReceive(request, memory)
        return self._comm.irecv(self._notices[peer].view(np.uint8), peer, _NOTICE)

    def _take(self) -> bool:
        """Merge arrived messages; True if there were any, and weights are in the bucket."""
        messages = self._collect()
        if messages:
            self._now.read()
            if not self._trail.weights:  # After a checkpoint, before the first step.
                self._trail.note(0, self._now.flat)
            merged = self._merge(messages)
            for each, was_merged in zip(messages, merged, strict=True):
                if was_merged and self._recovery is not None:
                    self.peer_steps.note(self.peer_steps.members([each.peer]), each.step)
                    self.peer_steps.take_in(each.carried)
        return bool(messages)

    def _collect(self) -> list[_IncomingMessage]:
        """Return arrived messages; post receives for announced ones."""
        whole = []
        for peer, request in list(self._expected.items()):
            posted = self._posted.get(peer)
            if request.done() and (posted is None or posted.request.done()):
                self._heard[peer] += 1
                step, version, count, sent_ns = self._notices[peer][:_NOTICE_FACTS].tolist()
                carried = self._notices[peer][_NOTICE_FACTS:].copy()
                if posted is None:
                    self._waiting.append((peer, step, version, count, sent_ns, carried))
                else:
                    about = peer, step, version, posted.memory, count, sent_ns, carried
                    whole.append(_IncomingMessage(posted.request, *about))
                self._expected[peer] = self._listen(peer)
        arrived = whole + [each for each in self._arriving if each.request.done()]
        self._arriving = [each for each in self._arriving if each not in arrived]
        while self._waiting and self._spare and len(self._arriving) < _MAILBOX:
            notice, memory = self._waiting.pop(0), self._spare.pop(0)
            peer, step, version, count, sent_ns, carried = notice
            if len(memory) < count:
                memory = np.empty(count, np.uint8)
            request = self._comm.irecv(memory[:count], peer, _WEIGHTS)
            self._arriving.append(
                _IncomingMessage(request, peer, step, version, memory, count, sent_ns, carried)
            )
        # The caller reads them before its next call, which may reuse their memory.
        self._spare += [each.memory for each in arrived]
        ours = [each for each in arrived if each.version == self._version]
        self._dropped += len(arrived) - len(ours)
        return ours

    def _merge(self, messages: Sequence[_IncomingMessage]) -> list[bool]:
        """Average the bucket's weights with the received ones; tells which ones are accepted."""
        taken: list[torch.Tensor] = []
        """Weights of others, and those that this rank had when they were sent, in turn."""
        accepted = []
        for each in messages:
            message = each.memory[: each.count]
            if self._codec is None:
                theirs = torch.from_numpy(message.view(self._now.array.dtype))
            else:
                theirs = torch.zeros_like(self._now.flat)
                add_message(self._codec, message, theirs)
            then = self._trail.at(each.sent_ns)
            accepted.append(self._accepts(theirs, then))
            taken += [theirs, then] if accepted[-1] else []
        count = sum(accepted)
        self._accepted += count
        self._refused += len(messages) - count
        if not taken:
            return accepted
        trail = self._trail.weights
        for now, before, *others in self._parts(self._before, *trail, *taken):
            known, others = others[: len(trail)], others[len(trail) :]
            shift = torch.zeros_like(now)
            for theirs, then in zip(others[::2], others[1::2], strict=True):
                shift.add_(theirs - then, alpha=1 / (1 + count))
            now += shift
            before.copy_(now)
            # Only steps of its own count as the rank's way, not corrections by merges.
            for weights in known:
                weights += shift
        self._now.write()
        return accepted

    def _accepts(self, theirs: torch.Tensor, then: torch.Tensor) -> bool:
        """The Parzen filter, for weights that were sent when this rank had the weights `then`."""
        ahead = length = 0.0
        for now, before, other, own in self._parts(self._before, theirs, then):
            way = now - before
            length += float(torch.dot(way, way))
            ahead += float(torch.dot(way, way + other - own))
        return ahead >= -length

    def _parts(self, *others: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield the weights and the others in parts that fit a core's cache.

        Allocating the differences of a whole network costs as much as computing them.
        """
        whole = [self._now.flat, *others]
        for start in range(0, self._now.flat.numel(), _PART):
            yield [each[start : start + _PART] for each in whole]

    def _clear_sent(self) -> None:
        gone = [sent for sent in self._sends if all(each.done() for each in sent.requests)]
        # Messages of an older version have memory of another length.
        self._out += [sent.memory for sent in gone if len(sent.memory) == self._longest]
        self._sends = [sent for sent in self._sends if sent not in gone]

    def _time_to_send(self) -> bool:
        """True once per interval, if the queue is short; adapts the interval."""
        self._clear_sent()
        self._steps += 1
        if self._steps < self._interval:
            return False
        self._steps = 0
        most = max(2, _QUEUE_BYTES // max(1, self._longest))
        if len(self._sends) >= most or not self._ready():
            self._interval = min(_LONGEST, self._interval / _SHRINKS)
            return False
        self._interval = max(1.0, _SHRINKS * self._interval)
        return True

    def _ready(self) -> list[int]:
        """Return the ranks that have taken this rank's last message."""
        under_way = {sent.peer for sent in self._sends}
        return [peer for peer in self._peers if peer not in under_way]

    def _send(self) -> None:
        """Send the weights to a random one of those that are ready."""
        peer = self._random.choice(self._ready())
        memory = self._out.pop() if self._out else np.empty(self._longest, np.uint8)
        used = self._longest
        if self._codec is None:
            memory[:] = self._now.bytes
        else:
            values = self._now.flat.float().numpy()
            used = self._codec.encode(values, np.zeros_like(values), memory)
        self._sent[peer] += 1
        facts = [self._made, self._version, used, time.time_ns()]
        notice = np.array([*facts, *self.peer_steps.carried()], np.int64)
        requests = [
            self._comm.isend(notice.view(np.uint8), peer, _NOTICE),
            self._comm.isend(memory[:used], peer, _WEIGHTS),
        ]
        self._sends.append(_OutgoingMessage(peer, requests, memory, notice))
        self._traffic.sent(2, used + notice.nbytes)
