"""Reads of the source: a block at a time, with many requests in flight."""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.open_files import ReadRange, open_ranges
from dlio.data.reader_contract import RangedSamples, Reader, StoredBlocks, abilities_of
from dlio.data.requests import are_observed
from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, SourceError
from dlio.image.native.payloads import can_read_payloads, read_payloads
from dlio.storage.block import ENTRY, aligned, complete_head, encode_block, table_offset
from dlio.storage.file_system_kind import file_system_of
from dlio.util.buffer_pool import BufferPool
from dlio.util.closable import Closable
from dlio.util.forks import new_lock
from dlio.util.memory import new_memory
from dlio.util.threads import Workers

_PIECE_BYTES: Final = 1 << 20
"""Bytes of a range that is read in parallel with its neighbours."""
_FILES_PER_TASK: Final = 4
_LOCAL_FILES_PER_TASK: Final = 64
_SPARE_BLOCKS: Final = 8
_REQUESTS_TIMEOUT_S: Final = 2.0
_REQUEST_LOOK_S: Final = 0.5

T = TypeVar("T")
R = TypeVar("R")


def members(held: Collection[int], samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples that are in a set, or keys of a dictionary."""
    return np.fromiter(map(held.__contains__, samples.tolist()), np.bool_, len(samples))


def piece_bytes(stripe_bytes: int) -> int:
    """Return the size of a request, chosen so that none touches two stripes of a Lustre file."""
    if not stripe_bytes or stripe_bytes % _PIECE_BYTES == 0:
        return _PIECE_BYTES
    return stripe_bytes * max(1, _PIECE_BYTES // stripe_bytes)


class SourceRequests(Closable):
    """Reads blocks of a data set. Thread-safe. Owner: the hierarchy. `requests` are in flight at a
    time; 1 reads in the caller's own thread. `rate` is in bytes per second, and `timeout_s` for a
    block until its source is taken to hang; None for no limit."""

    def __init__(
        self,
        reader: Reader,
        requests: int = 1,
        rate: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.reader = reader
        self.requests = requests
        abilities = abilities_of(reader)
        self._locate = abilities.locate if abilities.flow is None else None
        # Parallel pieces pay off where a request takes long; a disk wants whole ranges.
        place = file_system_of(reader.path)
        self._piece = piece_bytes(place.stripe_bytes) if place.network else 0
        self._timeout_s = timeout_s
        # The first touch of new pages costs as much as reading into them.
        self._pool = BufferPool(_SPARE_BLOCKS, waste=_PIECE_BYTES)
        self._tasks: _Tasks = queue.SimpleQueue()
        # The threads refer to the queue only: they would keep a data set that is dropped alive, and
        # with it its files and tiers.
        count = requests if requests > 1 else 0
        tasks = self._tasks
        self._workers = Workers(
            "dlio-intake",
            lambda _: _work(tasks),
            count,
            wake=lambda: _end(tasks, count),
            stop_timeout_s=_REQUESTS_TIMEOUT_S,
        )
        # Takes no lock: a garbage collector runs anywhere.
        weakref.finalize(self, _end, tasks, count).atexit = False
        self.stopping = self._workers.stopping
        """Set when the requests are being closed: nobody should wait for blocks any more."""
        self._rate = rate
        self._free_at = time.monotonic()
        """Time from which on more bytes may be read, by the rate."""
        self._lock = new_lock()
        self._workers.start()

    @contextmanager
    def block(
        self, block: int, known: Mapping[int, Buffer] | None = None
    ) -> Iterator[tuple[list[Buffer], int]]:
        """Read a block; its memory is used again when nothing refers to it. `known` has payloads by
        sample that need not be read, of a source of single objects.

        Yields (the block's bytes, one buffer after another; payload bytes that were read for it).
        Raises SourceError or CorruptBlock, naming the part that cannot be read.
        """
        if not isinstance(self.reader, StoredBlocks):
            yield self._encoded(block, known or {})
            return
        size = int(self.reader.block_bytes[block])
        # Lent: after an error a request may still be under way, which refers to the memory.
        memory = self._pool.lend(size).data
        self._read_stored(self.reader, block, memory)
        yield [memory], size

    def samples(self, samples: npt.NDArray[np.int64], block: int) -> list[Buffer]:
        """Return payloads of the source, a large one read in parts by several threads. `block` is
        named in errors.

        Raises SourceError or CorruptBlock.
        """
        reader = self.reader
        piece = self._piece if self._workers else 0
        if not piece or len(samples) != 1 or not isinstance(reader, RangedSamples):
            return list(reader.read(samples))
        # Over a network a large file is as slow as its requests one after another: 25 MB/s at 5 ms.
        # So a sample of several requests is read by several threads, through one opening of a file.
        sample = int(samples[0])
        ranges = reader.ranges_of(sample)
        if sum(size for _, _, size in ranges) <= piece:
            return list(reader.read(samples))
        parts = [new_memory(size) for _, _, size in ranges]
        requests: list[tuple[ReadRange, int, memoryview]] = []
        with ExitStack() as stack:
            for (file, offset, size), memory in zip(ranges, parts, strict=True):
                read = stack.enter_context(open_ranges(file))
                requests += [
                    (read, offset + at, memory[at : at + piece]) for at in range(0, size, piece)
                ]
            self.map(lambda request: request[0](request[1], request[2]), requests, block)
        return [reader.payload_of(sample, parts)]

    def map(self, function: Callable[[T], R], items: Sequence[T], block: int) -> list[R]:
        """Call `function` on each item in parallel, and return the results in order.

        Without threads, as in a forked child, one after another. `block` is named in errors.

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
            while not done.acquire(timeout=_REQUEST_LOOK_S):
                if self.stopping.is_set():
                    raise SourceError(f"block {block} was given up: the tier is being closed")
                if deadline is not None and time.monotonic() > deadline:
                    raise SourceError(
                        f"block {block} of {self.reader.path} was not read within "
                        f"{self._timeout_s:.0f} s: the source hangs, or is slower than that"
                    )

    def _encoded(self, block: int, known: Mapping[int, Buffer]) -> tuple[list[Buffer], int]:
        """Make a block of a source that stores samples; return its bytes, and those read."""
        reader = self.reader
        whole = reader.layout.samples_of(block)
        here = {n: known[n] for n in whole.tolist() if n in known} if known else {}
        samples = np.array([n for n in whole.tolist() if n not in here], np.int64)
        self._throttle(int(reader.sizes[samples].sum()))
        if (memory := self._in_one_piece(block, whole, here)) is not None:
            return [memory], int(reader.sizes[samples].sum())
        payloads: list[Buffer] = []
        if len(samples):
            for some in self._in_parts(lambda part: self.samples(part, block), samples, block):
                payloads += some
        source_bytes = sum(len(payload) for payload in payloads)
        if here:
            fresh = iter(payloads)
            payloads = [bytes(here[n]) if n in here else next(fresh) for n in whole.tolist()]
        pieces = encode_block(
            payloads, block=block, fingerprint=reader.fingerprint, schema=reader.schema
        )
        return pieces, source_bytes

    def _in_parts(
        self, read: Callable[[npt.NDArray[np.int64]], R], samples: npt.NDArray[np.int64], block: int
    ) -> list[R]:
        """Call `read` for the samples of a block: for some at a time, in parallel, where each is an
        object of its own."""
        # Spread over up to 64 requests, 700 files/s come through a file system of 2 ms, where
        # `cp -r` has 33. On a disk a task costs more than some reads.
        step = _FILES_PER_TASK if self._piece else _LOCAL_FILES_PER_TASK
        if not (self.reader.objects and self._workers and len(samples) > step):
            return [read(samples)]
        parts = [samples[k : k + step] for k in range(0, len(samples), step)]
        return self.map(read, parts, block)

    def _in_one_piece(
        self, block: int, samples: npt.NDArray[np.int64], known: Mapping[int, Buffer]
    ) -> memoryview | None:
        """Return a block whose samples, but for those whose payloads are `known`, lie where the
        reader can tell: the native library reads them into it. None if that cannot read one, for a
        reason that the reader then says."""
        reader = self.reader
        if self._locate is None or are_observed() or not can_read_payloads():
            return None
        if not reader.objects:
            return None  # The reader's ranges have many samples each, and take fewer calls.
        sizes = np.asarray(reader.sizes[samples], np.int64)
        places = np.arange(len(samples), dtype=np.int64)
        left = places[~members(known, samples)] if known else places
        located = self._locate(samples, np.full(len(samples), block, np.int64), places)
        if not (located.known & (located.raw == sizes))[left].all():
            return None
        room = aligned(sizes)
        table = np.zeros(len(samples), ENTRY)
        first = table_offset(len(reader.schema.to_json().encode())) + table.nbytes
        begins = first + room.cumsum() - room
        table["offset"], table["stored"], table["raw"] = begins, sizes, sizes
        size = int(begins[-1] + room[-1])
        # Lent: after an error a request may still be under way, which refers to the memory.
        memory = self._pool.lend(size)

        def read(rows: npt.NDArray[np.int64]) -> bool:
            was_read, table["xxh3"][rows] = read_payloads(located, rows, begins[rows], memory)
            return bool(was_read.all())

        # Of local files by one call: there are as many threads that fill blocks as requests.
        read_all = self._in_parts(read, left, block) if self._piece else [read(left)]
        if not all(read_all):
            return None
        for place in np.setdiff1d(places, left).tolist() if known else ():
            payload = known[int(samples[place])]
            begin, end = int(begins[place]), int(begins[place] + sizes[place])
            memory[begin:end] = np.frombuffer(payload, np.uint8)
            memory[end : begin + int(room[place])] = 0
            table["xxh3"][place] = xxhash.xxh3_64_intdigest(payload)
        head = complete_head(
            table, block=block, length=size, fingerprint=reader.fingerprint, schema=reader.schema
        )
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        return memory.data

    def _read_stored(self, reader: StoredBlocks, block: int, memory: memoryview) -> None:
        """Copy a block of a source that stores blocks, and check it."""
        size = len(memory)
        self._throttle(size)
        # A file system over a network answers in small parts, 25 MB/s a request at 5 ms; 32
        # requests of 1 MiB read 198 MiB/s.
        if self._workers and self._piece and size > self._piece:
            # Requests end at multiples of a piece in the file, where stripes may end.
            start, piece = reader.stored_at(block), self._piece
            ends = [*range(piece - start % piece, size, piece), size]
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

    def _throttle(self, count: int) -> None:
        """Wait until `count` more bytes may be read by all threads together."""
        if self._rate is None:
            return
        with self._lock:
            begins = max(self._free_at, time.monotonic())
            self._free_at = begins + count / self._rate
        # The lock is free meanwhile: others reserve their bytes behind these.
        self.stopping.wait(max(0.0, begins - time.monotonic()))


_Tasks = queue.SimpleQueue[Callable[[], None] | None]


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # It refers to the data set.


def _end(tasks: _Tasks, threads: int) -> None:
    """End the threads after the requests under way, and none of those that wait."""
    with suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in range(threads):
        tasks.put(None)
