"""The parts of a checkpoint: each rank writes its own, and any rank can complete it.

    FOLDER/__0_0.distcp      tensors of rank 0
    FOLDER/part-0.json       where they lie in it; written when they are on disk
    FOLDER/.metadata         the table of contents, made from all parts

The files are those of torch.distributed.checkpoint. Its own collective operations are not used: a
rank that is lost would leave the others waiting.
"""

import contextlib
import io
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from dlio.comm.comm_protocol import Request
from dlio.comm.deadlines import leave
from dlio.comm.survival.membership import RankMessages
from dlio.errors import PeerLost
from dlio.util.folders import remove_path
from dlio.util.input_files import read_json
from dlio.util.whole_files import PUBLIC_FILE, open_own, write_json

# A file of tensors of host memory, in torch.distributed.checkpoint's format
#
# The file is one torch.save archive per tensor, end to end. torch.save makes everything of an
# archive but the tensor's bytes, for which it leaves a gap; the bytes go from the tensor's memory
# to the system without a copy or torch's own checksum. Each block that is written is handed to the
# device while the next one is made, so that the final fsync finds little left to do.

_BLOCK: Final = 8 << 20
"""Bytes that are handed to the device at a time."""
_SMALL: Final = 1 << 20
"""Largest number of bytes that are gathered with others before they are written."""
Bytes = bytes | bytearray | memoryview


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Write tensors in host memory to a file, which is on the disk when this returns.

    An existing file of this user's is overwritten. Returns (offset, length) of each tensor's
    archive in bytes, by name. Raises OSError, which names the file.
    """
    places = {}
    try:
        descriptor = open_own(path, os.O_WRONLY | os.O_CREAT, PUBLIC_FILE)
        try:
            os.ftruncate(descriptor, 0)
            file = _AppendBuffer(descriptor)
            for name, tensor in tensors.items():
                begin = file.size
                _archive(tensor, file.write)
                places[name] = (begin, file.size - begin)
            file.flush()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    return places


class _AppendBuffer:
    """Appends to a file: gathers small pieces, and has the device begin with each whole block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._gathered = bytearray()
        self._written = 0
        self._begun = 0
        """Bytes that the device has been told to write."""
        self.size = 0

    def write(self, data: Bytes) -> None:
        self.size += len(data)
        if len(data) <= _SMALL:
            self._gathered += data
            if len(self._gathered) > _SMALL:
                self.flush()
            return
        self.flush()
        for start in range(0, len(data), _BLOCK):
            self._write(memoryview(data)[start : start + _BLOCK])

    def flush(self) -> None:
        self._write(memoryview(self._gathered))
        self._gathered = bytearray()

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._descriptor, data)
            self._written += count
            data = data[count:]
        if self._written - self._begun >= _BLOCK:
            # The system begins to write the range, and does not wait for it. Its last page is left
            # out if more comes into it: the next write would wait until the device has the page.
            end = self._written - self._written % mmap.PAGESIZE
            length = end - self._begun
            os.posix_fadvise(self._descriptor, self._begun, length, os.POSIX_FADV_DONTNEED)
            self._begun = end


class _SkippedBytes:
    """A file for torch.save that notes where the tensor's bytes belong."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.gap: int | None = None
        """Bytes between both; None for a tensor without any."""

    def write(self, data: Bytes) -> int:
        into = self.before if self.gap is None else self.after
        into += data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self.gap is not None or whence != os.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save leaves more than one gap")
        self.gap = offset
        return len(self.before) + offset

    def flush(self) -> None:
        pass


def _archive(tensor: torch.Tensor, write: Callable[[Bytes], None]) -> None:
    """Pass the archive that torch.save makes of a tensor to `write`, piece by piece."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()  # It is a part of something larger, which would be written too.
    around = _SkippedBytes()
    with skip_data():
        torch.save(tensor, cast(IO[bytes], around))
    stored = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if (around.gap or 0) != stored.nbytes:
        raise ValueError(f"torch.save left {around.gap} bytes for {stored.nbytes} of a tensor")
    write(around.before)
    write(stored.numpy().data)
    write(around.after)


# The parts

_TEXT_BYTES: Final = 1024
"""Bytes of an outcome in a message; the rest of a longer text is cut off."""
_LOST: Final = "\x01lost"
"""Told instead of an outcome; no error begins so."""
_TAG: Final = 1


def write_part(folder: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a rank's tensors into the folder of an unfinished checkpoint, which exists.

    Raises OSError, which names the file.
    """
    name = f"__{rank}_0.distcp"
    places = write_tensors(os.path.join(folder, name), tensors)
    entries = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": name,
            "offset": places[key][0],
            "length": places[key][1],
        }
        for key, tensor in tensors.items()
    }
    write_json(_part(folder, rank), entries)


def has_part(folder: str, rank: int) -> bool:
    """True if a rank has written all of its tensors."""
    return any(map(os.path.exists, (_part(folder, rank), _contents(folder))))


def complete(folder: str, ranks: int) -> None:
    """Make the table of contents of all parts, in place of the files that describe each.

    May be called again by another rank if this one is lost meanwhile.
    """
    if not os.path.exists(_contents(folder)):
        _write_contents(folder, ranks)
    for rank in range(ranks):
        remove_path(_part(folder, rank))


def _write_contents(folder: str, ranks: int) -> None:
    described: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    for rank in range(ranks):
        entries = cast(dict[str, Any], read_json(_part(folder, rank)))
        for name, entry in entries.items():
            size = torch.Size(entry["shape"])
            offsets = torch.Size([0] * len(size))
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry["dtype"])),
                size,
                [ChunkStorageMetadata(offsets, size)],
            )
            place = _StorageInfo(entry["file"], entry["offset"], entry["length"])
            index = MetadataIndex(name, offsets, 0)
            results.append(WriteResult(index, entry["length"], place))
    metadata = Metadata(
        dict(described),
        planner_data={name: (name,) for name in described},
    )
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def agree(
    messages: RankMessages,
    rank: int,
    ranks: int,
    error: str,
    publish: Callable[[], str],
    wait: Callable[[Sequence[Request]], None],
) -> str:
    """Publish a checkpoint when all ranks have written their parts; return the error, or nothing.

    The same on all ranks, which call it together, each in a thread. `error` is this rank's, empty
    if its part is written. `publish` is called on rank 0 if all went well, and returns an error, or
    nothing; `wait` returns when all requests are done. Raises PeerLost.
    """

    def exchange(send: bool, others: Sequence[int], texts: Sequence[str]) -> list[str]:
        buffers = [bytearray(_encoded(text)) for text in texts]
        start = messages.isend if send else messages.irecv
        requests: list[Request] = []
        try:
            for other, buffer in zip(others, buffers, strict=True):
                requests.append(start(buffer, other, _TAG))
            wait(requests)
        except BaseException:
            leave(requests, buffers)  # MPI may still use them.
            raise
        return [bytes(buffer).rstrip(b"\0").decode(errors="ignore") for buffer in buffers]

    def tell(text: str) -> None:
        """Send a text to all others that live. Raises PeerLost if any does not."""
        lost = None
        for other in others:
            try:
                exchange(True, [other], [text])
            except PeerLost as error:
                lost = error
        if lost is not None:
            raise lost

    if rank:
        exchange(True, [0], [error])
        answer = exchange(False, [0], [""])[0]
        if answer == _LOST:
            raise PeerLost("a rank was lost before it had written its part of a checkpoint")
        return answer
    others = range(1, ranks)
    try:
        errors = [error, *exchange(False, others, [""] * len(others))]
    except PeerLost:
        # The others wait for this rank alone, which lives: no loss would end that.
        with contextlib.suppress(PeerLost):
            tell(_LOST)
        raise
    outcome = next((each for each in errors if each), "") or publish()
    tell(outcome)
    return outcome


def _encoded(text: str) -> bytes:
    return text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")


def _contents(folder: str) -> str:
    return os.path.join(folder, ".metadata")


def _part(folder: str, rank: int) -> str:
    return os.path.join(folder, f"part-{rank}.json")
