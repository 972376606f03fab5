"""Messages over TCP, for ranks of torch.distributed.

Gloo cannot test for a message without blocking. Connections, and their protection,
are `dlio.comm.net`'s.

A receiver takes no memory for more than it is owed. Messages up to 64 KiB travel at once. Of a
longer one, the sender first announces the length; its body follows when a receive of that length
has been posted. A longer body than the receive's memory is refused, on both sides in one line that
names the other.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from dlio.comm.deadlines import poll
from dlio.comm.net.address import listen
from dlio.comm.net.hub import CLOSE_TIMEOUT_S, Hub
from dlio.comm.net.keys import Keys, RefusedConnection, job_secret
from dlio.comm.net.peer_link import FrameHead, PeerLink
from dlio.errors import CommError
from dlio.util.units import counted

Channel: TypeAlias = tuple[int, int]
"""Numbers of a generation of ranks and of a communicator: messages of two channels never mix."""

_CANCEL_TIMEOUT_S: Final = 1.0
_WHOLE, _ANNOUNCED, _BODY, _GO, _REFUSED, _UNWANTED = range(6)
"""Kinds of frames. A receiver that closes does not want the messages announced to it."""
_MESSAGES: Final = (_WHOLE, _ANNOUNCED, _BODY)
_ANSWERS: Final = (_GO, _REFUSED, _UNWANTED)
_MOST_AT_ONCE: Final = 1 << 16
"""Bytes of the longest message that travels without being asked for."""
_MOST_EARLY: Final = 1 << 12
"""Messages of one peer that may wait for their receives."""


class Message:
    """A send or receive under way."""

    def __init__(
        self, view: memoryview, withdraw: Callable[["Message"], bool], generation: int = 0
    ) -> None:
        self.view = view
        self.generation = generation
        self.over = False
        self.error: CommError | None = None
        self.unreachable = False
        """True if the error is a lost connection."""
        self._withdraw = withdraw

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over

    def cancel(self) -> bool:
        return poll(lambda: self.over or self._withdraw(self), _CANCEL_TIMEOUT_S)


_Key: TypeAlias = tuple[int, Channel, int]
"""Source, channel, tag."""
_Link: TypeAlias = PeerLink[Message]
_Asked: TypeAlias = tuple[_Link, int]
"""A link, and the number of a message that was announced on it."""


@dataclass(slots=True, eq=False)
class _EarlyMessage:
    """A message that has come before its receive."""

    generation: int
    peer: int
    size: int
    body: memoryview | None
    """None where it is only announced."""
    asked: _Asked


class Mail:
    """Messages by (source, channel, tag), in the order in which they were sent.

    Owns a socket that listens at `address`, where others reach this rank, the connections and the
    thread that moves bytes. `allgather` returns the values of all ranks.
    """

    with_body = frozenset((_WHOLE, _BODY))

    def __init__(
        self,
        rank: int,
        allgather: Callable[[tuple[str, int, str]], Sequence[tuple[str, int, str]]],
        address: str,
    ) -> None:
        self._posted: dict[_Key, deque[Message]] = {}
        self._early: dict[_Key, deque[_EarlyMessage]] = {}
        self._waiting: dict[int, int] = {}
        """Number of early messages by peer."""
        self._oldest = 0
        """Number of the oldest generation whose messages are taken."""
        self._queues: dict[int, deque[tuple[FrameHead, Message]]] = {}
        self._announced: dict[_Asked, Message] = {}
        """Sends whose bodies nobody has asked for yet."""
        self._awaited: dict[_Asked, tuple[_Key, Message | None]] = {}
        """Receives whose bodies were asked for; None where the body is to be skipped."""
        self._arriving: dict[_Link, tuple[_Key, Message | None]] = {}
        self._small: dict[_Link, tuple[_Key, _EarlyMessage]] = {}
        """Messages that arrive before their receives."""
        self._replies: deque[tuple[_Link, FrameHead]] = deque()
        self._number = 0
        self._ends_at: float | None = None
        self._lock = threading.Lock()
        """Taken after the hub's `moving`."""
        keys, listener = Keys(rank, job_secret()), listen(address)
        try:
            port = int(listener.getsockname()[1])
            everyone = allgather((address, port, keys.public()))
            keys.meet([public for _, _, public in everyone])
            addresses = [(host, port) for host, port, _ in everyone]
            self._hub: Hub[Message] = Hub(keys, listener, addresses, self)
        except BaseException:
            listener.close()
            raise
        self._hub.start()

    def send(self, view: memoryview, dest: int, tag: int, channel: Channel = (0, 0)) -> Message:
        message = Message(view, lambda _: False, channel[0])
        # Large bodies are announced first and sent when a receive is there (`push`): a slow
        # receiver would otherwise have to hold gigabytes of messages that it does not expect yet.
        frame = FrameHead(_WHOLE, *channel, tag, 0, len(view))
        with self._lock:
            self._queues.setdefault(dest, deque()).append((frame, message))
        self._hub.wake()
        return message

    def receive(
        self, view: memoryview, source: int, tag: int, channel: Channel = (0, 0)
    ) -> Message:
        key = (source, channel, tag)
        message = Message(view, lambda m: self._withdraw(key, m), channel[0])
        with self._lock:
            early = self._early.get(key)
            if not early:
                self._posted.setdefault(key, deque()).append(message)
                return message
            first = early.popleft()
            self._waiting[source] -= 1
            if not early:
                del self._early[key]
            self._match(key, first, message)
        if not message.over:
            self._hub.wake()
        return message

    def close(self) -> None:
        """Stop after all sends have left, within a deadline."""
        self._hub.close()

    def give_up(self, message: Message) -> None:
        """Never touch a message's memory again; its generation is over."""
        self._drop(lambda each: each is message, lambda _: False)

    def retire(self, oldest: int) -> None:
        """Drop all messages of generations before `oldest`, also those that arrive later."""
        self._oldest = oldest
        self._drop(lambda each: each.generation < oldest, lambda each: each.generation < oldest)

    def _drop(
        self, chosen: Callable[[Message], bool], early: Callable[[_EarlyMessage], bool]
    ) -> None:
        # `moving` first: no byte may be on its way into memory that its owner is about to reuse.
        with self._hub.moving, self._lock:
            for key, messages in list(self._posted.items()):
                self._posted[key] = deque(each for each in messages if not chosen(each))
                if not self._posted[key]:
                    del self._posted[key]
            self._drop_early(early)
            for asked, (key, message) in self._awaited.items():
                if message is not None and chosen(message):
                    self._awaited[asked] = (key, None)
            for link, (key, message) in self._arriving.items():
                if message is not None and chosen(message):
                    self._arriving[link] = (key, None)
                    link.skip()
            for dest, queued in self._queues.items():
                self._queues[dest] = deque(each for each in queued if not chosen(each[1]))
            announced = self._announced.items()
            self._announced = {asked: each for asked, each in announced if not chosen(each)}
            for link in self._hub.links:
                link.disown(chosen)

    def _drop_early(self, chosen: Callable[[_EarlyMessage], bool]) -> None:
        for key, messages in list(self._early.items()):
            kept = deque(each for each in messages if not chosen(each))
            self._waiting[key[0]] -= len(messages) - len(kept)
            self._early[key] = kept
            if not kept:
                del self._early[key]

    def _withdraw(self, key: _Key, message: Message) -> bool:
        with self._lock:
            posted = self._posted.get(key)
            if posted and message in posted:
                posted.remove(message)
                return True
            return message.over

    # Receiving: `_lock` is held.

    def _match(self, key: _Key, early: _EarlyMessage, message: Message) -> None:
        """Give a receive the message that has come for it."""
        if early.size > len(message.view):
            message.error = CommError(
                f"a message of {early.size} bytes came where {len(message.view)} were expected: "
                f"rank {early.peer} has sent it, and may have other data or another version of dlio"
            )
            if early.body is None:
                self._answer(early.asked, _REFUSED, len(message.view))
            return
        message.view = message.view[: early.size]
        if early.body is None:
            self._awaited[early.asked] = (key, message)
            self._answer(early.asked, _GO, early.size)
            return
        message.view[:] = early.body
        message.over = True

    def _answer(self, asked: _Asked, kind: int, size: int) -> None:
        link, number = asked
        self._replies.append((link, FrameHead(kind, 0, 0, 0, number, size)))

    def _come(self, key: _Key, early: _EarlyMessage) -> None:
        """Give a message that has come to its receive, or keep it. Raises RefusedConnection."""
        posted = self._posted.get(key)
        if posted:
            message = posted.popleft()
            if not posted:
                del self._posted[key]
            self._match(key, early, message)
        elif early.generation >= self._oldest:
            count = self._waiting.get(early.peer, 0)
            # A rank with another program could fill this one's memory with messages that nobody
            # takes.
            if count >= _MOST_EARLY:
                raise RefusedConnection(
                    f"it has sent {counted(count, 'message')} that nobody expects"
                )
            self._waiting[early.peer] = count + 1
            self._early.setdefault(key, deque()).append(early)
            if early.body is None and self._ends_at is not None:
                self._answer(early.asked, _UNWANTED, 0)

    # Called by the hub

    def take(self, link: _Link, frame: FrameHead) -> memoryview | None:
        if frame.kind not in (_ANSWERS if link.calls else _MESSAGES):
            raise RefusedConnection(f"it has sent a frame of kind {frame.kind}")
        if frame.kind == _WHOLE:
            return self._take_whole(link, frame)
        if frame.kind == _BODY:
            with self._lock:
                awaited = self._awaited.pop((link, frame.number), None)
                if awaited is None:
                    raise RefusedConnection(f"it has sent {frame.size} bytes that nobody asked for")
                message = awaited[1]
                if message is not None and frame.size != len(message.view):
                    self._restore(*awaited)
                    raise RefusedConnection(
                        f"it has sent {frame.size} bytes, and announced {len(message.view)}"
                    )
                self._arriving[link] = awaited
                return None if message is None else message.view
        return None

    def _take_whole(self, link: _Link, frame: FrameHead) -> memoryview | None:
        if frame.size > _MOST_AT_ONCE:
            raise RefusedConnection(
                f"it has sent a message of {frame.size} bytes unasked, and {_MOST_AT_ONCE} are the "
                "most"
            )
        key = _key(link, frame)
        with self._lock:
            posted = self._posted.get(key)
            if posted and frame.size <= len(posted[0].view):
                message = posted.popleft()
                if not posted:
                    del self._posted[key]
                message.view = message.view[: frame.size]
                self._arriving[link] = (key, message)
                return message.view
        # Memory is taken for bytes that have come, at most `_MOST_AT_ONCE`, and never for what is
        # announced.
        body = memoryview(bytearray(frame.size))
        early = _EarlyMessage(frame.generation, link.peer, frame.size, body, (link, 0))
        self._small[link] = (key, early)
        return body

    def taken(self, link: _Link, frame: FrameHead) -> None:
        asked = (link, frame.number)
        if frame.kind == _ANNOUNCED:
            early = _EarlyMessage(frame.generation, link.peer, frame.size, None, asked)
            with self._lock:
                self._come(_key(link, frame), early)
        elif link in self._small:
            with self._lock:
                self._come(*self._small.pop(link))
        elif link in self._arriving:
            with self._lock:
                _, message = self._arriving.pop(link)
                if message is not None:
                    message.over = True
        else:
            self._answered(link, frame)

    def _answered(self, link: _Link, frame: FrameHead) -> None:
        """Go on with a message that this rank has announced, unless it was dropped meanwhile."""
        with self._lock:
            message = self._announced.pop((link, frame.number), None)
        if message is None:
            return
        if frame.kind == _GO:
            body = FrameHead(_BODY, 0, 0, 0, frame.number, len(message.view))
            link.send(body, message.view, message)
        elif frame.kind == _REFUSED:
            message.error = CommError(
                f"rank {link.peer} refused a message of {len(message.view)} bytes: it expected "
                f"{frame.size}"
            )
        else:
            message.over = True

    def sent(self, message: Message) -> None:
        message.over = True

    def waiting(self) -> list[int]:
        with self._lock:
            return [dest for dest, queued in self._queues.items() if queued]

    def push(self, peer: int, link: _Link) -> None:
        with self._lock:
            queued = self._queues.get(peer)
            while queued:
                frame, message = queued.popleft()
                if frame.size <= _MOST_AT_ONCE:
                    link.send(frame, message.view, message)
                    continue
                self._number += 1
                self._announced[link, self._number] = message
                link.send(frame._replace(kind=_ANNOUNCED, number=self._number))

    def reply(self) -> list[_Link]:
        with self._lock:
            replies, self._replies = self._replies, deque()
        for link, frame in replies:
            if not link.closed:
                link.send(frame)
        return list({link for link, _ in replies})

    def lost(self, peer: int, link: _Link, error: CommError) -> None:
        with self._lock:
            messages = [message for _, message in self._queues.pop(peer, ())] + link.owners()
            for asked in [asked for asked in self._announced if asked[0] is link]:
                messages.append(self._announced.pop(asked))
        for message in messages:
            message.error, message.unreachable = error, True

    def ended(self, link: _Link) -> None:
        with self._lock:
            self._small.pop(link, None)
            if link in self._arriving:
                self._restore(*self._arriving.pop(link))
            for asked in [asked for asked in self._awaited if asked[0] is link]:
                self._restore(*self._awaited.pop(asked))
            self._drop_early(lambda each: each.body is None and each.asked[0] is link)

    def _restore(self, key: _Key, message: Message | None) -> None:
        """Put a receive back whose body will not come: nothing writes to its memory any more."""
        if message is not None and message.generation >= self._oldest:
            self._posted.setdefault(key, deque()).appendleft(message)

    def over(self, stopping: bool) -> bool:
        if not stopping:
            return False
        with self._lock:
            if self._ends_at is None:
                self._ends_at = time.monotonic() + CLOSE_TIMEOUT_S
                # Nobody here will ask for messages that others have announced.
                for each in itertools.chain(*self._early.values()):
                    if each.body is None:
                        self._answer(each.asked, _UNWANTED, 0)
            pending = any(self._queues.values()) or bool(self._announced or self._replies)
        pending = pending or not all(link.idle for link in self._hub.links if link.ready)
        return not pending or time.monotonic() > self._ends_at


def _key(link: _Link, frame: FrameHead) -> _Key:
    return link.peer, (frame.generation, frame.channel), frame.tag
