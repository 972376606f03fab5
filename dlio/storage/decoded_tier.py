"""A tier of decoded images, in shared memory, so that they are not decoded again every epoch.

    /dev/shm/dlio-<uid>/<data set>.<node>.<recipe>/
        index       per sample: u64 slab, offset, bytes stored, rows << 32 | columns, label, xxh3_64
        room        u64: bytes that slabs take together
        slab.<n>    pixels, RGB, one image behind another; written by one process each

The ranks and jobs of a node share it. Whoever decodes an image first puts it there, and nothing is
ever evicted: under an order that visits each sample once per epoch, no policy gets more hits. An
entry of the index is written after its pixels and valid only with their checksum, so no lock is
needed. The first images are measured to decide whether and how images are kept: the time to decode
one, the time to bring it back raw or from LZ4, and how many images fit either way.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import lz4.block
import numpy as np
import numpy.typing as npt
import xxhash

from dlio.data.reader_contract import IN_MEMORY
from dlio.errors import CorruptBlock, TierFull
from dlio.launch.node.lock_keeper import keep
from dlio.storage.block import NO_ROOM, decompress_exactly
from dlio.storage.sample_locations import SampleLocations
from dlio.util.forks import new_lock
from dlio.util.memory import new_memory
from dlio.util.owned_descriptors import OwnedDescriptors
from dlio.util.shared_folders import SharedFolder
from dlio.util.trusted_files import closing_descriptor, open_file
from dlio.util.units import format_bytes

_MOST_CHUNK: Final = 16 << 20
_LEAST_CHUNK: Final = 1 << 20
"""Limits of a slab's bytes, which are otherwise a sixteenth of the capacity."""
_FIELDS: Final = 6
_TRIED: Final = 32
"""Images that are measured before it is decided whether and how images are kept."""
_WORTH: Final = 0.8
"""Bringing an image back may take at most this share of the time that decoding takes."""
_MOST_SIDE: Final = 1 << 24
"""Pixels along a side, more than any image has."""
_Pixels = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _TrialCosts:
    """Costs of the first images, summed: seconds and bytes."""

    images: int = 0
    decode_s: float = 0.0
    raw_s: float = 0.0
    packed_s: float = 0.0
    raw_bytes: int = 0
    packed_bytes: int = 0


class DecodedTier:
    """Decoded images of a data set. Thread-safe. Owner: the mount. `name` is made of the data set,
    the node and the recipe of its images; `note` is called once, with a sentence that says how
    images are kept and why."""

    def __init__(
        self, name: str, samples: int, capacity: int, note: Callable[[str], object]
    ) -> None:
        self.capacity = capacity
        self._note = note
        self._folder = SharedFolder(name)
        keep(self._folder.alive)
        self._lock = new_lock()
        self._tried: _TrialCosts | None = _TrialCosts()
        self._samples = samples
        self._form = "raw"
        self._decode_s = self._back_s = 0.0
        self._owned = OwnedDescriptors(self)
        try:
            self._room = self._owned.take(self._open("room", 8))
            with closing_descriptor(self._open("index", 8 * _FIELDS * samples)) as descriptor:
                table = mmap.mmap(descriptor, 8 * _FIELDS * samples)
        except BaseException:
            self._folder.close()
            raise
        # Mapped, unlike blocks: the folder is this user's alone, nobody cuts its files off, and an
        # image is used where it lies.
        self._index = np.frombuffer(table, np.uint64).reshape(samples, _FIELDS)
        self._slabs: dict[int, mmap.mmap] = {}
        self._mine = 0
        self._chunk = max(_LEAST_CHUNK, min(_MOST_CHUNK, capacity // 16))
        self._at = self._chunk

    @property
    def saves_s(self) -> float:
        """Seconds of decoding that one image of this tier saves, by the cost of the first ones."""
        return max(0.0, self._decode_s - self._back_s)

    def get(self, sample: int) -> tuple[_Pixels, int] | None:
        """Return an image and its label, None if it is not in the tier.

        The image is RGB, uint8, of shape (rows, columns, 3), and must not be written to.
        """
        slab, offset, stored, shape, label, digest = self._index[sample].tolist()
        if not slab or self._form == "none":
            return None
        rows, columns = shape >> 32, shape & 0xFFFFFFFF
        size = rows * columns * 3
        memory = self._slab(slab)
        if memory is None or not 0 < stored <= size or offset + stored > len(memory):
            return None
        view = memoryview(memory)[offset : offset + stored]
        # The checksum lets the index work without a lock: an entry may be read while it is
        # written, or before its pixels are.
        if xxhash.xxh3_64_intdigest(view) != digest:
            return None
        raw = view
        if stored < size:
            raw = new_memory(size)
            try:
                decompress_exactly(view, raw)
            except CorruptBlock:
                return None
        return np.frombuffer(raw, np.uint8).reshape(rows, columns, 3), label

    def locate(
        self, samples: npt.NDArray[np.int64]
    ) -> tuple[SampleLocations, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where images lie, in memory; (height, width) of each, shape (n, 2); and labels.

        Images that are not here, or by whose entries they cannot be, are not known. The checksums
        are those of the stored bytes, and have to be compared; see `get`.
        """
        entries = self._index[samples]
        slab, offset, stored, shape, label = entries[:, :5].astype(np.int64).T
        shapes = np.stack([shape >> 32, shape & 0xFFFFFFFF], 1)
        known = (slab > 0) & (shapes > 0).all(1) & (shapes < _MOST_SIDE).all(1)
        if self._form == "none":
            known[:] = False
        begin, room = np.zeros_like(slab), np.zeros_like(slab)
        slabs: list[object] = []
        for number in np.unique(slab[known]).tolist():
            memory = self._slab(number)
            if memory is not None:
                view = np.frombuffer(memory, np.uint8)
                slabs.append(view)
                here = slab == number
                begin[here], room[here] = view.__array_interface__["data"][0], len(view)
        raw = shapes.prod(1) * 3
        known &= (stored > 0) & (stored <= raw) & (offset >= 0) & (offset <= room - stored)
        located = SampleLocations.of(
            known,
            slabs,
            descriptor=IN_MEMORY,
            offset=begin + offset,
            stored=stored,
            raw=raw,
            digest=entries[:, 5].view(np.int64),
            block=-1,
            checked=1,
            tier=-1,
        )
        return located, shapes, label

    def put(self, sample: int, pixels: _Pixels, label: int, decode_s: float) -> None:
        """Keep an image if there is room and keeping images saves time. Pixels are RGB, contiguous,
        of shape (rows, columns, 3). Images with a negative label are not kept; `decode_s` is the
        time that decoding took."""
        if self._form == "none" or label < 0:
            return
        raw = pixels.reshape(-1)
        if self._tried is not None:
            self._try(raw, decode_s)
        stored: npt.NDArray[np.uint8] = raw
        if self._form == "lz4":
            packed = np.frombuffer(lz4.block.compress(raw.data, store_size=False), np.uint8)
            stored = packed if len(packed) < len(raw) else raw
        with self._lock:
            place = self._place(len(stored))
            if place is None:
                return
            slab, offset = place
            memory = self._slabs[slab]
        memoryview(memory)[offset : offset + len(stored)] = stored.data
        entry = self._index[sample]
        shape = (pixels.shape[0] << 32) | pixels.shape[1]
        # The slab's number comes last: an entry without it is empty for all readers.
        entry[1:] = offset, len(stored), shape, label, xxhash.xxh3_64_intdigest(stored.data)
        entry[0] = slab

    def close(self) -> None:
        """Release the tier. The last process that closes it removes it."""
        with self._lock:
            self._form = "none"
            self._slabs.clear()
        self._owned.close(self._room)
        self._folder.close()

    def _try(self, raw: _Pixels, decode_s: float) -> None:
        """Measure one of the first images; decide after the last of them."""
        packed = lz4.block.compress(raw.data, store_size=False)
        into = new_memory(len(raw))
        # Time of this thread alone: others compute on the same cores, and waiting says nothing
        # about the cost of decompressing.
        began = time.thread_time()
        xxhash.xxh3_64_intdigest(raw.data)
        hashed = time.thread_time()
        decompress_exactly(memoryview(packed), into)
        ended = time.thread_time()
        with self._lock:
            tried = self._tried
            if tried is None:
                return
            tried.images += 1
            tried.decode_s += decode_s
            tried.raw_s += hashed - began
            tried.packed_s += ended - began
            tried.raw_bytes += len(raw)
            tried.packed_bytes += len(packed)
            if tried.images >= _TRIED:
                self._decide(tried)
                self._tried = None

    def _decide(self, tried: _TrialCosts) -> None:
        each = 1.0 / tried.images
        self._decode_s = tried.decode_s * each
        saved = {}
        for form, seconds, size in (
            ("raw", tried.raw_s, tried.raw_bytes),
            ("lz4", tried.packed_s, tried.packed_bytes),
        ):
            # LZ4 may win although it is slower: more images fit, and each saves its decoding.
            kept = min(self._samples, self.capacity / (size * each))
            worth = seconds <= _WORTH * tried.decode_s
            saved[form] = kept * (self._decode_s - seconds * each) if worth else 0.0
        self._form = max(saved, key=lambda form: saved[form])
        if not saved[self._form]:
            self._form = "none"
        self._back_s = (tried.packed_s if self._form == "lz4" else tried.raw_s) * each
        took = f"an image takes {1e6 * self._decode_s:.0f} µs to decode"
        back = f"{1e6 * tried.raw_s * each:.0f} µs to bring back, {1e6 * tried.packed_s * each:.0f}"
        note = {
            "raw": f"decoded images are kept raw: {took}, {back} from LZ4",
            "lz4": f"decoded images are kept as LZ4, which makes room for more: {took}, {back} "
            "from LZ4",
            "none": f"decoded images are not kept, to save time: {took}, {back} from LZ4",
        }[self._form]
        self._note(note)

    def _place(self, count: int) -> tuple[int, int] | None:
        """Return (slab, offset) for `count` bytes, None when the capacity is used up."""
        if self._at + count > self._chunk:
            if count > self._chunk or not self._take_room():
                return None
            self._at = 0
        at, self._at = self._at, self._at + count
        return self._mine, at

    def _take_room(self) -> bool:
        """Make a new slab of this process; False when the node has no room for one."""
        # For a slab at a time, not for each image.
        fcntl.flock(self._room, fcntl.LOCK_EX)
        try:
            taken = int.from_bytes(os.pread(self._room, 8, 0), "little")
            if taken + self._chunk > self.capacity:
                return False
            number = taken // self._chunk + 1
            with closing_descriptor(self._open(f"slab.{number}", 0)) as descriptor:
                try:
                    os.posix_fallocate(descriptor, 0, self._chunk)
                    memory = mmap.mmap(descriptor, self._chunk)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    return False
            os.pwrite(self._room, (taken + self._chunk).to_bytes(8, "little"), 0)
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
        self._slabs[number] = memory
        self._mine = number
        return True

    def _slab(self, number: int) -> mmap.mmap | None:
        slab = self._slabs.get(number)
        if slab is None:
            try:
                descriptor = open_file(self._folder.descriptor, f"slab.{number}", os.O_RDONLY)
            except FileNotFoundError:
                return None
            with closing_descriptor(descriptor):
                slab = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            # Two threads may map a slab at the same time; one of the mappings is dropped.
            with self._lock:
                slab = self._slabs.setdefault(number, slab)
        return slab

    def _open(self, name: str, size: int) -> int:
        descriptor = open_file(self._folder.descriptor, name, os.O_RDWR | os.O_CREAT)
        if os.fstat(descriptor).st_size >= size:
            return descriptor
        try:
            # Touching shared memory that is full kills by SIGBUS; reserving it is an error.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_ROOM:
                raise
            raise TierFull(
                f"{self._folder.path}: shared memory has no room for a tier of decoded images "
                f"({format_bytes(size)} for {name}): free space there, or leave :decoded out of "
                "--tiers"
            ) from error
        return descriptor
