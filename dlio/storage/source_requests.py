"""Whole blocks out of the source, with many requests in flight at a time.

Over a file system with latency, one request after another starves. Samples of a block are read in
parallel where each is a file of its own, and pieces of the block where it is one range of a file.
The threads are few and shared by all blocks that are being read; whoever asks for blocks bounds
the bytes in flight.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader, StoredBlocks
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block_format import encode_block
from dlio.storage.file_system_kind import file_system_of
from dlio.storage.large import read_samples
from dlio.util.buffer_pool import BufferLease, BufferPool
from dlio.util.forks import new_lock
from dlio.util.threads import Workers

_PIECE_BYTES: Final = 1 << 20
"""Bytes of a range that is read in parallel with its neighbours."""
_FILES_PER_TASK: Final = 4
_SPARE_BLOCKS: Final = 8
_JOIN_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.5

T = TypeVar("T")
R = TypeVar("R")


def piece_bytes(stripe_bytes: int) -> int:
    """Return the size of a request, chosen so that none touches two stripes of a Lustre file."""
    if not stripe_bytes or stripe_bytes % _PIECE_BYTES == 0:
        return _PIECE_BYTES
    return stripe_bytes * max(1, _PIECE_BYTES // stripe_bytes)


def _cuts(start: int, size: int, piece: int) -> list[int]:
    """Return the ends of a range's pieces, counted from its start: multiples of `piece` in the
    file."""
    return [*range(piece - start % piece, size, piece), size]


class Throttle:
    """Limits the bytes per second of all threads together. Thread-safe.

    Args:
        rate: bytes per second.
        stopping: ends the waiting when it is set.
    """

    def __init__(self, rate: float, stopping: threading.Event) -> None:
        self._rate = rate
        self._stopping = stopping
        self._free_at = time.monotonic()
        self._lock = new_lock()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may be read."""
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + count / self._rate
        self._stopping.wait(max(0.0, begins - time.monotonic()))


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A block as it came from the source. Works as a context manager, which frees its memory."""

    pieces: list[Buffer]
    """The block's bytes, one buffer after another."""
    source_bytes: int
    """Payload bytes that were read from the source for it."""
    lease: BufferLease | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the memory back; the pieces must not be used after this."""
        self.pieces.clear()
        if self.lease is not None:
            self.lease.release()


class SourceRequests:
    """Reads blocks of a data set. Thread-safe. Owner: the hierarchy.

    Args:
        reader: of the source; not owned.
        requests: in flight at a time; 1 reads in the caller's own thread.
        rate: bytes per second at most; None for no limit.
        timeout_s: seconds for a block until its source is taken to hang.
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
        # Parallel pieces pay off where a request takes long; a disk wants whole ranges.
        place = file_system_of(reader.path)
        self._piece = piece_bytes(place.stripe_bytes) if place.network else 0
        self._timeout_s = timeout_s
        self._pool = BufferPool(_SPARE_BLOCKS, waste=_PIECE_BYTES)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers = Workers(
            "dlio-intake",
            self._run,
            requests if requests > 1 else 0,
            wake=self._wake,
            stop_timeout_s=_JOIN_TIMEOUT_S,
        )
        self.stopping = self._workers.stopping
        """Set when the intake is being closed: nobody should wait for blocks any more."""
        self._throttle = Throttle(rate, self.stopping) if rate is not None else None
        self._workers.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def block(self, block: int, known: Mapping[int, Buffer] | None = None) -> SourceBlock:
        """Read a block; whoever gets it releases it.

        Args:
            known: payloads by sample that need not be read, of a source of single objects.

        Raises SourceError or CorruptBlock, naming the part that cannot be read.
        """
        if isinstance(self.reader, StoredBlocks):
            return self._stored(self.reader, block)
        return self._encoded(block, known or {})

    def samples(self, samples: npt.NDArray[np.int64], block: int) -> list[Buffer]:
        """Return payloads of the source, a large one read in parts by several threads.

        Args:
            block: named in errors.

        Raises SourceError or CorruptBlock.
        """
        return read_samples(
            self.reader,
            samples,
            self._piece if self._workers else 0,
            lambda read, parts: self.map(read, parts, block),
        )

    def map(self, function: Callable[[T], R], items: Sequence[T], block: int) -> list[R]:
        """Call `function` on each item in parallel, and return the results in order.

        Without threads, as in a forked child, one after another.

        Args:
            block: named in errors.

        Raises the first error when all are done, SourceError when they are not done in time.
        """
        if not self._workers:
            return [function(item) for item in items]
        results: list[R | None] = [None] * len(items)
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
        self._wait(left, len(items), block)
        if errors:
            raise errors[0]
        return cast("list[R]", results)

    def stop(self) -> None:
        """Give up the requests that wait; those under way end by themselves."""
        self._workers.stop()

    def close(self) -> None:
        """Stop after the requests under way. A source that hangs is not waited for."""
        self._workers.close()
        self._pool.clear()

    def _wait(self, done: threading.Semaphore, count: int, block: int) -> None:
        """Wait until `done` was released `count` times."""
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for _ in range(count):
            while not done.acquire(timeout=_POLL_S):
                if self.stopping.is_set():
                    raise SourceError(f"block {block} was given up: the tier is being closed")
                if deadline is not None and time.monotonic() > deadline:
                    raise SourceError(
                        f"block {block} of {self.reader.path} was not read within "
                        f"{self._timeout_s:.0f} s: the source hangs, or is slower than that"
                    )

    def _encoded(self, block: int, known: Mapping[int, Buffer]) -> SourceBlock:
        """Make a block of a source that stores samples."""
        reader = self.reader
        whole = reader.layout.samples_of(block)
        here = {n: known[n] for n in whole.tolist() if n in known} if known else {}
        samples = np.array([n for n in whole.tolist() if n not in here], np.int64)
        if self._throttle is not None:
            self._throttle.take(int(reader.sizes[samples].sum()))
        if reader.objects and self._workers and len(samples) > 1:
            step = _FILES_PER_TASK
            parts = [samples[k : k + step] for k in range(0, len(samples), step)]
            payloads: list[Buffer] = []
            for part in self.map(reader.read, parts, block):
                payloads += part
        else:
            payloads = self.samples(samples, block) if len(samples) else []
        source_bytes = sum(len(payload) for payload in payloads)
        if here:
            fresh = iter(payloads)
            payloads = [bytes(here[n]) if n in here else next(fresh) for n in whole.tolist()]
        pieces = encode_block(
            payloads, block=block, fingerprint=reader.fingerprint, schema=reader.schema
        )
        return SourceBlock(pieces, source_bytes)

    def _stored(self, reader: StoredBlocks, block: int) -> SourceBlock:
        """Copy a block of a source that stores blocks."""
        size = int(reader.block_bytes[block])
        if self._throttle is not None:
            self._throttle.take(size)
        lease = self._pool.take(size)
        memory = lease.array.data
        if self._workers and self._piece and size > self._piece:
            ends = _cuts(reader.stored_at(block), size, self._piece)
            # After an error a request may still be under way: the lease is dropped, not released.
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
            # Retry once: the damage may have happened in transit.
            reader.read_stored(block, memory)
            reader.check_stored(block, memory)
        return SourceBlock([memory], size, lease)

    def _wake(self) -> None:
        for _ in range(len(self._workers)):
            self._tasks.put(None)

    def _run(self, _: int) -> None:
        while (task := self._tasks.get()) is not None and not self.stopping.is_set():
            task()
