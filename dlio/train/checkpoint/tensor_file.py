"""Write tensors of host memory to a file of torch.distributed.checkpoint's format.

The file is one torch.save archive per tensor, end to end. torch.save makes everything of an archive
but the tensor's bytes, for which it leaves a gap; the bytes go from the tensor's memory to the
system without a copy or torch's own checksum. Each block that is written is handed to the device
while the next one is made, so that the final fsync finds little left to do.
"""

import io
import mmap
import os
from collections.abc import Callable, Mapping
from typing import IO, Final, cast

import torch
from torch.serialization import skip_data

from dlio.util.whole_files import open_own

_BLOCK: Final = 8 << 20
"""Bytes that are handed to the device at a time."""
_SMALL: Final = 1 << 20
"""Largest number of bytes that are gathered with others before they are written."""
Bytes = bytes | bytearray | memoryview


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Write tensors to a file, which is on the disk when this returns.

    Args:
        path: an existing file of this user's is overwritten.
        tensors: in host memory, of any shape, strides and type.

    Returns (offset, length) of each tensor's archive in bytes, by name. Raises OSError, which names
    the file.
    """
    places = {}
    try:
        descriptor = open_own(path, os.O_WRONLY | os.O_CREAT)
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
