"""Bounds on the decompression of untrusted data, by codec."""

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

_STEP: Final = 1 << 20
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


def _streamed(make: Callable[[], Any]) -> Callable[[bytes, int], bool]:
    """Return a check that decompresses in small steps; `make` makes the decompressor."""

    def check(data: bytes, limit: int) -> bool:
        done = 0
        while data:
            decompressor = make()
            rest = data
            while not decompressor.eof:
                part = decompressor.decompress(rest, _STEP)
                rest = getattr(decompressor, "unconsumed_tail", b"")
                done += len(part)
                if done > limit:
                    return True
                if not part and not rest:
                    return False  # Cut off, which the codec itself reports.
            if decompressor.unused_data == data:
                return False
            data = decompressor.unused_data
        return False

    def sound(data: bytes, limit: int) -> bool:
        try:
            return check(data, limit)
        except lzma.LZMAError as error:
            return "emory" in str(error)
        except (zlib.error, OSError, EOFError, ValueError):
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
    "gzip": _streamed(lambda: zlib.decompressobj(47)),
    "zlib": _streamed(lambda: zlib.decompressobj(47)),
    "bz2": _streamed(bz2.BZ2Decompressor),
    "lzma": _streamed(lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES)),
    "zstd": _zstd,
    "blosc": _word(4),
    "lz4": _word(0),
}
"""Checks by codec, named as in Zarr."""
