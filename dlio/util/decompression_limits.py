"""Bounds on the decompression of untrusted data, by codec."""

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final

_STEP: Final = 1 << 20
_FIRST: Final = 1 << 9
"""Bytes that a decompressor gets at first."""
_LZMA_BYTES: Final = 256 << 20
"""Memory that a stream may ask for: that of the highest preset is 65 MiB."""
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_UNKNOWN: Final = 2**64 - 1


def exceeds(codec: str, data: bytes, limit: int) -> bool:
    """True if data of a known codec become more than `limit` bytes. Takes little memory to find
    out.
    """
    check = CODECS.get(codec)
    return check is not None and check(data, limit)


def streamed(
    codec: str, read: Callable[[int, int], bytes | memoryview]
) -> Generator[bytes, None, int]:
    """Yield what gzip, zlib, bz2 or lzma data become, at most a mebibyte at a time; of several
    streams after one another, too. Zeros between and after them are skipped.

    `read` returns a number of bytes from an offset, fewer at the end. What follows the last stream
    is not read; the generator returns its offset.

    Time grows with the bytes read and made, however small the streams are: a decompressor gets few
    bytes at first, as it copies those behind its own.

    Raises EOFError for data that are cut off, and what the codec raises for damaged ones.
    """
    magic, make = _STREAMS[codec]
    at = 0
    while True:
        stream, size = make(), _FIRST
        while not stream.eof:
            given: bytes | memoryview = b""
            if is_hungry := getattr(stream, "needs_input", True):
                given = read(at, size)
                at, size = at + len(given), min(2 * size, _STEP)
            part = stream.decompress(given, _STEP)
            if is_hungry and not given and not part and not stream.eof:
                raise EOFError("it is cut off")
            at -= len(getattr(stream, "unconsumed_tail", b""))
            if part:
                yield part
        at -= len(stream.unused_data)
        while (head := bytes(read(at, _FIRST))) and not head.strip(b"\0"):
            at += len(head)
        at += len(head) - len(head.lstrip(b"\0"))
        if not head or not bytes(read(at, len(magic) or 1)).startswith(magic):
            return at


def reading(data: bytes) -> Callable[[int, int], memoryview]:
    """Return a function for `streamed` that reads from memory."""
    view = memoryview(data)
    return lambda at, count: view[at : at + count]


def windowed(read: Callable[[int, int], bytes]) -> Callable[[int, int], memoryview]:
    """Return a function for `streamed` that reads large pieces, of which it returns small parts."""
    start, window = 0, memoryview(b"")

    def part(at: int, count: int) -> memoryview:
        nonlocal start, window
        if not start <= at or at + count > start + len(window):
            start, window = at, memoryview(read(at, max(count, _STEP)))
        return window[at - start : at - start + count]

    return part


_STREAMS: Final[dict[str, tuple[bytes, Callable[[], Any]]]] = {
    "gzip": (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    "zlib": (b"", lambda: zlib.decompressobj(47)),
    "deflate": (b"", lambda: zlib.decompressobj(-15)),
    "bz2": (b"BZh", bz2.BZ2Decompressor),
    "lzma": (b"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES)),
}


def _streamed(codec: str) -> Callable[[bytes, int], bool]:
    """Return a check that decompresses in small steps."""

    def sound(data: bytes, limit: int) -> bool:
        done = 0
        try:
            for part in streamed(codec, reading(data)):
                done += len(part)
                if done > limit:
                    return True
        except lzma.LZMAError as error:
            return "emory" in str(error)
        except (zlib.error, OSError, EOFError, ValueError):
            pass  # The codec itself reports it.
        return False

    return sound


def _zstd(data: bytes, limit: int) -> bool:
    size = _zstd_size(data)
    if size != _UNKNOWN:
        return size > limit
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            done = 0
            # `read` of pyarrow 26 loses its buffer when it fails.
            buffer = bytearray(_STEP)
            while part := stream.readinto(buffer):
                done += part
                if done > limit:
                    return True
    except OSError:
        pass
    return False


def _zstd_size(data: bytes) -> int:
    """Return the size that the first frame declares; 2^64 - 1 if it does not."""
    if data[:4] != _MAGIC or len(data) < 6:
        return 0
    flags = data[4]
    single, width = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]
    if not width and not single:
        return _UNKNOWN
    if len(data) < at + max(width, 1):
        return 0  # Cut off, which the codec itself reports.
    if not width:
        return data[at]
    size = int.from_bytes(data[at : at + width], "little")
    return size + 256 if width == 2 else size


def _word(at: int) -> Callable[[bytes, int], bool]:
    """Return a check of formats that store their size as 32 bits at an offset."""

    def check(data: bytes, limit: int) -> bool:
        return len(data) >= at + 4 and struct.unpack_from("<I", data, at)[0] > limit

    return check


def is_cut_off(codec: str, data: bytes) -> bool:
    """True if data of Blosc say that they are longer than they are: its library would read on."""
    # An index of shards, which goes the same way, begins with 255 where it has no chunk.
    if codec != "blosc" or len(data) < 16 or data[0] == 0xFF:
        return False
    return int(struct.unpack_from("<I", data, 12)[0]) > len(data)


CODECS: Final[dict[str, Callable[[bytes, int], bool]]] = {
    "gzip": _streamed("zlib"),
    "zlib": _streamed("zlib"),
    "deflate": _streamed("deflate"),
    "bz2": _streamed("bz2"),
    "lzma": _streamed("lzma"),
    "zstd": _zstd,
    "blosc": _word(4),
    "lz4": _word(0),
}
"""Checks by codec, named as in Zarr; deflate has neither head nor checksum."""
