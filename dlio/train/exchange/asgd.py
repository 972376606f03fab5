"""ASGD (Keuper and Pfreundt, 2015): ranks step on their own and send their weights, unasked and
unacknowledged, to random others, which take what helps them.

What arrives is judged by the rank's own way: weights w_n count if they lie ahead, where the way
from w leads: (w' - w) . (w_n - w) > 0. Those that count, and w' itself, are averaged. As published
they count if a step brings w nearer to them than it was, which is to ask for |w' - w|^2 / 2 in the
place of 0. Of millions of weights a step is mostly the noise of its batch: it adds to that length,
leads away from everybody, and next to nothing would count, while it hardly touches the product.
Likewise the way is not the last step, but all since the last merge.

A rank sends as often as its queue allows ("communication load balancing"): each message that finds
the queue below its set point makes the interval shorter, each that finds it above longer.

A message is a notice of 24 bytes (its number, the layout's version, the bytes that follow), then
the weights; a receiver has a receive posted for each rank's notice, and takes the weights of a few
at a time. Two-sided, so a rank that dies takes nobody along. Where neurons have been cut from the
network meanwhile, the version is another one, and the message is dropped.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.comm import Communicator, Request
from dlio.comm.progress import Progress
from dlio.comm.waiting import leave
from dlio.train.cut import Cut
from dlio.train.exchange.buckets import Bucket, Named
from dlio.train.exchange.compress import make_compressor
from dlio.train.exchange.compress.layout import Scratch, pieces_of
from dlio.train.exchange.reshape_state import recut
from dlio.train.exchange_spec import ExchangeSpec

_NOTICE: Final = 1
_WEIGHTS: Final = 2
_QUEUE: Final = 2
"""Set point: messages of this rank that have not left."""
_MAILBOX: Final = 2
"""Messages that are taken at a time."""
_LONGEST: Final = 64
"""Steps between two messages, at most."""
_PART: Final = 1 << 15
"""Weights that are merged at a time."""
_CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A message under way, and the memory that it is read from."""

    requests: list[Request]
    memory: npt.NDArray[np.uint8]
    notice: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """A message that is coming, and where it is written."""

    request: Request
    version: int
    """Of the layout that it has the shapes of."""
    memory: npt.NDArray[np.uint8]
    count: int
    """Bytes."""


class Asgd:
    """Asynchronous weights to random ranks."""

    alike = False

    def __init__(self, named: Named, comm: Communicator, spec: ExchangeSpec, seed: int) -> None:
        self._comm = comm
        self._progress = Progress(comm)
        self._random = random.Random(f"{seed}.{comm.rank}")  # noqa: S311 - whom to tell is no secret
        self._spec, self._named = spec, named if comm.size > 1 else []
        self._version = 0
        """Of the layout: how often parameters have been cut."""
        self._make_bucket()
        self._before = torch.empty_like(self._now.flat)
        """Weights of the last merge."""
        self._started = False
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._peers = peers
        self._notices = {peer: np.zeros(3, np.int64) for peer in peers}
        self._expected = {peer: self._listen(peer) for peer in peers}
        self._arriving: list[_Arriving] = []
        self._waiting: list[tuple[int, int, int]] = []
        """(rank, version, bytes) of notices that have come, whose weights have not been asked
        for."""
        self._spare = [np.empty(self._longest, np.uint8) for _ in range(_MAILBOX)]
        self._sends: list[_Sent] = []
        self._out: list[npt.NDArray[np.uint8]] = []
        self._sent = dict.fromkeys(peers, 0)
        self._heard = dict.fromkeys(peers, 0)
        self._steps, self._interval = 0, 1.0
        self._messages = self._bytes = 0
        self._accepted = self._refused = self._dropped = 0

    def _make_bucket(self) -> None:
        """Of the parameters as they are."""
        self._now = Bucket(self._named)
        self._codec = None
        self._longest = 4 * self._now.flat.numel()
        if self._spec.compressor is not None and self._named:
            pieces = pieces_of(self._now.tensors)
            self._codec = make_compressor(self._spec.compressor, pieces, Scratch())
            self._longest = self._codec.max_bytes

    def before_backward(self, samples: int, planned: int) -> None:
        pass

    def weigh(self, samples: float) -> None:
        pass

    def hold(self, held: bool) -> None:
        pass

    @torch.no_grad()
    def before_step(self) -> None:
        if self._peers and not self._started:
            self._read()
            self._before.copy_(self._now.flat)
            self._started = True

    @torch.no_grad()
    def after_step(self) -> None:
        if not self._peers:
            return
        merged = self._take()
        if self._time_to_send():
            if not merged:
                self._read()
            self._send()
        if self._sends or self._arriving:
            self._progress.go()
        else:
            self._progress.rest()

    def watch(self, module: nn.Module) -> None:
        pass

    def finish(self) -> None:
        pass

    @torch.no_grad()
    def all_left(self) -> bool:
        """Whether none of this rank's messages is under way. Takes what others have sent, as a
        step does, so that theirs can leave."""
        self._take()
        self._clear_sent()
        return not self._sends

    def reshape(self, cuts: Sequence[Cut]) -> None:
        """Waits for nobody: messages that are under way are told by their version."""
        before = self._now
        self._version += 1
        self._make_bucket()
        if self._peers:
            (self._before,) = recut([self._before], [before], [self._now], cuts)
        self._out = []

    def state(self) -> dict[str, torch.Tensor]:
        """Without messages that are under way, which nobody counts on."""
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
            "wait_s": 0.0,
            "messages": float(self._messages),
            "bytes": float(self._bytes),
            "accepted": float(self._accepted),
            "refused": float(self._refused),
            "dropped": float(self._dropped),
            "interval": self._interval,
        }

    def close(self) -> None:
        """Take what others have sent, so that nothing is left under way. Collective."""
        self._progress.close()
        if not self._peers:
            return
        everyone = self._comm.allgather({str(peer): n for peer, n in self._sent.items()})
        owed = {peer: int(everyone[peer][str(self._comm.rank)]) for peer in self._peers}
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while time.monotonic() < deadline and (
            self._sends or self._arriving or self._waiting or self._heard != owed
        ):
            self._collect()
            self._clear_sent()
            time.sleep(0.0002)
        for peer, request in self._expected.items():
            if not request.cancel():
                leave(request, self._notices[peer])
        for each in self._arriving:
            if not each.request.cancel():
                leave(each)
        for sent in self._sends:
            leave(sent)
        self._comm.close()

    def _listen(self, peer: int) -> Request:
        return self._comm.irecv(self._notices[peer].view(np.uint8), peer, _NOTICE)

    def _read(self) -> None:
        for parameter, view in zip(self._now.parameters, self._now.views, strict=True):
            view.copy_(parameter)

    def _take(self) -> bool:
        """Merge what has come; whether there was anything, and so the weights have been read."""
        messages = self._collect()
        if messages:
            self._read()
            self._merge(messages)
        return bool(messages)

    def _collect(self) -> list[npt.NDArray[np.uint8]]:
        """Messages that have come; asks for those that have been announced."""
        for peer, request in list(self._expected.items()):
            if request.done():
                self._heard[peer] += 1
                _, version, count = self._notices[peer].tolist()
                self._waiting.append((peer, version, count))
                self._expected[peer] = self._listen(peer)
        arrived = [each for each in self._arriving if each.request.done()]
        self._arriving = [each for each in self._arriving if each not in arrived]
        while self._waiting and self._spare and len(self._arriving) < _MAILBOX:
            (peer, version, count), memory = self._waiting.pop(0), self._spare.pop(0)
            if len(memory) < count:
                memory = np.empty(count, np.uint8)
            request = self._comm.irecv(memory[:count], peer, _WEIGHTS)
            self._arriving.append(_Arriving(request, version, memory, count))
        # Not to be written again before they have been read: by the next call.
        self._spare += [each.memory for each in arrived]
        ours = [each for each in arrived if each.version == self._version]
        self._dropped += len(arrived) - len(ours)
        return [each.memory[: each.count] for each in ours]

    def _merge(self, messages: list[npt.NDArray[np.uint8]]) -> None:
        """The mean of the weights, as they have been read, and of those received that lie ahead of
        this rank."""
        taken = []
        for message in messages:
            if self._codec is None:
                theirs = torch.from_numpy(message.view(np.float32))
            else:
                unpacked = np.zeros(self._now.flat.numel(), np.float32)
                self._codec.add(message, unpacked)
                theirs = torch.from_numpy(unpacked)
            if self._lies_ahead(theirs):
                taken.append(theirs)
        self._accepted += len(taken)
        self._refused += len(messages) - len(taken)
        if not taken:
            return
        for now, before, *others in self._parts(self._before, *taken):
            for theirs in others:
                now += theirs
            before.copy_(now.div_(1 + len(taken)))
        for parameter, view in zip(self._now.parameters, self._now.views, strict=True):
            parameter.copy_(view)

    def _lies_ahead(self, theirs: torch.Tensor) -> bool:
        product = 0.0
        for now, before, other in self._parts(self._before, theirs):
            product += float(torch.dot(now - before, other - before))
        return product > 0

    def _parts(self, *others: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Parts of the weights, and of others along them, that a core's cache holds: a whole
        network's differences are as dear to allocate as to compute."""
        whole = [self._now.flat, *others]
        for start in range(0, self._now.flat.numel(), _PART):
            yield [each[start : start + _PART] for each in whole]

    def _clear_sent(self) -> None:
        gone = [sent for sent in self._sends if all(each.done() for each in sent.requests)]
        # Of another layout's messages the memory is of another length.
        self._out += [sent.memory for sent in gone if len(sent.memory) == self._longest]
        self._sends = [sent for sent in self._sends if sent not in gone]

    def _time_to_send(self) -> bool:
        """Once an interval, and while the queue is short."""
        self._clear_sent()
        self._steps += 1
        if self._steps < self._interval:
            return False
        self._steps = 0
        if len(self._sends) >= _QUEUE:
            self._interval = min(_LONGEST, 2 * self._interval)
            return False
        self._interval = max(1.0, 0.9 * self._interval)
        return True

    def _send(self) -> None:
        """Tell a random rank."""
        peer = self._random.choice(self._peers)
        memory = self._out.pop() if self._out else np.empty(self._longest, np.uint8)
        used = self._longest
        if self._codec is None:
            memory.view(np.float32)[:] = self._now.array
        else:
            used = self._codec.encode(self._now.array, np.zeros_like(self._now.array), memory)
        self._sent[peer] += 1
        notice = np.array([self._sent[peer], self._version, used])
        requests = [
            self._comm.isend(notice.view(np.uint8), peer, _NOTICE),
            self._comm.isend(memory[:used], peer, _WEIGHTS),
        ]
        self._sends.append(_Sent(requests, memory, notice))
        self._messages += 2
        self._bytes += used + notice.nbytes
