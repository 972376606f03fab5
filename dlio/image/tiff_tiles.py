"""TIFFs that OpenCV refuses or mixes up, written again: with tiles that fill whole KiB, and with
one plane of several.

Source: TIFF 6.0, section 15.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from dlio.data.schema import Buffer
from dlio.image.file_headers import (
    ALPHA,
    BITS,
    COMPRESSION,
    COUNTS,
    FORMAT,
    HEIGHT,
    OFFSETS,
    PHOTOMETRIC,
    PLANAR,
    SAMPLES,
    TILE_COUNTS,
    TILE_HEIGHT,
    TILE_OFFSETS,
    TILE_WIDTH,
    WIDTH,
    TiffHeader,
)

_TILES: Final = (TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_COUNTS)
_MOST_ADDED: Final = 1 << 20
_TILE_UNIT: Final = 1 << 10
"""Bytes of which an uncompressed tile takes whole numbers, or OpenCV refuses it."""
MOST_PARTS: Final = 1 << 20
"""Strips or tiles of a picture that are looked at."""
_SHORT, _LONG, _MOST_SHORT = 3, 4, 0xFFFF
"""TIFF's types of whole numbers of 16 and 32 bits."""
_UNKNOWN: Final = 65000
"""A tag that says nothing about pixels."""


def with_wide_tiles(image: Buffer) -> bytes | None:
    """Return a TIFF of tiles that OpenCV refuses for their size, with one tile a plane; None for
    others, for those that are compressed, and for one that lacks a tile."""
    header = TiffHeader.parse(image)
    place = {tag: entry.at for tag, entry in header.entries.items()}
    width, height = header.value(image, WIDTH, 0), header.value(image, HEIGHT, 0)
    across, down = header.value(image, TILE_WIDTH, 0), header.value(image, TILE_HEIGHT, 0)
    samples, bits = header.value(image, SAMPLES, 1), header.value(image, BITS, 1)
    planes = samples if header.is_planar(image) else 1
    row, rest = divmod(across * bits * (samples if planes == 1 else 1), 8)
    if header.value(image, COMPRESSION, 1) != 1 or rest or row * down % _TILE_UNIT == 0:
        return None
    columns, rows = -(-width // across), -(-height // down)
    places = header.values(image, TILE_OFFSETS, columns * rows * planes)
    view = memoryview(image)
    parts = [view[at : at + row * down] for at in places]
    is_whole = len(parts) == columns * rows * planes and all(len(p) == row * down for p in parts)
    if not is_whole or row * down * len(parts) > len(view) or not {*_TILES} <= place.keys():
        return None
    pixels = np.frombuffer(b"".join(parts), np.uint8).reshape(planes, rows, columns, down, row)
    wide = pixels.transpose(0, 1, 3, 2, 4).reshape(planes, rows * down, columns * row)
    unit = _TILE_UNIT // math.gcd(_TILE_UNIT, columns * row)
    if unit * columns * row > _MOST_ADDED + len(view):
        return None
    wide = np.pad(wide, ((0, 0), (0, -rows * down % unit), (0, 0)))
    plane_size = wide[0].size
    begin = len(view) + len(view) % 2 + 8 * planes
    offsets = [begin + plane * plane_size for plane in range(planes)]
    values = {
        TILE_WIDTH: [columns * across],
        TILE_HEIGHT: [wide.shape[1]],
        TILE_OFFSETS: offsets,
        TILE_COUNTS: [plane_size] * planes,
    }
    made = _with_values(image, values)
    made += b"\0" * (begin - len(made))
    return bytes(made + wide.tobytes())


def planes_of(image: Buffer, header: TiffHeader) -> Iterator[bytes]:
    """Yield the planes of a TIFF whose channels have strips or tiles of their own, as pictures of
    one channel. OpenCV takes those of more than 8 bits for pixels side by side."""
    samples = header.value(image, SAMPLES, 1)
    tiled = TILE_OFFSETS in header.entries
    place, size = (TILE_OFFSETS, TILE_COUNTS) if tiled else (OFFSETS, COUNTS)
    alone = {SAMPLES: [1], PHOTOMETRIC: [1], PLANAR: [1]}
    alone |= {tag: header.values(image, tag)[:1] for tag in (BITS, FORMAT) if tag in header.entries}
    parts = {tag: header.values(image, tag, MOST_PARTS) for tag in (place, size)}
    count = len(parts[place]) // samples
    for k in range(samples):
        own = {tag: values[k * count : (k + 1) * count] for tag, values in parts.items()}
        yield bytes(_with_values(image, {**alone, **own}, without=ALPHA))


def _with_values(image: Buffer, values: Mapping[int, Sequence[int]], without: int = 0) -> bytearray:
    """Return a copy of a TIFF whose tags have other values, of 16 or 32 bits, and whose tag
    `without` is one that nobody knows. Tags that are missing stay so."""
    order, is_big = "<" if image[0] == ord("I") else ">", 43 in (image[2], image[3])
    word, first, size, inline = ("Q", 8, 20, 8) if is_big else ("I", 2, 12, 4)
    made = bytearray(image) + b"\0" * (len(image) % 2)
    (at,) = struct.unpack_from(order + word, image, 8 if is_big else 4)
    (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), image, at)
    for entry in range(at + first, at + first + size * count, size):
        tag, kind = struct.unpack_from(order + "HH", image, entry)
        if tag == without:
            struct.pack_into(order + "H", made, entry, _UNKNOWN)
        if tag not in values:
            continue
        own = values[tag]
        kind = _SHORT if kind == _SHORT and max(own) <= _MOST_SHORT else _LONG
        data = struct.pack(f"{order}{len(own)}{'H' if kind == _SHORT else 'I'}", *own)
        if len(data) > inline:
            place = struct.pack(order + word, len(made))
            made += data + b"\0" * (len(data) % 2)
            data = place
        head = struct.pack(order + "HH" + word, tag, kind, len(own))
        made[entry : entry + size] = head + data.ljust(inline, b"\0")
    return made
