"""Batches made outside of Python: one call submits a batch, one waits for it.

The threads of dlio/image/native/pool.c take the samples of a `NativeJob` one by one: each is read
from where `SampleLocations` say that it lies, compared with its checksum, expanded, and put into
the batch's arrays, pictures as their crops. They never take the interpreter's lock. What they do
not know, and what is damaged, comes back as the number of its slot: it is then made as without
them, with all its errors.
"""

import atexit
import ctypes
import math
import os
import resource
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import IN_MEMORY
from dlio.data.schema import Schema
from dlio.image.crop import DRAWS, Crop
from dlio.image.decoder import MAX_PIXELS, resizes_natively
from dlio.image.native import LIBRARY, pool_library
from dlio.image.native.pool_library import (
    SAMPLE,
    CropRule,
    FieldColumn,
    JobRow,
    JobSums,
    RecipeRow,
    address_of,
)
from dlio.image.png_library import use_png
from dlio.loader.shuffle.sample_message import UncheckedPayload
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.sample_locations import SampleLocations
from dlio.util.closable import Closable
from dlio.util.forks import new_lock

_STOP_TIMEOUT_S: Final = 5.0
_LOOK_S: Final = 0.001
_SECOND_NS: Final = 1_000_000_000
_LARGE_BYTES: Final = 1 << 16
"""Least bytes of a sample of arrays whose fields are read into the batch itself."""
_TASK_BYTES: Final = 1 << 18
"""Payload bytes that a thread takes at a time, about: some 100 µs of work."""
_MOST_TASK: Final = 64
_MOST_OPEN: Final = 1024
_OPEN_SHARE: Final = 4
"""Blocks whose files stay open: at most so many, and one of so many that the process may open."""
_MOST_MAPPED: Final = 1 << 15
"""Blocks of memory whose files are mapped, at most: Linux lets a process map 65,530."""
_ENOUGH: Final = 512
"""Samples after which it is known whether native threads make most of them."""

_UNREADABLE, _DAMAGED = 1, 2  # States of samples, of pool.h.
ARRIVED: Final = -2
"""The number of tier of payloads that peers sent."""
DECODED: Final = -3
"""That of images that a tier keeps decoded."""

_WHOLE: Final = 2
"""Value of `crops` for payloads as they are: WHOLE of pool.h."""
_STORED: Final = 2
"""Value of `checked` for digests of stored bytes: STORED of pool.h."""
_CASTS: Final = {
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 0,
    "uint8": 4,
    "uint16": 5,
    "uint32": 6,
    "uint64": 7,
    "float32": 8,
    "float64": 0,
    "float16": 9,
    "bool": 10,
}
"""How numbers become the int64 and float64 of tensors: numbers of `cast_into` in make.c."""


@dataclass(frozen=True, slots=True)
class NativeArrays:
    """The memory of a batch that native threads can make, all by slot."""

    arrays: Mapping[str, npt.NDArray[Any]]
    """By field."""
    images: npt.NDArray[np.int64] | None = None
    """Address of each crop, of shape (rows, columns, 3): bytes, or numbers in their place; or of
    each payload."""
    uniforms: npt.NDArray[np.float64] | None = None
    """Random numbers of the crops, shape (batch, `Crop.draws`)."""
    crops: Sequence[npt.NDArray[Any]] = ()
    """The memory that `images` point into."""


@dataclass(frozen=True, slots=True)
class NativeInput:
    """Payloads that native threads make slots of a batch of; a row for each, all of shape (n,).

    Without `pieces`, a payload is a whole sample.
    """

    slots: npt.NDArray[np.int64]
    """Of the batch: each is made when all its rows are."""
    locations: SampleLocations
    """Of the payloads."""
    blocks: npt.NDArray[np.int64]
    """That have the payloads."""
    hierarchy: Hierarchy | None
    """That has the blocks; None in benchmarks and tests."""
    pieces: npt.NDArray[np.void] | None = None
    """Parts of the payloads that go into the batch, of type PIECE."""
    pixels: npt.NDArray[np.int64] | None = None
    """Height and width of images whose payloads are decoded pixels, RGB, of which crops are made,
    shape (n, 2). Their digests are those of the stored bytes."""
    saved_s: float = 0.0
    """Seconds of decoding that each saves."""
    intact: npt.NDArray[np.uint8] | None = None
    """By number of the payload, which `pieces` have, 1 for those that were compared with their
    digests in this pass: of these no more is read than the part. Written by native threads."""

    def known(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of slots all of whose rows have known locations."""
        known = self.locations.known
        if self.pieces is None or known.all():
            return known
        return ~np.isin(self.slots, self.slots[~known])


class NativeRecipe:
    """How payloads of a schema become slots of a batch's arrays, for the native threads.

    `fields` are those that the batch has, each in an array of its own; with a `crop`, the picture
    that follows the fixed fields becomes a crop. With `values`, shape (3, 256), numbers of 2, 4 or
    8 bytes take the place of a crop's bytes, by channel. With `whole`, the payload goes as it is to
    the address that `NativeArrays.images` has for its slot, next to its fields. With `sleep_s`
    nothing is read or made, and each sample takes so many seconds, for benchmarks.
    """

    def __init__(
        self,
        schema: Schema,
        fields: Sequence[str],
        crop: Crop | None = None,
        sleep_s: float = 0.0,
        values: npt.NDArray[Any] | None = None,
        whole: bool = False,
    ) -> None:
        places = {name: (kind, at) for name, kind, at in schema.places()}
        order = sorted(fields, key=lambda name: places[name][1])
        self.fields = tuple(order)
        """The fields, in the order of a job's arrays."""
        columns = (FieldColumn * max(1, len(order)))()
        for column, name in zip(columns, order, strict=False):
            kind, at = places[name]
            cast = _CASTS[kind.text] if kind.scalar else 0
            wide = 1 if kind.text == "bool" else 8
            column.at, column.bytes, column.cast = at, kind.bytes, cast
            column.stride = wide if kind.scalar else kind.bytes
        self._columns, self._values = columns, values
        self.draws = 0 if crop is None else crop.draws
        if crop is not None:
            use_png()
        rule = CropRule() if crop is None else _crop_rule(crop)
        is_fixed = crop is None and not whole
        is_large = is_fixed and schema.overhead >= _LARGE_BYTES
        self.c = RecipeRow(
            *(len(order), columns, schema.overhead, is_fixed),
            *(is_large, _WHOLE if whole else crop is not None, rule),
            None if values is None else address_of(values),
            *(0 if values is None else values.itemsize, round(sleep_s * _SECOND_NS)),
        )
        self.tried = self.refused = 0
        """Samples of the batches of which some were refused, and those that were."""

    def count(self, tried: int, refused: int) -> None:
        """Count samples that native threads were given, and those that they left to Python's."""
        self.tried += tried
        self.refused += refused

    @property
    def pays(self) -> bool:
        """False if most samples are left to Python's threads: each is read twice then."""
        return self.tried < _ENOUGH or 2 * self.refused < self.tried

    @staticmethod
    def knows(
        schema: Schema, fields: Sequence[str], crop: Crop | None, whole: bool = False
    ) -> bool:
        """True if the native threads make such batches here."""
        library = pool_library.find()
        if library is None or not all(_is_known(schema, name) for name in fields):
            return False
        if crop is None:
            return schema.is_fixed or whole
        # The picture has to be the only field of variable size, and every crop a picture's only.
        sizes = [name for name, kind in schema.kinds.items() if not kind.fixed]
        return len(sizes) == 1 and crop.crops == 1 and not crop.exact and resizes_natively()


def _is_known(schema: Schema, name: str) -> bool:
    kind = schema.kinds[name]
    return kind.fixed and (kind.text in _CASTS if kind.scalar else bool(kind.shape))


def _crop_rule(crop: Crop) -> CropRule:
    logs = [math.log(ratio) for ratio in crop.ratio]
    pair = ctypes.c_double * 2
    return CropRule(
        *(crop.size, crop.width, crop.train, crop.resize or 0, MAX_PIXELS),
        *(pair(*crop.scale), pair(*logs), pair(*crop.ratio), crop.flip, crop.upend),
    )


class NativeJob:
    """A batch, or a part of it, for the native threads; holds the memory that they write to.

    Args:
        recipe: of the loader.
        order: number of the step: lower ones are made first.
        given: the payloads; only those that are known are made.
        memory: of the batch.
        threads: that share the payloads.
        known: `given.known()`, if that is known.
    """

    def __init__(
        self,
        recipe: NativeRecipe,
        order: int,
        given: NativeInput,
        memory: NativeArrays,
        threads: int,
        known: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        images, uniforms, locations = memory.images, memory.uniforms, given.locations
        known = np.ascontiguousarray(given.known() if known is None else known)
        places = np.ascontiguousarray(given.slots)
        samples = np.empty((len(known), SAMPLE.itemsize // 8), np.int64)
        rows, sums = np.empty(len(known), np.int64), JobSums()
        library = pool_library.find()
        assert library is not None
        # Samples of a block one after another: its file is opened once.
        count = library.rows(
            *(address_of(locations.table), len(known), address_of(known), address_of(places)),
            *(recipe.c.crops != 1, address_of(samples), address_of(rows)),
            *(_address_or_none(given.pieces), ctypes.byref(sums)),
        )
        self._memory, self._rows, self._given = samples[:count], rows[:count], given
        if given.pixels is not None:
            self._samples["height"], self._samples["width"] = given.pixels[self._rows].T
            self._samples["checked"] = _STORED
        self.hierarchy, self.saved_s = given.hierarchy, given.saved_s
        self.slots = int(sums.slots)
        """Number of slots that it makes."""
        addresses = (ctypes.c_void_p * max(1, len(recipe.fields)))(
            *(address_of(memory.arrays[name]) for name in recipe.fields)
        )
        self._tier = None if sums.mixed else int(sums.tier)
        """Number of the tier, if all are in one."""
        self.payload_bytes = max(1, int(sums.raw))
        """Of all its samples."""
        task = _TASK_BYTES * count // self.payload_bytes
        task = max(1, min(task, _MOST_TASK, -(-count // (2 * threads))))
        self.c = JobRow(
            *(order, count, task, address_of(samples), ctypes.addressof(recipe.c)),
            *(ctypes.addressof(addresses), _address_or_none(images)),
            *(_address_or_none(uniforms), recipe.draws),
            *(_address_or_none(given.pieces), address_of(rows), _address_or_none(given.intact)),
        )
        self.c.left = count  # Before it begins, too, it has not ended.
        self._held = recipe, addresses, memory, locations.files, given

    @property
    def _samples(self) -> npt.NDArray[np.void]:
        """The rows, of type SAMPLE; described only where that is needed, as it takes 10 µs."""
        samples: npt.NDArray[np.void] = self._memory.view(SAMPLE)[:, 0]
        return samples

    def refused(self) -> list[int]:
        """Return the slots that were not made, of a job that has ended."""
        if not self.c.refused:
            return []
        slots = np.unique(self._samples["slot"][self._samples["state"] != 0])
        return list(map(int, slots))

    def made(self) -> list[int]:
        """Return the slots that were made, of a job that has ended."""
        slots = np.setdiff1d(self._samples["slot"], np.array(self.refused(), np.int64))
        return list(map(int, slots))

    def unread(self) -> npt.NDArray[np.int64]:
        """Return the blocks of payloads that could not be read from files, or are damaged there."""
        state = self._samples["state"]
        lost = ((state == _UNREADABLE) | (state == _DAMAGED)) & (self._tiers() > ARRIVED)
        blocks: npt.NDArray[np.int64] = self._given.blocks[self._rows[lost]]
        return blocks

    def bytes_by_tier(self) -> dict[int, int]:
        """Return the payload bytes that were read, by number of tier; -1 is the source."""
        if self._tier is not None and not self.c.refused:
            return {self._tier: self.payload_bytes}
        samples = self._samples
        pieces = self._given.pieces
        sizes = samples["raw"] if pieces is None else pieces["count"][self._rows].prod(1)
        sizes = np.where(samples["state"] == 0, sizes, 0)
        counts = np.bincount(self._tiers() - DECODED, sizes)
        return {tier + DECODED: int(count) for tier, count in enumerate(counts) if count}

    def _tiers(self) -> npt.NDArray[np.int64]:
        tiers: npt.NDArray[np.int64] = self._given.locations.column("tier")[self._rows]
        return tiers

    @property
    def read_s(self) -> float:
        """Seconds of threads spent on reading and on fields."""
        return float(self.c.read_ns) / _SECOND_NS

    @property
    def make_s(self) -> float:
        """Seconds of threads spent on crops."""
        return float(self.c.make_ns) / _SECOND_NS


def arrived_locations(payloads: Sequence[UncheckedPayload | None]) -> SampleLocations:
    """Return where payloads lie that have arrived from peers."""
    here = [each for each in payloads if each is not None]
    assert len(here) == len(payloads)
    return SampleLocations.of(
        np.ones(len(here), np.bool_),
        list(here),
        descriptor=IN_MEMORY,
        block=-1,
        offset=np.array([address_of(np.asarray(each.stored)) for each in here], np.int64),
        stored=np.array([len(each.stored) for each in here], np.int64),
        raw=np.array([each.size for each in here], np.int64),
        digest=np.array([each.digest for each in here], np.uint64).view(np.int64),
        checked=1,
        tier=ARRIVED,
    )


class NativeFiles(Closable):
    """Files of so many blocks: open while a pool reads, mapped until this and all its pools are
    closed.

    Raises OSError without memory.
    """

    def __init__(self, blocks: int = 1) -> None:
        library = pool_library.find()
        assert library is not None
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_open = _MOST_OPEN if soft < 0 else min(_MOST_OPEN, soft // _OPEN_SHARE)
        files = library.files_open(min(blocks, _MOST_MAPPED), most_open)
        if not files:
            raise OSError("memory for the files of blocks cannot be had")
        self.process = os.getpid()
        self.address: int = files
        self.pools: weakref.WeakSet[NativePool] = weakref.WeakSet()
        """That read them."""
        self._close = weakref.finalize(self, library.files_close, files)

    def close(self) -> None:
        """Unmap them; pools that wait for another pass are closed."""
        for pool in list(self.pools):
            if not pool.passes:
                pool.close()
        self._close()


_files_of: Final[weakref.WeakKeyDictionary[Hierarchy, NativeFiles]] = weakref.WeakKeyDictionary()


def files_of(hierarchy: Hierarchy) -> NativeFiles:
    """Return the files of a hierarchy's blocks, the same for all its passes: mapping them anew for
    each took half of a pass of 20,000 rows. They are closed with it."""
    files = _files_of.get(hierarchy)
    # The locks of a parent's may be held by threads that a forked child does not have.
    if files is None or files.process != os.getpid():
        files = _files_of[hierarchy] = NativeFiles(hierarchy.reader.layout.blocks)
        hierarchy.before_close.append(files.close)
    return files


class NativePool(Closable):
    """Native threads, and the queue of their jobs. Owner: the engine, which closes it.

    Closed at the latest before the interpreter ends. A forked child has none of the threads: its
    copy is never called. Raises OSError if no thread can be started.

    Args:
        threads: number of threads.
        files: that they read; None for some of its own.
    """

    def __init__(self, threads: int, files: NativeFiles | None = None) -> None:
        library = pool_library.find()
        assert library is not None
        self._library = library
        self.files = files or NativeFiles()
        pool = library.open(threads, self.files.address)
        if not pool:
            raise OSError("no native thread can be started")
        self._pool: int | None = pool
        self._process, self._lock = os.getpid(), new_lock()
        self._waiting = 0
        self.asked, self.threads = threads, int(library.threads(pool))
        """Threads that were asked for, and those that there are."""
        self._jobs: dict[int, NativeJob] = {}
        """Jobs that may be under way, by address."""
        self.passes = 0
        """Under way, that use it."""
        self._is_stuck = False
        """True once a thread did not come back from a job that was given up."""
        _open_pools.add(self)
        self.files.pools.add(self)

    def is_for(self, threads: int, files: NativeFiles) -> bool:
        """True if it works, here, for so many threads and these files."""
        works = self._pool is not None and not self._is_stuck and os.getpid() == self._process
        return works and self.asked == threads and self.files is files

    def submit(self, job: NativeJob) -> None:
        """Begin a job. After `close` it is never made."""
        with self._lock:  # Threads call it when samples arrive, while the pool may be closed.
            if self._pool is not None:
                self._jobs[ctypes.addressof(job.c)] = job
                self._library.submit(self._pool, ctypes.byref(job.c))

    def wait(self, job: NativeJob | None, timeout_s: float, ended: ctypes.c_int64) -> bool:
        """Wait until a job has ended; True if it has.

        Returns early when others have ended since it was called last with this `ended`, which
        begins as 0 and is brought up to date, after `wake`, and when the pool is closed. Without a
        job it waits for any of these.
        """
        with self._lock:
            pool = self._pool
            if pool is None:
                return False
            self._waiting += 1
        try:
            ends = self._library.wait(
                *(pool, None if job is None else ctypes.byref(job.c)),
                *(round(timeout_s * _SECOND_NS), ctypes.byref(ended)),
            )
        finally:
            with self._lock:
                self._waiting -= 1
        return bool(ends) and job is not None and self._forget(job)

    def wake(self) -> None:
        """Have whoever waits for a job look again."""
        with self._lock:  # Decode threads call it, while the pool may be closed.
            if self._pool is not None:
                self._library.wake(self._pool)

    def has_ended(self, job: NativeJob) -> bool:
        """True if a job has ended; does not wait."""
        if job.c.left:
            return False
        with self._lock:
            if self._pool is None or self._library.left(self._pool, ctypes.byref(job.c)):
                return False
            self._jobs.pop(ctypes.addressof(job.c), None)
        return True

    def _forget(self, job: NativeJob) -> bool:
        with self._lock:
            self._jobs.pop(ctypes.addressof(job.c), None)
        return True

    def give_up(self, jobs: Iterable[NativeJob]) -> None:
        """Give up samples of jobs that no thread is at, and wait for the others; close files that
        are open if no job is left.

        The memory of a job whose thread hangs in a read stays, as that of `close`.
        """
        with self._lock:
            pool = self._pool
            if pool is None or os.getpid() != self._process:
                return
            self._waiting += 1
        try:
            jobs = list(jobs)
            _abandoned.update(jobs)  # Kept first, see `close`.
            for job in jobs:
                self._library.cancel(pool, ctypes.byref(job.c), 0)
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            for job in jobs:
                left_ns = round(max(0.0, deadline - time.monotonic()) * _SECOND_NS)
                if self._library.cancel(pool, ctypes.byref(job.c), left_ns):
                    _abandoned.discard(job)
                    self._forget(job)
                else:
                    self._is_stuck = True
            if not self._jobs:
                self._library.files_rest(self.files.address)
        finally:
            with self._lock:
                self._waiting -= 1

    def close(self) -> None:
        """Give up all samples that no thread is at, and end the threads.

        A thread that hangs in a read is left behind after some seconds, with the memory that it may
        still write to.
        """
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is None or os.getpid() != self._process:
            return
        while self._waiting:  # Another thread, which returns at once.
            self._library.wake(pool)
            time.sleep(_LOOK_S)
        _open_pools.discard(self)
        # Kept first: an interruption must not give memory away that a thread may write to.
        jobs = list(self._jobs.values())
        _abandoned.update(jobs)
        for job in jobs:
            self._library.cancel(pool, ctypes.byref(job.c), 0)
        if not self._library.close(pool, round(_STOP_TIMEOUT_S * _SECOND_NS)):
            _abandoned.difference_update(jobs)
        self._jobs.clear()


_open_pools: Final[weakref.WeakSet[NativePool]] = weakref.WeakSet()
_abandoned: Final[set[NativeJob]] = set()
"""Jobs of threads that hang: their memory stays."""


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def boxes_of_crops(
    crop: Crop, sizes: npt.NDArray[np.int64], uniforms: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Return the parts that the native threads cut out: those of `Crop.box`, to the last bit.

    `sizes` has height and width of each picture, shape (n, 2), and `uniforms` the random numbers,
    shape (n, DRAWS). Returns top, left, height, width, flip and upend; shape (n, 6).
    """
    boxes = np.empty((len(sizes), 6), np.int64)
    numbers = np.zeros((len(sizes), DRAWS)) if not crop.train else np.ascontiguousarray(uniforms)
    rule, pixels = _crop_rule(crop), np.ascontiguousarray(sizes, np.int64)
    call = ctypes.CDLL(LIBRARY).dlio_boxes
    pointer = ctypes.c_void_p
    call.argtypes, call.restype = (pointer, ctypes.c_int64, pointer, pointer, pointer), None
    call(ctypes.byref(rule), len(sizes), *map(address_of, (pixels, numbers, boxes)))
    return boxes


def _address_or_none(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else address_of(array)
