"""Pictures whose pixels are all there, in files that are damaged or cut off.

Pillow stops at the last pixel; OpenCV refuses such files. Those that it refuses are written again
out of their pixels: PNGs and GIFs without their end, GIFs whose codes are wrong and make as many
pixels all the same, BMPs whose last row is not padded, and TIFFs whose tiles do not fill whole KiB.
Whatever lacks pixels stays refused.

Source: PNG (third edition), 5 and 8; GIF89a, appendix F.
"""

import math
import struct
import zlib
from typing import Final

import numpy as np

from dlio.data.schema import Buffer
from dlio.image.file_headers import (
    BITS,
    COMPRESSION,
    GIF,
    GIF_CONTROL,
    GIF_FRAME,
    HEIGHT,
    PNG,
    SAMPLES,
    TILE_WIDTH,
    WIDTH,
    TiffHeader,
    gif_blocks,
)
from dlio.util.limits import is_plausible

_SAMPLES: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Numbers of a pixel by a PNG's kind of colour."""
# fmt: off
_PASSES: Final = (
    (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2),
    (1, 0, 2, 1),
)
# fmt: on
"""First row, first column, and the steps of rows and columns, of interlaced PNGs."""
_FEWEST: Final = 12
"""Bytes of a PNG's chunk without data: length, name, checksum."""
_TABLE: Final = 4096
"""Most codes of a GIF."""
_LITERALS: Final = 250
"""Codes of 9 bits after which the table is cleared, before they would get 10."""
_CLEAR: Final = 256
_TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS, _PLANAR = 323, 324, 325, 284
_TILES: Final = (TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS)
_MOST_ADDED: Final = 1 << 20
_TILE_UNIT: Final = 1 << 10
"""Bytes of which an uncompressed tile takes whole numbers, or OpenCV refuses it."""


def repaired(image: Buffer) -> bytes | None:
    """Return a file of the same pixels that is whole; None for one that lacks some, and for other
    formats. `image` declares no more pixels than are allowed."""
    view = memoryview(image)
    try:
        if bytes(view[:8]) == PNG:
            return _png(view)
        if bytes(view[:6]) in GIF:
            return _gif(view)
        if bytes(view[:4]) in (b"II*\0", b"MM\0*"):
            return with_wide_tiles(image)
        return _bmp(view) if bytes(view[:2]) == b"BM" else None
    except (IndexError, struct.error, zlib.error, KeyError):
        return None


# PNG


def _png(view: memoryview) -> bytes | None:
    at, parts = 8, [bytes(view[:8])]
    while bytes(view[at + 4 : at + 8]) != b"IDAT":
        end = at + _FEWEST + int.from_bytes(view[at : at + 4], "big")
        if end > len(view):
            return None
        parts.append(bytes(view[at:end]))
        at = end
    width, height, bits, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", view, 16)
    needed = sum(
        rows * (1 + -(-columns * bits * _SAMPLES[colour] // 8))
        for rows, columns in _parts(height, width, bool(interlaced))
        if columns
    )
    if not is_plausible(needed, len(view)):
        return None
    stream, made = zlib.decompressobj(), []
    while needed and bytes(view[at + 4 : at + 8]) == b"IDAT":
        length = int.from_bytes(view[at : at + 4], "big")
        made.append(stream.decompress(view[at + 8 : at + 8 + length], needed))
        needed -= len(made[-1])
        at += _FEWEST + length
    if needed:
        return None
    return b"".join(
        [*parts, _chunk(b"IDAT", zlib.compress(b"".join(made), 1)), _chunk(b"IEND", b"")]
    )


def _parts(height: int, width: int, interlaced: bool) -> list[tuple[int, int]]:
    """Return rows and columns of each pass of a PNG."""
    if not interlaced:
        return [(height, width)]
    return [
        (-(-max(0, height - top) // down), -(-max(0, width - left) // right))
        for top, left, down, right in _PASSES
    ]


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# GIF


def _gif(view: memoryview) -> bytes | None:
    """Write the first frame alone, of codes that stand for one pixel each."""
    colours, _ = _colours(view, 10, 13)
    parts = [bytes(view[:10]), bytes([_wide(view[10])]), bytes(view[11:13]), colours]
    at = -1
    for block in gif_blocks(view):
        if block.kind == GIF_FRAME:
            at = block.begin
            break
        if block.kind == GIF_CONTROL:
            parts.append(bytes(view[block.begin : block.end]))
    if at < 0:
        return None
    left, top, width, height, packed = struct.unpack_from("<HHHHB", view, at + 1)
    screen = struct.unpack_from("<HH", view, 6)
    if left + width > screen[0] or top + height > screen[1]:
        return None
    own, data_at = _colours(view, at + 9, at + 10)
    numbers = _numbers(view, data_at + 1, view[data_at], width * height)
    if numbers is None:
        return None
    groups = -(-len(numbers) // _LITERALS)
    padded = np.zeros(groups * _LITERALS, np.uint16)
    padded[: len(numbers)] = np.frombuffer(numbers, np.uint8)
    rows = np.column_stack([np.full(groups, _CLEAR), padded.reshape(groups, _LITERALS)])
    flat = np.append(rows.reshape(-1)[: groups + len(numbers)], _CLEAR + 1)
    bits = (flat[:, None] >> np.arange(9) & 1).astype(np.uint8)
    data = np.packbits(bits.reshape(-1), bitorder="little").tobytes()
    blocks = [bytes([len(b)]) + b for k in range(0, len(data), 255) if (b := data[k : k + 255])]
    frame = bytes(view[at : at + 9]) + bytes([_wide(packed)]) + own
    return b"".join([*parts, frame, b"\x08", *blocks, b"\0;"])


def _wide(flags: int) -> int:
    """Return flags that say 256 colours, if they say some."""
    return flags | 7 if flags & 0x80 else flags


def _colours(view: memoryview, flags: int, at: int) -> tuple[bytes, int]:
    """Return (a GIF's palette of 256 colours, the end of that in the file); b"" without one.

    Numbers beyond a palette are black.
    """
    if not view[flags] & 0x80:
        return b"", at
    end = at + (3 << (view[flags] & 7) + 1)
    return bytes(view[at:end]).ljust(768, b"\0"), end


def _numbers(view: memoryview, at: int, size: int, count: int) -> bytes | None:
    """Return the `count` numbers of a frame, in the order of the file; None if some lack."""
    if size > 8:
        return None
    data, left = bytearray(), len(view)
    while at < left and at + view[at] < left:  # Pillow passes over empty blocks.
        data += view[at + 1 : at + 1 + view[at]]
        at += 1 + view[at]
    clear = 1 << size
    base = [bytes([k]) for k in range(clear)] + [b"", b""]
    table, width, last = list(base), size + 1, b""
    made = bytearray()
    buffer = bits = 0
    for byte in data:
        buffer |= byte << bits
        bits += 8
        while bits >= width:
            code = buffer & (1 << width) - 1
            buffer >>= width
            bits -= width
            if code == clear:
                table, width, last = list(base), size + 1, b""
                continue
            if code == clear + 1 or code > len(table) or (code == len(table) and not last):
                return None
            entry = table[code] if code < len(table) else last + last[:1]
            if last and len(table) < _TABLE:
                table.append(last + entry[:1])
                if len(table) == 1 << width and width < 12:
                    width += 1
            made += entry
            last = entry
            if len(made) >= count:
                return bytes(made[:count])
    return None


# BMP


def _bmp(view: memoryview) -> bytes | None:
    pixels, head = struct.unpack_from("<II", view, 10)
    if head == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", view, 18)
    else:
        width, height, _, bits = struct.unpack_from("<iiHH", view, 18)
    row = -(-width * bits // 8)
    lack = pixels + abs(height) * -(-row // 4) * 4 - len(view)
    return bytes(view) + bytes(lack) if 0 < lack <= -row % 4 else None


# TIFF


def with_wide_tiles(image: Buffer) -> bytes | None:
    """Return a TIFF of tiles that OpenCV refuses for their size, with one tile a plane; None for
    others, for those that are compressed, and for one that lacks a tile."""
    header = TiffHeader.parse(image)
    place = {tag: entry.at for tag, entry in header.entries.items()}
    width, height = header.value(image, WIDTH, 0), header.value(image, HEIGHT, 0)
    across, down = header.value(image, TILE_WIDTH, 0), header.value(image, _TILE_HEIGHT, 0)
    samples, bits = header.value(image, SAMPLES, 1), header.value(image, BITS, 1)
    planes = samples if header.value(image, _PLANAR, 1) == 2 else 1
    row = across * bits * (samples if planes == 1 else 1) // 8
    if header.value(image, COMPRESSION, 1) != 1 or across % 8 or row * down % _TILE_UNIT == 0:
        return None
    columns, rows = -(-width // across), -(-height // down)
    places = header.values(image, _TILE_OFFSETS, columns * rows * planes)
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
        _TILE_HEIGHT: [wide.shape[1]],
        _TILE_OFFSETS: offsets,
        _TILE_COUNTS: [size] * planes,
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
