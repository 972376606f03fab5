"""Checks of a TIFF's compressed strips and tiles.

OpenCV reads pictures of 8 bits through an interface of libtiff that goes on after damage: the rest
of a damaged strip is then whatever was in memory. Pillow and tifffile refuse such files. Each strip
is therefore measured here: it has to hold as many bytes as its rows need. A process measures each
picture once.

Sources: TIFF 6.0, sections 9 (PackBits), 13 (LZW) and 15 (tiles); RFC 1950 (zlib).
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Final

import xxhash

from dlio.data.schema import Buffer
from dlio.image.file_headers import (
    BITS,
    COMPRESSION,
    COUNTS,
    HEIGHT,
    OFFSETS,
    PHOTOMETRIC,
    ROWS_PER_STRIP,
    SAMPLES,
    TILE_COUNTS,
    TILE_HEIGHT,
    TILE_OFFSETS,
    TILE_WIDTH,
    WIDTH,
    TiffHeader,
)

_YCBCR: Final = 6
_PLACES: Final = ({OFFSETS, COUNTS}, {TILE_OFFSETS, TILE_COUNTS})
"""Tags of which a TIFF has one pair."""
_FILL_ORDER: Final = 266
_MOST_STRIPS: Final = 1 << 20
_PIECE: Final = 1 << 20
_CLEAR, _END, _FIRST = 256, 257, 258
_MOST_CODES: Final = (1 << 12) + 1023
"""Entries of libtiff's table of LZW codes."""
_MOST_KNOWN: Final = 1 << 18
_known: dict[int, bool] = {}
"""By the digest of a picture's bytes, True if its strips are whole; the oldest are forgotten."""


def strips_are_whole(image: Buffer, header: TiffHeader) -> bool:
    """Return True unless a strip or a tile, compressed by Deflate, LZW or PackBits, is damaged."""
    measure = _MEASURES.get(header.value(image, COMPRESSION, 1))
    odd = header.value(image, PHOTOMETRIC, 0) == _YCBCR or header.value(image, _FILL_ORDER, 1) == 2
    if measure is None or odd:
        return True  # Decoders tell of damage in others, or there is none to see.
    if not any(tags <= header.entries.keys() for tags in _PLACES):
        return False  # OpenCV's libtiff would guess where strips end.
    digest = xxhash.xxh3_64_intdigest(image)
    whole = _known.get(digest)
    if whole is None:
        whole = all(measure(data, need) for data, need in _strips(image, header))
        if len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[digest] = whole
    return whole


def _strips(image: Buffer, header: TiffHeader) -> Iterator[tuple[memoryview, int]]:
    """Yield each strip or tile and the number of bytes that it holds."""
    width, height = header.value(image, WIDTH, 0), header.value(image, HEIGHT, 0)
    samples, bits = header.value(image, SAMPLES, 1), header.value(image, BITS, 1)
    apart = header.is_planar(image)
    across = 1 if apart else samples
    tiled = TILE_OFFSETS in header.entries
    places = header.values(image, TILE_OFFSETS if tiled else OFFSETS, _MOST_STRIPS)
    counts = header.values(image, TILE_COUNTS if tiled else COUNTS, _MOST_STRIPS)
    rows = header.value(image, TILE_HEIGHT if tiled else ROWS_PER_STRIP, height)
    rows = max(1, rows if tiled else min(rows, height))
    row = -(-(header.value(image, TILE_WIDTH, width) if tiled else width) * bits * across // 8)
    in_plane = -(-height // rows)
    data = memoryview(image)
    for number, (at, count) in enumerate(zip(places, counts, strict=False)):
        own = rows if tiled else min(rows, height - number % in_plane * rows)
        if count:  # Else it is not there: a decoder says so, or takes zeros.
            yield data[at : at + count], own * row


def _deflated(data: memoryview, need: int) -> bool:
    stream, have, rest = zlib.decompressobj(), 0, bytes(data)
    try:
        while have < need:  # Libtiff does not go on to the checksum either.
            part = stream.decompress(rest, min(_PIECE, need - have))
            if not part:
                return False
            have, rest = have + len(part), stream.unconsumed_tail
    except zlib.error:
        return False
    return True


def _packed(data: memoryview, need: int) -> bool:
    at, have, end = 0, 0, len(data)
    while have < need and at < end:
        run = data[at]
        at += 1
        if run < 128:
            taken = min(run + 1, need - have)  # Libtiff does not look at the rest.
            at += taken
            have += taken
        elif run > 128:
            at += 1
            have += 257 - run
    return have >= need and at <= end


def _coded(data: memoryview, need: int) -> bool:
    """Measure LZW codes, of which only the lengths of their texts matter."""
    # From before TIFF 5.0: bits the other way round, and codes that become wider one later.
    is_old = len(data) > 1 and data[0] == 0 and bool(data[1] & 1)
    lengths = [1] * _FIRST
    have = held = bits = last = 0
    width, most, is_begun = 9, (1 << 9) - 1, False
    for byte in data:
        held = held | byte << bits if is_old else held << 8 | byte
        bits += 8
        if bits < width:
            continue
        bits -= width
        if is_old:
            code, held = held & most, held >> width
        else:
            code, held = held >> bits, held & (1 << bits) - 1
        if code == _CLEAR:
            del lengths[_FIRST:]
            width, most, last, is_begun = 9, (1 << 9) - 1, 0, True
        elif code == _END:
            break
        elif not is_begun:
            return False
        elif not last:
            if code > _CLEAR:
                return False
            last = 1
            have += 1
        else:
            known = len(lengths)
            if code > known or known > _MOST_CODES:
                return False
            lengths.append(last + 1)
            last = lengths[code]
            have += last
            if known + 1 >= most + is_old and width < 12:
                width += 1
                most = (1 << width) - 1
        if have >= need:
            return True
    return have >= need


_MEASURES: Final[dict[int, Callable[[memoryview, int], bool]]] = {
    5: _coded,
    8: _deflated,
    32773: _packed,
    32946: _deflated,
}
