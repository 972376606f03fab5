"""Headers of picture files that OpenCV decodes to other pixels than are meant, and the remedies.

Copies of a file with another header make it give the pixels as they are stored: the numbers of a
palette in place of its colours, RGB that is not multiplied by alpha, and the still picture of an
animated PNG. Nothing is decoded here.

Sources: TIFF 6.0; the PNG specification, third edition; pbm(5), pgm(5) and ppm(5) of Netpbm.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.util.units import counted

PNG: Final = b"\x89PNG\r\n\x1a\n"
TIFF: Final = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
GIF: Final = (b"GIF87a", b"GIF89a")
PNM: Final = (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")
GIF_FRAME, GIF_CONTROL = 0x2C, 0x21F9
_GIF_EXTENSION, _GIF_END = 0x21, 0x3B
_CONTROL_FLAGS: Final = 3
"""Place of the flags in a GIF's control block; the last bit says that a number is transparent."""
_EXIF: Final = b"Exif\0\0"
_APP1, _SCAN = 0xE1, 0xDA
_ANIMATION: Final = (b"acTL", b"fcTL", b"fdAT")
_MOST_CHUNKS: Final = 1 << 16

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC = 256, 257, 258, 259, 262
ORIENTATION, SAMPLES, COLOURS, TILE_WIDTH, ALPHA, FORMAT = 274, 277, 320, 322, 338, 339
OFFSETS, ROWS_PER_STRIP, COUNTS, PLANAR = 273, 278, 279, 284
TILE_HEIGHT, TILE_OFFSETS, TILE_COUNTS = 323, 324, 325
_KINDS: Final = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q"}
"""Types of whole numbers in TIFF's directories; others are read as the 32 bits of an offset."""
_MOST_VALUES: Final = 3 << 8
"""A palette of 256 colours."""
_UPENDED, _MIRRORED, _ON_ITS_SIDE = (3, 4, 6, 7), (2, 3, 7, 8), (5, 6, 7, 8)
WHITE_IS_ZERO, RGB, PALETTE = 0, 2, 3
_GREY_AND_ALPHA: Final = 2
ASSOCIATED, UNASSOCIATED = 1, 2
_COLOURS: Final = {
    5: "a TIFF of CMYK",
    **dict.fromkeys((8, 9, 10), "a TIFF of CIELAB colours"),
}
_CODECS: Final = {
    34925: "a TIFF compressed with LZMA",
    50000: "a TIFF compressed with zstd",
    50001: "a TIFF compressed with WebP",
    **dict.fromkeys((33003, 33004, 33005, 34712), "a TIFF of JPEG 2000"),
}
_SINGLE: Final = (
    *(WIDTH, HEIGHT, COMPRESSION, PHOTOMETRIC, ORIENTATION, SAMPLES, ROWS_PER_STRIP, PLANAR),
    *(TILE_WIDTH, TILE_HEIGHT),
)
_WHOLE: Final = (3, 4, 16)
"""Types of TIFF's numbers and offsets."""
_READ_CODECS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, *_CODECS)
_BY_BYTES: Final = (1, 5, 8, 32773, 32946)
"""Compressions that know nothing of pixels: none, LZW, deflate, packbits and the older deflate."""


class TiffEntry(NamedTuple):
    """One tag of a directory: type, struct letter and number of its values, and their offset."""

    kind: int
    letter: str
    number: int
    at: int


@dataclass(frozen=True, slots=True)
class TiffHeader:
    """The first directory of a TIFF."""

    order: str
    """`<` or `>`."""
    entries: dict[int, TiffEntry]

    @classmethod
    def parse(cls, image: Buffer) -> Self:
        """Read the directory. Raises struct.error for one that is cut off."""
        order = "<" if bytes(image[:2]) == b"II" else ">"
        big = 43 in (image[2], image[3])
        (at,) = struct.unpack_from(order + ("Q" if big else "I"), image, 8 if big else 4)
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), image, min(at, len(image)))
        first, size, inline = (at + 8, 20, 8) if big else (at + 2, 12, 4)
        entries: dict[int, TiffEntry] = {}
        for k in range(min(count, (len(image) - first) // size)):
            place = first + k * size
            tag, kind, number = struct.unpack_from(order + ("HHQ" if big else "HHI"), image, place)
            letter, value = _KINDS.get(kind, "I"), place + size - inline
            if struct.calcsize(order + letter) * number > inline:
                (value,) = struct.unpack_from(order + ("Q" if big else "I"), image, value)
            entries.setdefault(tag, TiffEntry(kind, letter, number, value))
        return cls(order, entries)

    def is_regular(self, image: Buffer) -> bool:
        """True if the tags that pixels depend on have the types and numbers of values that the
        format gives them. Decoders take others in ways of their own."""
        alone = [self.entries[tag] for tag in _SINGLE if tag in self.entries]
        samples = self.value(image, SAMPLES, 1)
        channels = [self.entries[tag] for tag in (BITS, FORMAT) if tag in self.entries]
        rows = self.value(image, HEIGHT, 0), self.value(image, ROWS_PER_STRIP, 1 << 32)
        strips = [self.entries[tag] for tag in (OFFSETS, COUNTS) if tag in self.entries]
        needed = -(-rows[0] // max(1, rows[1])) * (samples if self.is_planar(image) else 1)
        return (
            all(entry.kind in _WHOLE and entry.number == 1 for entry in alone)
            and all(entry.kind == _WHOLE[0] and entry.number == samples for entry in channels)
            and all(sides > 0 for sides in self.size(image))
            and all(tag in self.entries for tag in (COMPRESSION, PHOTOMETRIC))
            and self.value(image, COMPRESSION, 0) in _READ_CODECS
            and self.value(image, PLANAR, 1) in (1, 2)
            and all(entry.kind in _WHOLE and entry.number == needed for entry in strips)
        )

    def is_planar(self, image: Buffer) -> bool:
        """True if each channel has strips or tiles of its own."""
        return self.value(image, PLANAR, 1) == 2

    def values(self, image: Buffer, tag: int, most: int = _MOST_VALUES) -> list[int]:
        """Return the first values of a tag, at most `most`; none if it or they are missing."""
        entry = self.entries.get(tag)
        if entry is None:
            return []
        layout = f"{self.order}{min(entry.number, most)}{entry.letter}"
        if entry.at + struct.calcsize(layout) > len(image):
            return []
        return list(struct.unpack_from(layout, image, entry.at))

    def value(self, image: Buffer, tag: int, missing: int) -> int:
        """Return the first value of a tag."""
        return next(iter(self.values(image, tag)), missing)

    def changed(self, image: Buffer, values: dict[int, int]) -> bytearray:
        """Return a copy whose tags have other first values; tags that are missing stay so."""
        made = bytearray(image)
        for tag, value in values.items():
            entry = self.entries.get(tag)
            if entry is not None and self.values(image, tag):
                struct.pack_into(self.order + entry.letter, made, entry.at, value)
        return made

    def size(self, image: Buffer) -> tuple[int, int]:
        """Return (height, width), decoded; 0 for a side that is missing."""
        sides = self.value(image, HEIGHT, 0), self.value(image, WIDTH, 0)
        # Decoders follow the orientations of TIFF.
        return sides[::-1] if self.value(image, ORIENTATION, 1) in _ON_ITS_SIDE else sides

    def padded(self, image: Buffer, most: int) -> tuple[int, int, bytearray | None]:
        """Return (height, width, copy) of a picture of tiles: a copy whose sides are whole numbers
        of these, and which is not turned. OpenCV mixes up the columns of tiles that reach beyond a
        picture, or are mirrored. The copy is None where none are, and if it would have over `most`
        pixels."""
        height, width = self.value(image, HEIGHT, 0), self.value(image, WIDTH, 0)
        down, across = self.value(image, TILE_HEIGHT, 0), self.value(image, TILE_WIDTH, 0)
        if not (down and across and TILE_OFFSETS in self.entries):
            return height, width, None
        whole = height + -height % down, width + -width % across
        is_plain = whole == (height, width) and self.value(image, ORIENTATION, 1) == 1
        if is_plain or whole[0] * whole[1] > most:
            return height, width, None
        with suppress(struct.error):  # A side of 16 bits that becomes longer.
            changes = {HEIGHT: whole[0], WIDTH: whole[1], ORIENTATION: 1}
            return height, width, self.changed(image, changes)
        return height, width, None

    def unread(self, image: Buffer) -> str:
        """Return what keeps OpenCV from decoding the picture, or from its colours; "" if nothing
        does."""
        kind, channels = self.value(image, PHOTOMETRIC, RGB), self.value(image, SAMPLES, 1)
        if kind < RGB and channels > _GREY_AND_ALPHA:  # All but the first would be lost.
            return f"a TIFF of {counted(channels, 'channel')} of grey"
        colours = _COLOURS.get(kind, "")
        return colours or _CODECS.get(self.value(image, COMPRESSION, 1), "")

    def packed_bits(self, image: Buffer) -> int:
        """Return the bits of a pixel if several pixels share a byte, and `unpack` splits them."""
        bits = self.value(image, BITS, 1)
        plain = self.value(image, SAMPLES, 1) == 1
        plain = plain and self.value(image, COMPRESSION, 1) in _BY_BYTES
        return bits if plain and bits in (1, 2, 4) else 0

    def as_bytes(self, image: Buffer) -> bytearray:
        """Return a copy of a picture with `packed_bits` in which each byte is one grey pixel.

        Rows of a TIFF begin with a byte of their own, so that a row of bytes is a picture, too.
        """
        bits, changes = self.packed_bits(image), {BITS: 8, PHOTOMETRIC: 1, ORIENTATION: 1}
        for tag in (WIDTH, TILE_WIDTH):
            changes[tag] = -(-self.value(image, tag, 0) * bits // 8)
        return self.changed(image, changes)

    def unpack(self, image: Buffer, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the stored numbers, out of the pixels of `as_bytes`; shape (height, width)."""
        bits, width = self.packed_bits(image), self.value(image, WIDTH, 0)
        shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
        split: npt.NDArray[np.uint8] = (pixels[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        numbers = split.reshape(len(pixels), -1)[:, :width]
        return np.ascontiguousarray(turned(numbers, self.value(image, ORIENTATION, 1)))


def turned(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Return stored pixels, shape (rows, columns, ...), as an orientation of TIFF and EXIF shows
    them: 1 for as they are, from 5 on rows become columns."""
    if orientation == 1:
        return pixels
    if orientation in _UPENDED:
        pixels = pixels[::-1]
    if orientation in _MIRRORED:
        pixels = pixels[:, ::-1]
    pixels = pixels.swapaxes(0, 1) if orientation in _ON_ITS_SIDE else pixels
    return pixels.copy()  # Tensors have no strides below 0.


def stored_places(shares: npt.NDArray[np.float64], orientation: int) -> npt.NDArray[np.float64]:
    """Return where points of a picture as it is shown lie in its stored pixels: x and y in shares
    of the sides, shape (..., 2). The inverse of `turned`."""
    made = shares[..., ::-1] if orientation in _ON_ITS_SIDE else shares
    is_mirrored = np.array([orientation in _MIRRORED, orientation in _UPENDED])
    return np.where(is_mirrored, 1 - made, made)


def exif_orientation(image: Buffer) -> int:
    """Return the orientation that EXIF gives a JPEG, PNG or WebP; 1 for none, and for other images,
    among them TIFFs, which decoders turn."""
    view = memoryview(image)
    for at, end in _exif_parts(view):
        part = view[at:end]
        part = part[len(_EXIF) :] if bytes(part[: len(_EXIF)]) == _EXIF else part
        if bytes(part[:4]) not in TIFF:
            continue
        try:
            value = TiffHeader.parse(part).value(part, ORIENTATION, 1)
        except (struct.error, IndexError):
            return 1
        return value if 1 <= value <= 8 else 1
    return 1


def _exif_parts(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the places of the parts of a file that may be EXIF."""
    head = bytes(view[:12])
    is_png, is_webp = head[:8] == PNG, head[:4] == b"RIFF" and head[8:] == b"WEBP"
    if head[:2] == b"\xff\xd8":
        at = 2
        while at + 4 <= len(view) and view[at] == 0xFF and view[at + 1] != _SCAN:
            end = at + 2 + int.from_bytes(view[at + 2 : at + 4], "big")
            if view[at + 1] == _APP1 and bytes(view[at + 4 : at + 4 + len(_EXIF)]) == _EXIF:
                yield at + 4, end
            at = max(end, at + 4)
    elif is_png or is_webp:
        at, name = (8, b"eXIf") if is_png else (12, b"EXIF")
        for _ in range(_MOST_CHUNKS):
            if at + 8 > len(view):
                return
            first, second = bytes(view[at : at + 4]), bytes(view[at + 4 : at + 8])
            length = int.from_bytes(first, "big") if is_png else int.from_bytes(second, "little")
            if (second if is_png else first) == name:
                yield at + 8, at + 8 + length
            at += 12 + length if is_png else 8 + length + length % 2


def without_animation(image: Buffer) -> Buffer:
    """Return a PNG with its default image alone, which all viewers show that know no animation; any
    other image as it is."""
    view = memoryview(image)
    if bytes(view[:8]) != PNG:
        return image
    at, parts, left_out = 8, [bytes(view[:8])], False
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(view):
            break
        name, end = bytes(view[at + 4 : at + 8]), at + 12 + int.from_bytes(view[at : at + 4], "big")
        if name in _ANIMATION:
            left_out = True
        else:
            parts.append(bytes(view[at:end]))
        if name == b"IDAT" and not left_out:
            return image  # The animation is told before the picture.
        at = end
    return b"".join([*parts, view[at:]]) if left_out else image


def with_numbers(image: Buffer) -> Buffer:
    """Return a BMP whose palette gives each number the grey of the same value; one without a
    palette, and any other image, as it is."""
    view = memoryview(image)
    if bytes(view[:2]) != b"BM" or len(view) < 26 or (view[14] != 12 and len(view) < 54):
        return image
    pixels, head = (int.from_bytes(view[at : at + 4], "little") for at in (10, 14))
    is_core = head == 12
    bits = int.from_bytes(view[24:26] if is_core else view[28:30], "little")
    wide = 3 if is_core else 4
    at = 14 + head
    if bits > 8 or not at <= pixels <= len(view):
        return image
    made = bytearray(view)
    for k in range(min(1 << bits, (pixels - at) // wide)):
        made[at + k * wide : at + k * wide + 3] = bytes([k] * 3)
    return made


_FIELD: Final = rb"(?:\s|#[^\n]*\n)+"
_PNM: Final = re.compile(rb"P[2356]" + _FIELD + rb"\d+" + _FIELD + rb"\d+" + _FIELD + rb"(\d+)\s")
_PBM: Final = re.compile(rb"P[14]" + _FIELD + rb"\d+" + _FIELD + rb"\d+\s")
_LONGEST_HEAD: Final = 1 << 12


def is_pnm(image: Buffer) -> bool:
    """True for a PBM, PGM or PPM whose header is whole. OpenCV makes pictures of other sizes of
    numbers with something else between their digits."""
    head = bytes(image[:_LONGEST_HEAD])
    return bool(_PNM.match(head) or _PBM.match(head))


def pnm_most(image: Buffer) -> int:
    """Return the number that is white in a PGM or PPM; 0 for other images."""
    head = _PNM.match(bytes(image[:_LONGEST_HEAD]))
    return 0 if head is None else int(head[1])


def pnm_as_stored(image: Buffer) -> Buffer:
    """Return a PGM or PPM of which OpenCV returns the stored numbers, be they text or not."""
    head = _PNM.match(bytes(image[:_LONGEST_HEAD]))
    if head is None:
        return image
    if int(head[1]) > 255:
        return b"".join([image, b"\n"])  # Of text, whose last number OpenCV reads up to a space.
    first, last = head.span(1)
    return b"".join([memoryview(image)[:first], b"255", memoryview(image)[last:], b"\n"])


_UNREAD: Final = (
    (re.compile(rb".{4}ftypavi[fs]", re.DOTALL), "AVIF"),
    (re.compile(rb".{4}ftyp(?:hei|hev|mif|msf)", re.DOTALL), "HEIC"),
    (re.compile(rb"\xff\x0a|\0{3}\x0cJXL "), "JPEG XL"),
    (re.compile(rb"\0{3}\x0cjP {2}|\xff\x4f\xff\x51"), "JPEG 2000"),
    (re.compile(rb"8BPS"), "Photoshop"),
    (re.compile(rb"DDS "), "DDS"),
    (re.compile(rb"\0\0\x01\0"), "ICO"),
    (re.compile(rb"%PDF"), "PDF"),
    (re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<svg"), "SVG"),
    (re.compile(rb"\s*<(?:!DOCTYPE )?html", re.IGNORECASE), "HTML"),
    (re.compile(rb"Pf\s|PF\s"), "PFM"),
)


def unread_format(image: Buffer) -> str:
    """Return the name of a file's format, of those that dlio knows and does not decode; else ""."""
    head = bytes(image[:_LONGEST_HEAD])
    return next((name for pattern, name in _UNREAD if pattern.match(head)), "")


def has_more_frames(image: Buffer) -> bool:
    """True for a GIF, WebP or TIFF with more than the frame or page that is decoded."""
    view = memoryview(image)
    head = bytes(view[:21])
    if head[:6] in GIF:
        frames = (block for block in gif_blocks(view) if block.kind == GIF_FRAME)
        return len(list(islice(frames, 2))) > 1
    if head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X":
        return len(head) > 20 and bool(head[20] & 2)
    if head[:4] not in TIFF or 43 in head[2:4]:
        return False
    order = "<" if head[:2] == b"II" else ">"
    if len(view) < 8:
        return False
    (at,) = struct.unpack_from(order + "I", view, 4)
    if at + 2 > len(view):
        return False
    end = at + 2 + 12 * int(struct.unpack_from(order + "H", view, at)[0])
    if end + 4 > len(view):
        return False
    (following,) = struct.unpack_from(order + "I", view, end)
    return bool(following)


@dataclass(frozen=True, slots=True)
class GifBlock:
    """One block of a GIF: `begin` to `end` in the file."""

    kind: int
    """GIF_FRAME, or that of an extension with its label, such as GIF_CONTROL."""
    begin: int
    end: int
    """The end of the whole block; of a frame that is cut off that of the file."""


def gif_blocks(view: memoryview) -> Iterator[GifBlock]:
    """Yield the blocks of a GIF up to its end, as far as they go. Bytes between blocks are passed
    over, as by Pillow."""
    if len(view) < 13:
        return
    at = 13 + _palette_bytes(view[10])
    while at + 1 < len(view) and view[at] != _GIF_END:
        begin, kind = at, int(view[at])
        if kind == GIF_FRAME:
            if at + 10 >= len(view):
                return
            at += 11 + _palette_bytes(view[at + 9])
        elif kind == _GIF_EXTENSION:
            kind = kind << 8 | view[at + 1]
            at += 2
        else:
            at += 1
            continue
        while at < len(view) and view[at]:
            at += 1 + view[at]
        at = min(at + 1, len(view))
        yield GifBlock(kind, begin, at)


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def gif_size(image: Buffer) -> tuple[int, int, bool]:
    """Return (height, width) of a GIF, which a first frame beyond its screen makes larger, and
    True if OpenCV has Pillow's pixels: that frame is the whole screen, and has a palette."""
    view = memoryview(image)
    wide, high = struct.unpack_from("<HH", view, 6)
    for block in gif_blocks(view):
        if block.kind == GIF_FRAME:
            left, top, width, height, flags = struct.unpack_from("<HHHHB", view, block.begin + 1)
            is_plain = (left, top, width, height) == (0, 0, wide, high)
            has_palette = bool((flags | view[10]) & 0x80)
            return max(high, top + height), max(wide, left + width), is_plain and has_palette
    return high, wide, True


def without_transparency(image: Buffer) -> Buffer:
    """Return a GIF whose first frame has no transparent number, which would have the colour of the
    background in place of its own."""
    view = memoryview(image)
    made: bytearray | None = None
    for block in gif_blocks(view):
        if block.kind == GIF_FRAME:
            break
        if block.kind == GIF_CONTROL and block.end - block.begin > _CONTROL_FLAGS:
            made = bytearray(view) if made is None else made
            made[block.begin + _CONTROL_FLAGS] &= 0xFE
    return image if made is None else made


_UNPACKED: Final = (0, 3, 6)
"""Ways to store the pixels of a BMP: as numbers, or by the bits that masks say."""
_BMP_HEADS: Final = (12, 40, 52, 56, 64, 108, 124)


def bmp_is_regular(image: Buffer) -> bool:
    """True for a BMP with a header of a length that there is, and pixels behind its palette."""
    if len(image) < 54:
        return bytes(image[14:18]) == b"\x0c\0\0\0"
    pixels, head = struct.unpack_from("<II", image, 10)
    if head == _BMP_HEADS[0]:
        return True
    (bits,), (used,) = struct.unpack_from("<H", image, 28), struct.unpack_from("<I", image, 46)
    colours = (used or 1 << bits) if bits <= 8 else 0
    return head in _BMP_HEADS and 14 + head + 4 * colours <= pixels


def bmp_is_whole(image: Buffer) -> bool:
    """True for a regular BMP that has all of its pixels, and no run lengths."""
    if len(image) < 54 or not bmp_is_regular(image):
        return False
    pixels, width, height, bits, ways = struct.unpack_from("<10xI4xii2xHI", image)
    rows = -(-width * bits // 32) * 4 * abs(height)
    return ways in _UNPACKED and pixels + rows <= len(image)


def bmp_bits(image: Buffer) -> tuple[int, int, int] | None:
    """Return the bits of (blue, green, red) in the pixels of a BMP of 16 bits; None for others."""
    view = memoryview(image)
    if bytes(view[:2]) != b"BM" or len(view) < 54 or bytes(view[28:30]) != b"\x10\0":
        return None
    masked = int.from_bytes(view[30:34], "little") in (3, 6)
    return (5, 6, 5) if masked and bytes(view[58:62]) == b"\xe0\x07\0\0" else (5, 5, 5)


def is_odd(image: Buffer) -> bool:
    """True unless an image is sound, although OpenCV would decode it to other pixels, or not at
    all."""
    if bytes(image[:6]) in GIF:
        height, width, is_plain = gif_size(image)
        return is_plain or (width, height) != struct.unpack_from("<HH", image, 6)
    if bytes(image[:2]) == b"BM":
        return not bmp_is_whole(image)
    return bytes(image[:4]) not in TIFF or not TiffHeader.parse(image).unread(image)
