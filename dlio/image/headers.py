"""Sizes of images other than JPEGs, by their headers, and errors of damaged images."""

import struct
from typing import Final

from dlio.data.schema import Buffer
from dlio.errors import DecodeError

_TIFF_WIDTH: Final = 256
_TIFF_HEIGHT: Final = 257
_TIFF_ORIENTATION: Final = 274
_ON_ITS_SIDE: Final = range(5, 9)
"""Orientations of which the rows become columns. Decoders follow those of TIFF."""


def declared_size(image: Buffer, name: object) -> tuple[int, int] | None:
    """(height, width) in the header of a file other than a JPEG; None for formats whose pixels
    cannot be many more than their bytes: WebP has at most 16,383 pixels a side, PPM is not
    compressed."""
    head = bytes(image[:32])
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    if head[:2] == b"BM" and len(head) >= 26:
        width, height = struct.unpack("<ii", head[18:26])
        return abs(height), width
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        try:
            return _tiff_size(image)
        except (struct.error, KeyError) as error:
            raise damaged(name, "its TIFF header cannot be read") from error
    is_webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    if is_webp or (head[:1] == b"P" and head[1:2] in b"123456"):
        return None
    raise damaged(name, "it is not an image that dlio knows" if len(image) else "it is empty")


def _tiff_size(image: Buffer) -> tuple[int, int]:
    """(height, width) of a TIFF's first picture, decoded. Raises struct.error or KeyError."""
    order = "<" if bytes(image[:2]) == b"II" else ">"
    big = 43 in (image[2], image[3])
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), image, 8 if big else 4)
    (entries,) = struct.unpack_from(order + ("Q" if big else "H"), image, min(at, len(image)))
    first, entry = (at + 8, 20) if big else (at + 2, 12)
    wanted = (_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_ORIENTATION)
    values: dict[int, int] = {}
    for k in range(min(entries, (len(image) - first) // entry)):
        tag, kind = struct.unpack_from(order + "HH", image, first + k * entry)
        if tag in wanted:
            value = first + k * entry + (12 if big else 8)
            # Kind 3 is 16 bits wide; 16, in the large form alone, 64; otherwise 32.
            letter = {3: "H", 16: "Q"}.get(kind, "I")
            (values[tag],) = struct.unpack_from(order + letter, image, value)
    height, width = values[_TIFF_HEIGHT], values[_TIFF_WIDTH]
    return (width, height) if values.get(_TIFF_ORIENTATION) in _ON_ITS_SIDE else (height, width)


def damaged(name: object, reason: str) -> DecodeError:
    """Return the error of an image that cannot be decoded."""
    return DecodeError(
        f"{name} cannot be decoded: {reason} (repair or remove it; `dlio verify` lists all such "
        "files, --on-error skip leaves them out)"
    )
