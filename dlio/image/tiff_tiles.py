"""TIFFs whose tiles do not fill whole KiB, which OpenCV refuses, written again with larger ones.

Source: TIFF 6.0, section 15.
"""

import math
import struct
from typing import Final

import numpy as np

from dlio.data.schema import Buffer
from dlio.image.file_headers import (
    BITS,
    COMPRESSION,
    HEIGHT,
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


def with_wide_tiles(image: Buffer) -> bytes | None:
    """Return a TIFF of tiles that OpenCV refuses for their size, with one tile a plane; None for
    others, for those that are compressed, and for one that lacks a tile."""
    header = TiffHeader.parse(image)
    place = {tag: entry.at for tag, entry in header.entries.items()}
    width, height = header.value(image, WIDTH, 0), header.value(image, HEIGHT, 0)
    across, down = header.value(image, TILE_WIDTH, 0), header.value(image, TILE_HEIGHT, 0)
    samples, bits = header.value(image, SAMPLES, 1), header.value(image, BITS, 1)
    planes = samples if header.is_planar(image) else 1
    row = across * bits * (samples if planes == 1 else 1) // 8
    if header.value(image, COMPRESSION, 1) != 1 or across % 8 or row * down % _TILE_UNIT == 0:
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
    size = wide[0].size
    made = bytearray(image) + b"\0" * (len(view) % 2)
    begin = len(made) + 8 * planes
    offsets = [begin + plane * size for plane in range(planes)]
    values = {
        TILE_WIDTH: [columns * across],
        TILE_HEIGHT: [wide.shape[1]],
        TILE_OFFSETS: offsets,
        TILE_COUNTS: [size] * planes,
    }
    (at,) = struct.unpack_from(header.order + "I", image, 4)
    (count,) = struct.unpack_from(header.order + "H", image, at)
    for number in range(count):
        entry = at + 2 + 12 * number
        (tag,) = struct.unpack_from(header.order + "H", image, entry)
        if tag not in values:
            continue
        own = values[tag]
        struct.pack_into(header.order + "HI", made, entry + 2, 4, len(own))
        value = own[0] if len(own) == 1 else len(made)
        struct.pack_into(header.order + "I", made, entry + 8, value)
        if len(own) > 1:
            made += struct.pack(f"{header.order}{len(own)}I", *own)
    made += b"\0" * (begin - len(made))
    return bytes(made + wide.tobytes())
