"""Files that are compressed as a whole: decompressed into memory, as they allow no random access.

By their first bytes they are of gzip, bzip2, xz or Zstandard; several streams may follow one
another, as the codecs' own tools read them.
"""

import lzma
import zlib
from collections.abc import Iterator
from typing import Final

from dlio.data.open_files import InMemoryFile
from dlio.data.source import File
from dlio.errors import SourceError
from dlio.util.decompression_limits import streamed, windowed
from dlio.util.kept_memory import KeptMemory, keeping
from dlio.util.printable import tell_once

SUFFIXES: Final = (".gz", ".bz2", ".xz", ".zst")
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
}
_CODECS: Final = {"gzip": "gzip", "bzip2": "bz2", "xz": "lzma"}
"""Names of `streamed`."""
_STEP: Final = 1 << 20
_HELD_BYTES: Final = 64 << 20
_HELD_TIMES: Final = 16
"""Bytes that are kept at once: so many, and so many times the stored ones. Those of what becomes
more are counted first."""


def codec_of(head: bytes) -> str:
    """Return the codec of a file by its first six bytes; "" for none of those known."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def in_memory(file: File) -> File:
    """Return a file decompressed, in memory; one that is not compressed as it is.

    Raises SourceError if it is damaged, or if all that are opened with it become too much;
    see `dlio.util.kept_memory`.
    """
    codec = codec_of(file.read(0, 6))
    if not codec:
        return file
    try:
        with keeping(file.name) as kept:
            return InMemoryFile(file, kept.hold(_decompressed(file, codec, kept)))
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{file.name} is damaged: {codec}: {error}; restore it") from error


def _decompressed(file: File, codec: str, kept: KeptMemory) -> bytearray:
    done, size = bytearray(), 0
    most = _HELD_BYTES + _HELD_TIMES * file.size
    for part in _parts(file, codec):
        size += len(part)
        kept.grow(len(part))
        if size <= most:
            done += part
        else:
            done = bytearray()
    if size <= most:
        return done
    done, begin = bytearray(size), 0
    for part in _parts(file, codec):
        end = begin + len(part)
        if end <= size:
            done[begin:end] = part
        begin = end
    if begin != size:
        raise SourceError(f"{file.name} has changed while it was read: run again")
    return done


def _parts(file: File, codec: str) -> Iterator[bytes | memoryview]:
    if codec == "Zstandard":
        yield from _zstd_parts(file)
        return
    try:
        end = yield from streamed(_CODECS[codec], windowed(file.read))
    except EOFError as error:
        raise SourceError(f"{file.name} is cut off: restore it") from error
    if end < file.size:
        tell_once(
            f"{file.name}: its last {file.size - end} bytes are not of {codec}, and are left out"
        )


def _zstd_parts(file: File) -> Iterator[memoryview]:
    import pyarrow

    buffer = bytearray(_STEP)  # `read` of pyarrow 26 loses its buffer when it fails.
    with file.open() as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
        while count := stream.readinto(buffer):
            yield memoryview(buffer)[:count]
