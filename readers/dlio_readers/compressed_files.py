"""Files that are compressed as a whole: decompressed into memory, as they allow no random access.

By their first bytes they are of gzip, bzip2, xz or Zstandard; several streams may follow one
another, as the codecs' own tools read them.
"""

import bz2
import lzma
import zlib
from typing import Any, Final

from dlio.data.open_files import InMemoryFile
from dlio.data.source import File
from dlio.errors import SourceError
from dlio.util.limits import check_claim
from dlio.util.printable import log_warning

SUFFIXES: Final = (".gz", ".bz2", ".xz", ".zst")
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
}
_STEP: Final = 1 << 24
_LZMA_BYTES: Final = 256 << 20


def codec_of(head: bytes) -> str:
    """Return the codec of a file by its first six bytes; "" for none of those known."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def in_memory(file: File) -> File:
    """Return a file decompressed, in memory; one that is not compressed as it is.

    Raises SourceError if it is damaged, or becomes too much; see `check_claim`.
    """
    codec = codec_of(file.read(0, 6))
    if not codec:
        return file
    try:
        return InMemoryFile(file, memoryview(_decompressed(file, codec)))
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{file.name} is damaged: {codec}: {error}; restore it") from error


def _decompressed(file: File, codec: str) -> bytearray:
    data, done = file.read(), bytearray()
    if codec == "Zstandard":
        _read_zstd(data, done, file)
        return done
    while data:
        if codec_of(data[:6]) != codec:
            log_warning(
                "%s: its last %d bytes are not of %s, and are left out",
                *(file.name, len(data), codec),
            )
            return done
        stream = _stream(codec)
        while not stream.eof:
            before = len(done)
            done += stream.decompress(data, _STEP)
            check_claim(len(done), file.size, file.name)
            data = getattr(stream, "unconsumed_tail", b"")
            if len(done) == before and not data and not stream.eof:
                raise SourceError(f"{file.name} is cut off: restore it")
        # Tapes and some servers pad files with zeros, which all tools skip.
        data = stream.unused_data.lstrip(b"\0")
    return done


def _stream(codec: str) -> Any:
    if codec == "gzip":
        return zlib.decompressobj(31)
    return (
        bz2.BZ2Decompressor() if codec == "bzip2" else lzma.LZMADecompressor(memlimit=_LZMA_BYTES)
    )


def _read_zstd(data: bytes, done: bytearray, file: File) -> None:
    import pyarrow

    buffer = bytearray(_STEP)  # `read` of pyarrow 26 loses its buffer when it fails.
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
        while count := stream.readinto(buffer):
            done += buffer[:count]
            check_claim(len(done), file.size, file.name)
