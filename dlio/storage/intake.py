"""The intake: whole blocks out of the source, with many requests in flight at a time.

Over a file system with latency, one request after another starves: a block's samples are read
side by side where each is a file of its own, and pieces of it where it is one stretch of a file.
The threads are shared by all blocks that are being read, and are few; what is in flight is bounded
by bytes, by whoever asks for blocks.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader, StoredBlocks
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block import encode_block
from dlio.storage.places import find_place
from dlio.util.threads import Workers

PIECE_BYTES: Final = 1 << 20
"""Of a stretch that is read with its neighbours at the same time."""
_FILES_A_TASK: Final = 4
_SPARE: Final = 8
"""Blocks' memory that is kept for the next."""
_JOIN_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.5

T = TypeVar("T")
R = TypeVar("R")


def piece_bytes(stripe_bytes: int) -> int:
    """How much a request asks for, so that none touches two stripes of a Lustre file."""
    if not stripe_bytes or stripe_bytes % PIECE_BYTES == 0:
        return PIECE_BYTES
    return stripe_bytes * max(1, PIECE_BYTES // stripe_bytes)


def _cuts(start: int, size: int, piece: int) -> list[int]:
    """Where the pieces of a stretch end, counted from its start: at multiples of `piece` in the
    file."""
    return [*range(piece - start % piece, size, piece), size]


class Throttle:
    """Lets a number of bytes a second through, for all threads together.

    Args:
        rate: bytes a second.
        closing: ends the waiting.
    """

    def __init__(self, rate: float, closing: threading.Event) -> None:
        self._rate = rate
        self._closing = closing
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may be read."""
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + count / self._rate
        self._closing.wait(max(0.0, begins - time.monotonic()))


class Intake:
    """Reads blocks of a data set. Thread-safe. Owner: the hierarchy.

    Args:
        reader: of the source; not owned.
        requests: in flight at a time; 1 reads in the caller's own thread.
        rate: bytes a second at most, None for all there are.
        timeout_s: for a block, before its source is taken to hang.
    """

    def __init__(
        self,
        reader: Reader,
        requests: int = 1,
        rate: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.reader = reader
        self.requests = requests
        # Pieces side by side pay where a request takes long; a disk wants its stretches whole.
        place = find_place(reader.path)
        self._piece = piece_bytes(place.stripe_bytes) if place.network else 0
        self._timeout_s = timeout_s
        self._workers = Workers(
            "dlio-intake",
            self._run,
            requests if requests > 1 else 0,
            wake=self._wake,
            stop_timeout_s=_JOIN_TIMEOUT_S,
        )
        self._closing = self._workers.stopping
        self._throttle = Throttle(rate, self._closing) if rate is not None else None
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._spare_lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def block(
        self, block: int, known: Mapping[int, Buffer] | None = None
    ) -> tuple[list[Buffer], int]:
        """(a block as pieces to be written, payload bytes that were read for it).

        Args:
            known: payloads that are here already, by sample, of a source of single objects.

        Raises SourceError or CorruptBlock, naming what cannot be read.
        """
        reader = self.reader
        if isinstance(reader, StoredBlocks):
            return self._stored(reader, block)
        samples = whole = reader.layout.samples_of(block)
        here: dict[int, Buffer] = (
            {n: known[n] for n in whole.tolist() if n in known} if known else {}
        )
        if here:
            samples = np.array([n for n in whole.tolist() if n not in here], np.int64)
        if self._throttle is not None:
            self._throttle.take(int(reader.sizes[samples].sum()))
        if reader.objects and self._workers and len(samples) > 1:
            parts = [samples[k : k + _FILES_A_TASK] for k in range(0, len(samples), _FILES_A_TASK)]
            payloads = [payload for part in self.map(reader.read, parts, block) for payload in part]
        else:
            payloads = list(reader.read(samples)) if len(samples) else []
        size = sum(len(payload) for payload in payloads)
        if here:
            fresh = iter(payloads)
            payloads = [bytes(here[n]) if n in here else next(fresh) for n in whole.tolist()]
        pieces = encode_block(
            payloads, block=block, fingerprint=reader.fingerprint, schema=reader.schema
        )
        return pieces, size

    def map(self, function: Callable[[T], R], items: Sequence[T], block: int) -> list[R]:
        """`function` of each item, side by side; the first error is raised when all are done.

        Raises SourceError when they are not done in time.
        """
        results: list[Any] = [None] * len(items)
        errors: list[BaseException] = []
        left = threading.Semaphore(0)

        def task(k: int) -> Callable[[], None]:
            def run() -> None:
                try:
                    if not errors:
                        results[k] = function(items[k])
                except BaseException as error:
                    errors.append(error)
                finally:
                    left.release()

            return run

        for k in range(len(items)):
            self._tasks.put(task(k))
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for _ in items:
            while not left.acquire(timeout=_POLL_S):
                if self._closing.is_set():
                    raise SourceError(f"block {block} was given up: the tier is being closed")
                if deadline is not None and time.monotonic() > deadline:
                    raise SourceError(
                        f"block {block} of {self.reader.path} was not read within "
                        f"{self._timeout_s:.0f} s: the source hangs, or is slower than that"
                    )
        if errors:
            raise errors[0]
        return results

    def stop(self) -> None:
        """Give up what waits for requests; those under way end on their own."""
        self._workers.stop()

    def close(self) -> None:
        """Stop after the requests under way; a source that hangs is not waited for."""
        self._workers.close()
        self._spare.clear()

    def _stored(self, reader: StoredBlocks, block: int) -> tuple[list[Buffer], int]:
        size = int(reader.block_bytes[block])
        if self._throttle is not None:
            self._throttle.take(size)
        memory = self._memory(size)
        if self._workers and self._piece and size > self._piece:
            ends = _cuts(reader.stored_at(block), size, self._piece)
            self.map(
                lambda part: reader.read_stored(block, memory[part[0] : part[1]], part[0]),
                list(itertools.pairwise([0, *ends])),
                block,
            )
        else:
            reader.read_stored(block, memory)
        try:
            reader.check_stored(block, memory)
        except CorruptBlock:
            # Once more: it may have been on its way that it was damaged.
            reader.read_stored(block, memory)
            reader.check_stored(block, memory)
        return [memory], size

    def give_back(self, pieces: Sequence[Buffer]) -> None:
        """Take the memory of a block that `block` gave, for the next: touching fresh memory costs
        as much as reading into it."""
        if len(pieces) == 1 and isinstance(pieces[0], memoryview):
            owner = pieces[0].obj
            if isinstance(owner, np.ndarray):
                with self._spare_lock:
                    if len(self._spare) < _SPARE:
                        self._spare.append(owner)

    def _memory(self, size: int) -> memoryview:
        with self._spare_lock:
            for k, spare in enumerate(self._spare):
                if size <= len(spare) <= 2 * size + PIECE_BYTES:
                    return self._spare.pop(k).data[:size]
        return np.empty(size, np.uint8).data

    def _wake(self) -> None:
        for _ in range(len(self._workers)):
            self._tasks.put(None)

    def _run(self, _: int) -> None:
        while (task := self._tasks.get()) is not None and not self._closing.is_set():
            task()
