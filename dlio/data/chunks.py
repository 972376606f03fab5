"""The chunks of arrays as samples: the unit that tiers hold where patches are cut out of volumes.

A reader of arrays offers them by `Abilities.chunked`: by field, one array a file. A patch needs
some chunks of each; a tier brings a chunk once for all patches that touch it.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import ChunkedArray
from dlio.data.index import fingerprint_of
from dlio.data.open_files import open_file
from dlio.data.reader_contract import Abilities, FileLocations, Reader, abilities_of
from dlio.data.schema import MAX_PAYLOAD, Schema
from dlio.data.source import ReadErrors
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import Layout, cut_blocks
from dlio.plan.order import Order
from dlio.util.forks import new_lock

_MAX_CHUNKS: Final = 1 << 22
_KEPT_BYTES: Final = 64 << 20
"""Chunks that a reader keeps decoded, for patches that are cut without tiers."""
_DEADLINE_S: Final = 600.0


def chunked_of(readers: Sequence[Reader]) -> dict[str, list[ChunkedArray]]:
    """Return the arrays of data sets by field, one a file and in the same order for all fields.

    Raises UsageError for formats without arrays, and fields that are not arrays of numbers.
    """
    arrays: dict[str, list[ChunkedArray]] = {}
    for number, reader in enumerate(readers):
        chunked = abilities_of(reader).chunked
        own: Mapping[str, Sequence[ChunkedArray]] = {} if chunked is None else chunked()
        if not own:
            raise UsageError(
                f"{reader.path}: patches and windows are cut out of arrays, and its format "
                f"({reader.format}) has none: give a Zarr store, or HDF5, NumPy or NIfTI files"
            )
        known = [*own, *(["label"] if len(reader.classes) else [])]
        other = [name for name, _ in reader.schema.fields if name not in known]
        if other:
            raise UsageError(
                f"{reader.path}: patches and windows are cut out of arrays of numbers, and "
                f"{', '.join(other)} has none: name the arrays, as in "
                f"{reader.path.partition('::')[0]}::{next(iter(own))}"
            )
        if number and list(own) != list(arrays):
            raise UsageError(
                f"{reader.path} has the arrays {', '.join(own)}, and {readers[0].path} has "
                f"{', '.join(arrays)}: name those to read after ::"
            )
        for name, each in own.items():
            arrays.setdefault(name, []).extend(each)
    return arrays


class ChunkReader:
    """A reader whose samples are the chunks of other readers' arrays, decoded. Owns the readers.

    A sample's payload is a chunk's elements in C order, little-endian. Each chunk is a block of
    its own, so that a tier brings those alone that patches touch. Only if they touch `all_of_them`,
    and these are but parts of arrays without chunks, a block has several: a file for each would
    cost more than its contents. The last chunks are kept, and a chunk that several threads want is
    read once.

    The abilities of the readers have `chunked`.

    Raises UsageError as `chunked_of`, and for arrays of too many chunks.
    """

    objects = False

    def __init__(self, readers: Sequence[Reader], all_of_them: bool = False) -> None:
        self._readers, self._all_of_them = list(readers), all_of_them
        self.arrays = chunked_of(readers)
        """Arrays by field, one a file."""
        self.format = readers[0].format
        self.path = ", ".join(reader.path for reader in readers)
        self.classes: Sequence[str] = readers[0].classes
        """Names of the classes of files, empty unless a file is a sample of its reader."""
        self.labels_of_files = np.zeros(0, np.int64)
        files = len(next(iter(self.arrays.values())))
        if sum(map(len, readers)) == files and len(self.classes):
            self.labels_of_files = np.concatenate([np.asarray(each.labels) for each in readers])
        else:
            self.classes = []
        self.schema = Schema((("chunk", "bytes"),))
        self._flat = [each for arrays in self.arrays.values() for each in arrays]
        counts = [math.prod(each.grid) for each in self._flat]
        if sum(counts) > _MAX_CHUNKS:
            raise UsageError(
                f"{self.path} has {sum(counts)} chunks, over {_MAX_CHUNKS}: store larger ones"
            )
        self._firsts = np.cumsum([0, *counts])
        places: dict[str, list[int]] = {}
        at = 0
        for name, arrays in self.arrays.items():
            places[name] = self._firsts[at : at + len(arrays)].tolist()
            at += len(arrays)
        self._places = places
        self.sizes = np.concatenate([_sizes(each) for each in self._flat])
        if int(self.sizes.max(initial=0)) > MAX_PAYLOAD:
            large = self._flat[
                int(self._firsts.searchsorted(int(self.sizes.argmax()), "right")) - 1
            ]
            raise UsageError(f"{large.where}: its chunks are over 2 GiB: store smaller ones")
        count = len(self.sizes)
        self.labels = np.broadcast_to(np.int64(0), count)
        order = Order(max(1, count), 0, shuffled=False)
        self.layout = Layout(np.arange(count + 1, dtype=np.int64), order)
        facts = [*(reader.fingerprint for reader in readers), repr(list(self.arrays))]
        self.fingerprint = fingerprint_of("chunks", 1, *facts)
        plain = [each.stored is not None and each.has_plain_chunks for each in self._flat]
        self._has_plain = any(plain)
        if all_of_them and all(plain):
            self.layout = cut_blocks(self.sizes, order)
            self.fingerprint = fingerprint_of("chunks", 1, *facts, self.layout.starts)
        self._lock = new_lock()
        self._kept: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._kept_bytes = 0

    @property
    def abilities(self) -> Abilities:
        # Not an attribute: it would refer to the reader, which is to go with its last user.
        return Abilities(locate=self._locate_in_files if self._has_plain else None)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type["ChunkReader"], tuple[object, ...]]:
        return ChunkReader, (self._readers, self._all_of_them)

    def first(self, field: str, file: int) -> int:
        """Return the sample that is the first chunk of a field's array in a file."""
        return int(self._places[field][file])

    def name(self, sample: int) -> str:
        """Return field, number of the file, and place of a chunk: the same in each copy."""
        number, _, place = self._locate(sample)
        field, file = divmod(number, len(self._flat) // len(self.arrays))
        return f"{list(self.arrays)[field]}[{file}][{','.join(map(str, place))}]"

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [self._chunk(int(sample)) for sample in samples]

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
        for reader in self._readers:
            reader.close()

    def _locate(self, sample: int) -> tuple[int, ChunkedArray, tuple[int, ...]]:
        """Return (number of the array, the array, the chunk's place in it)."""
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        array = self._flat[number]
        place = np.unravel_index(sample - int(self._firsts[number]), array.grid)
        return number, array, tuple(int(each) for each in place)

    def _locate_in_files(
        self, samples: npt.NDArray[np.int64], _: object, __: object
    ) -> FileLocations:
        """Return where chunks lie in files as their payloads are; see `Abilities.locate`."""
        numbers = np.searchsorted(self._firsts, samples, side="right") - 1
        descriptors = np.full(len(samples), -1, np.int64)
        offsets = np.zeros(len(samples), np.int64)
        opened: list[object] = []
        for number in np.unique(numbers).tolist():
            array = self._flat[number]
            if array.stored is None or not array.has_plain_chunks:
                continue
            file, begin = array.stored
            if (holder := open_file(file)) is None:
                continue
            opened.append(holder)
            here = np.flatnonzero(numbers == number)
            places = np.unravel_index(samples[here] - self._firsts[number], array.grid)
            elements = np.zeros(len(here), np.int64)
            for place, chunk, size in zip(places, array.chunks, array.shape, strict=True):
                elements = elements * size + place * chunk
            descriptors[here] = holder.number
            offsets[here] = begin + elements * array.dtype.itemsize
        sizes = self.sizes[samples]
        return FileLocations(descriptors >= 0, descriptors, offsets, sizes, sizes, None, opened)

    def _chunk(self, sample: int) -> memoryview:
        """Return a chunk, kept or read; whoever wants it meanwhile waits for it."""
        with self._lock:
            future = self._kept.get(sample)
            mine = future is None
            if future is None:
                future = self._kept[sample] = Future()
            else:
                self._kept.move_to_end(sample)
        if not mine:
            return future.result(_DEADLINE_S)
        try:
            data = self._read(sample)
        except BaseException as error:
            with self._lock:
                self._kept.pop(sample, None)
            future.set_exception(error)
            raise
        future.set_result(data)
        with self._lock:
            if self._kept.get(sample) is future:
                self._kept_bytes += len(data)
            self._forget_oldest()
        return data

    def _forget_oldest(self) -> None:
        """Keep as many bytes of chunks as may be; the lock is held."""
        for sample in list(self._kept):
            if self._kept_bytes <= _KEPT_BYTES:
                return
            if self._kept[sample].done():
                self._kept_bytes -= len(self._kept.pop(sample).result())

    def _read(self, sample: int) -> memoryview:
        _, array, place = self._locate(sample)
        where = f"{array.where}[{','.join(map(str, place))}]"
        box = array.box(place)
        with ReadErrors(where):
            part = np.asarray(array.read(box))
        wanted = tuple(side.stop - side.start for side in box)
        if part.shape != wanted:
            raise SourceError(f"{where} has the shape {part.shape}, not {wanted}")
        plain = np.ascontiguousarray(part, array.dtype.newbyteorder("<"))
        return plain.reshape(-1).view(np.uint8).data.toreadonly()


def _sizes(array: ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the bytes of each chunk; shape (chunks,)."""
    sizes = np.full(1, array.dtype.itemsize, np.int64)
    for n, c in zip(array.shape, array.chunks, strict=True):
        sides = np.minimum(c, n - np.arange(0, n, c, dtype=np.int64))
        sizes = np.multiply.outer(sizes, sides).reshape(-1)
    return sizes
