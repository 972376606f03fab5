"""Arrays of .npy and .npz files, without pickle: read in place where they are not compressed."""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlio.data.chunked_array import ChunkedArray, plain_chunks
from dlio.data.npy import NpyHead, read_npy_head
from dlio.data.source import File, ReadErrors
from dlio.errors import CorruptBlock, SourceError
from dlio.util.kept_memory import keeping
from dlio.util.limits import check_claim
from dlio.util.printable import tell_once
from dlio.util.units import counted
from dlio_readers.columns import Arrays
from dlio_readers.path_reader import check_names
from dlio_readers.ranges import FortranArray, StoredArray

_HEAD_BYTES: Final = 1 << 12
_MAX_RAW: Final = 16 << 30


def numpy_arrays(file: File, names: Sequence[str] = ()) -> Mapping[str, Arrays]:
    """Return the arrays of a file by name: those in `names`, or all.

    Raises SourceError, also for arrays that samples cannot have; UsageError for unknown names.
    """
    return {"data": _npy(file)} if file.own_name.endswith(".npy") else _npz(file, names)


def chunked_array(array: Arrays, where: str) -> ChunkedArray:
    """Return an array with parts of it in place of chunks."""
    if isinstance(array, StoredArray | FortranArray):
        return array.chunked(where)
    sides = plain_chunks(array.shape, array.dtype.itemsize)
    return ChunkedArray(where, tuple(array.shape), array.dtype, sides, array.__getitem__)


def _npy(file: File) -> StoredArray | FortranArray:
    head = _head(file.read(0, _HEAD_BYTES), file.size, file.name)
    left = file.size - head.offset - head.nbytes
    if left > 0:
        tell_once(
            f"{file.name}: {counted(left, 'byte')} behind its array left out, such as a second "
            "array: save each to a file of its own"
        )
    return _stored(file, head, 0)


def _stored(file: File, head: NpyHead, start: int) -> StoredArray | FortranArray:
    """Return the array of a .npy file that begins at byte `start` of a file, read in place."""
    if head.fortran and len(head.shape) > 1:
        return FortranArray(file, start + head.offset, head.shape, head.descr)
    return StoredArray(file, start + head.offset, head.shape, head.descr)


def _head(data: bytes, size: int, name: str) -> NpyHead:
    try:
        return read_npy_head(memoryview(data), size, texts=True)
    except CorruptBlock as error:
        others = ", or name the others to read, as in x.npz::image,label" if "::" in name else ""
        raise SourceError(f"{name} {error}{others}") from error


def _npz(file: File, names: Sequence[str]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    with (
        ReadErrors(file.name, "is not a .npz file, or is damaged"),
        file.open() as stream,
        zipfile.ZipFile(stream) as archive,
    ):
        members = {
            member.filename.removesuffix(".npy"): member
            for member in archive.infolist()
            if member.filename.endswith(".npy")
        }
        check_names(file.name, names, list(members), "array")
        total = 0
        for key, member in members.items():
            name = f"{file.name}::{member.filename}"
            if names and key not in names:
                continue
            if member.compress_type == zipfile.ZIP_STORED:
                start = _data_start(file, member)
                # A size in the archive's directory is read as NumPy does: it only ends the array.
                size = max(0, min(member.file_size, file.size - start))
                head = _head(file.read(start, _HEAD_BYTES), size, name)
                arrays[key] = _stored(file, head, start)
                continue
            if member.file_size > _MAX_RAW:
                raise SourceError(f"{name} of {member.file_size} bytes is too large")
            check_claim(member.file_size, member.compress_size, name)
            total += member.file_size  # Members may overlap.
            check_claim(total, file.size, file.name)
            with keeping(name) as kept:
                kept.grow(member.file_size)
                data = kept.hold(archive.read(member))
            arrays[key] = _head(bytes(data[:_HEAD_BYTES]), len(data), name).array(data)
    return arrays


def _data_start(file: File, member: zipfile.ZipInfo) -> int:
    """Offset of an uncompressed member's data."""
    head = file.read(member.header_offset, 30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise SourceError(f"{file.name} is damaged at byte {member.header_offset}: restore it")
    name, extra = struct.unpack_from("<HH", head, 26)
    return member.header_offset + 30 + int(name) + int(extra)
