"""Strategies of hypothesis for picture files over formats, depths, palettes, alpha, orientations
and layouts; many are written here, byte by byte, as no writer at hand has all of these."""

import io
import itertools
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import simplejpeg
from hypothesis import strategies as st
from PIL import Image

from tests.image.jpegs import whole

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class PictureFile:
    """A file, and its contents."""

    about: str
    data: bytes
    suffix: str
    numbers: Numbers | None = None
    """The stored numbers of a mask, shape (rows, columns), as shown; None for colours."""
    colours: Numbers | None = None
    """RGB that is meant; None where the format's library says it."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # For hypothesis
        printer.text(f"<{self.about}>")


def pillows(data: bytes) -> Numbers | None:
    """Return a picture as Pillow reads it, as RGB; None if it refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as picture:
                if picture.mode.startswith("I;16"):  # Which Pillow limits, and dlio scales.
                    return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[..., None], 3, 2)
                return np.asarray(picture.convert("RGB"))
        except (OSError, ValueError, SyntaxError, KeyError, TypeError, struct.error):
            return None


def shown(drawn: PictureFile) -> Numbers | None:
    """Return the RGB that a file stands for; None where its library refuses it."""
    if drawn.colours is not None:
        return drawn.colours
    if drawn.suffix == "jpg" and not drawn.about.startswith("JPEG of CMYK"):
        with suppress(ValueError, KeyError):  # It has no name for some kinds of subsampling.
            return whole(drawn.data)
    return pillows(drawn.data)


def _sides(draw: st.DrawFn, most: int = 21) -> tuple[int, int]:
    return draw(st.integers(1, most)), draw(st.integers(1, most))


def _random(draw: st.DrawFn) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 1 << 32)))


def _some(draw: st.DrawFn, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _grey_of(colours: Numbers) -> Numbers | None:
    """Return one channel of pixels (rows, columns, 3) that are all grey; None for colours."""
    is_grey = (colours == colours[..., :1]).all()
    return colours[..., 0] if is_grey else None


def _packed(numbers: Numbers, bits: int) -> Numbers:
    """Return rows of bytes of numbers of shape (rows, columns, channels), 16 bits big-endian."""
    rows = len(numbers)
    if bits == 16:
        return numbers.astype(">u2").reshape(rows, -1).view(np.uint8)
    flat = numbers.astype(np.uint8).reshape(rows, -1)
    if bits == 8:
        return flat
    spread = np.unpackbits(flat[..., None], axis=2)[..., 8 - bits :].reshape(rows, -1)
    return np.packbits(spread, axis=1)


# PNG

_PASSES: Final = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2))
_LAST_PASSES: Final = ((0, 2, 1, 2), (1, 2, 0, 1))
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def _chunk(name: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + check


def _scanlines(numbers: Numbers, bits: int, interlaced: bool, filters: list[int]) -> bytes:
    """Return filtered rows; Sub and Up undo themselves on the bytes of rows, others stay None."""
    places = (*_PASSES, *_LAST_PASSES) if interlaced else ((0, 1, 0, 1),)
    step = max(1, numbers.shape[2] * bits // 8)
    lines = []
    for top, down, left, across in places:
        part = numbers[top::down, left::across]
        if not part.size:
            continue
        before = np.zeros(_packed(part[:1], bits).shape[1], np.uint8)
        for row, kind in zip(_packed(part, bits), itertools.cycle(filters), strict=False):
            other = np.zeros_like(row)
            if kind == 1:
                other[step:] = row[:-step]
            elif kind == 2:
                other = before
            lines.append(bytes([kind]) + (row - other).astype(np.uint8).tobytes())
            before = row
    return zlib.compress(b"".join(lines))


@st.composite
def pngs(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw)
    kind = _some(draw, 0, 2, 3, 4, 6)
    depths = {0: (1, 2, 4, 8, 16), 3: (1, 2, 4, 8)}.get(kind, (8, 16))
    bits = _some(draw, *depths)
    numbers = rng.integers(0, 1 << bits, (height, width, _CHANNELS[kind]))
    if kind in (2, 6) and draw(st.booleans()):
        numbers[..., 1:3] = numbers[..., :1]
    if bits == 16 and draw(st.booleans()):
        numbers >>= 8
    interlaced = draw(st.booleans())
    filters = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    parts = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, interlaced))]
    before = draw(st.sets(st.sampled_from(["gAMA", "sRGB", "tEXt", "pHYs", "eXIf", "cHRM"])))
    texts = {
        "gAMA": struct.pack(">I", _some(draw, 45455, 100000, 22000)),
        "sRGB": b"\0",
        "tEXt": b"Title\0a",
        "pHYs": struct.pack(">IIB", 3, 1, 1),
        "eXIf": b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0"
        + bytes([_some(draw, *range(1, 9)), 0, 0, 0, 0, 0, 0, 0]),
        "cHRM": struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
    }
    parts += [_chunk(name.encode(), texts[name]) for name in sorted(before)]
    used = 1 << bits
    if kind == 3:
        used = draw(st.integers(int(numbers.max()) + 1, 1 << bits))
        parts.append(_chunk(b"PLTE", rng.bytes(3 * used)))
    if kind in (0, 2, 3) and draw(st.booleans()):
        marks = rng.bytes(draw(st.integers(1, used))) if kind == 3 else b""
        for channel in numbers[0, 0] if kind != 3 else ():
            marks += struct.pack(">H", channel)
        parts.append(_chunk(b"tRNS", marks))
    pixels = _scanlines(numbers, bits, interlaced, filters)
    cut = draw(st.integers(0, len(pixels)))
    body = [_chunk(b"IDAT", part) for part in (pixels[:cut], pixels[cut:]) if part]
    animation = _some(draw, "", "", "with", "behind")
    if animation:
        control = struct.pack(">IIIIIHHBB", 0, width, height, 0, 0, 1, 10, 0, 0)
        other = _scanlines(rng.integers(0, used, numbers.shape), bits, interlaced, [0])
        parts.append(_chunk(b"acTL", struct.pack(">II", 1 + (animation == "with"), 0)))
        first = [_chunk(b"fcTL", control)] if animation == "with" else []
        number = len(first)
        body = [*first, *body, _chunk(b"fcTL", struct.pack(">I", number) + control[4:])]
        body.append(_chunk(b"fdAT", struct.pack(">I", number + 1) + other))
    data = b"".join([b"\x89PNG\r\n\x1a\n", *parts, *body, _chunk(b"IEND", b"")])
    colours = None
    if bits == 16:
        eight = (numbers >> 8).astype(np.uint8)
        colours = eight[..., :3] if kind in (2, 6) else np.repeat(eight[..., :1], 3, 2)
    stored = _grey_of(numbers[..., :3]) if kind in (2, 6) else numbers[..., 0]
    about = f"PNG kind {kind} of {bits} bits, {interlaced=}, {sorted(before)}, {animation}"
    return PictureFile(about, data, "png", stored, colours)


# TIFF

TURNS: Final[dict[int, Callable[[Numbers], Numbers]]] = {
    1: lambda p: p,
    2: lambda p: np.fliplr(p),
    3: lambda p: np.rot90(p, 2),
    4: lambda p: np.flipud(p),
    5: lambda p: np.swapaxes(p, 0, 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.swapaxes(np.rot90(p, 2), 0, 1),
    8: lambda p: np.rot90(p, 1),
}
"""The table of the standards of TIFF and EXIF, another way than dlio's."""
_TIFF_SIZES: Final = {3: "H", 4: "I", 16: "Q"}


def tiff_file(order: str, big: bool, parts: list[bytes], tags: dict[int, list[int]]) -> bytes:
    """Return a TIFF; `tags` has those of the places and sizes of the parts, without values."""
    place, size = (273, 279) if 273 in tags else (324, 325)
    wide = 16 if big else 4
    inline, word = (8, "Q") if big else (4, "I")
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head += struct.pack(order + "HHQ", 8, 0, 0)[:4] if big else b""
    at, places = len(head) + inline, []
    body = b""
    for part in parts:
        places.append(at + len(body))
        body += part + bytes(len(part) % 2)
    tags = {**tags, place: places, size: [len(part) for part in parts]}
    at += len(body)
    behind = at + (8 if big else 2) + len(tags) * (20 if big else 12) + inline
    rows, more = b"", b""
    for tag, values in sorted(tags.items()):
        kind = wide if tag in (place, size) else 4 if max(values) > 65535 else 3
        data = struct.pack(f"{order}{len(values)}{_TIFF_SIZES[kind]}", *values)
        if len(data) > inline:
            where = struct.pack(order + word, behind + len(more))
            data, more = where, more + data + bytes(len(data) % 2)
        rows += struct.pack(order + "HH" + word, tag, kind, len(values)) + data.ljust(inline, b"\0")
    count = struct.pack(order + ("Q" if big else "H"), len(tags))
    return head + struct.pack(order + word, at) + body + count + rows + bytes(inline) + more


def _packbits(data: bytes) -> bytes:
    """Literal runs, and runs of one byte where it comes three times."""
    out, at = bytearray(), 0
    while at < len(data):
        part = data[at : at + 128]
        same = len(part) - len(part.lstrip(part[:1]))
        if same > 2:
            out += bytes([257 - same, data[at]])
            at += same
        else:
            out += bytes([0, data[at]])
            at += 1
    return bytes(out)


_REVERSED: Final = bytes(int(f"{k:08b}"[::-1], 2) for k in range(256))


@st.composite
def tiffs(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 40)
    kind = _some(draw, "grey", "white", "palette", "rgb", "alpha", "grey alpha")
    depths = {"grey": (1, 2, 4, 8, 16, 32), "white": (1, 2, 4, 8), "palette": (1, 2, 4, 8)}
    bits = _some(draw, *depths.get(kind, (8, 8, 16)))
    channels = {"rgb": 3, "alpha": 4, "grey alpha": 2}.get(kind, 1)
    layout = "u"
    if kind == "grey" and bits >= 16:
        layout = _some(draw, *("ui" if bits == 16 else "uif"))
    elif kind == "grey" and bits == 8:
        layout = _some(draw, *"ui")
    numbers = rng.integers(0, min(1 << bits, 1 << 16), (height, width, channels))
    if kind in ("rgb", "alpha") and draw(st.booleans()):
        numbers[..., 1:3] = numbers[..., :1]
    if bits > 8 and draw(st.booleans()):
        numbers %= 256
    if layout == "i":
        numbers = numbers % (1 << bits - 1) - _some(draw, 0, 7)
    order, big, turn = _some(draw, "<", ">"), draw(st.booleans()), _some(draw, *range(1, 9))
    planar = channels > 1 and draw(st.booleans())
    tiled, predicted = (
        draw(st.booleans()),
        draw(st.booleans()) and bits in (8, 16) and layout != "f",
    )
    codec = _some(draw, 1, 8, 32946, 32773)
    reverse = draw(st.booleans()) and bits == 1 and codec in (1, 8)
    kinds = {"grey": 1, "white": 0, "palette": 3, "grey alpha": 1}
    tags: dict[int, list[int]] = {
        256: [width],
        257: [height],
        258: [bits] * channels,
        259: [codec],
        262: [kinds.get(kind, 2)],
        274: [turn],
        277: [channels],
        284: [1 + planar],
    }
    if predicted := predicted and codec in (8, 32946):
        tags[317] = [2]
    if reverse:
        tags[266] = [2]
    if layout != "u":
        tags[339] = [{"i": 2, "f": 3}[layout]] * channels
    if kind in ("alpha", "grey alpha"):
        tags[338] = [_some(draw, 0, 1, 2)]
    palette = None
    if kind == "palette":
        palette = rng.integers(0, 1 << 16, (3, 1 << bits))
        tags[320] = palette.reshape(-1).tolist()
    if tiled:
        down, across = 16 * draw(st.integers(1, 2)), 16 * draw(st.integers(1, 2))
        tags |= {322: [across], 323: [down], 324: [], 325: []}
    else:
        down, across = draw(st.integers(1, height)), width
        tags |= {278: [down], 273: [], 279: []}
    dtype = f"{order}{layout}{max(8, bits) // 8}"
    parts = []
    for first in range(channels if planar else 1):
        plane = numbers[..., first : first + 1] if planar else numbers
        for top, left in itertools.product(range(0, height, down), range(0, width, across)):
            part = plane[top : top + down, left : left + across]
            if tiled:
                gaps = (down - part.shape[0], across - part.shape[1])
                part = np.pad(part, ((0, gaps[0]), (0, gaps[1]), (0, 0)))
            if predicted:
                part = np.diff(part, axis=1, prepend=0) % (1 << bits)
                part = part.astype(f"u{bits // 8}").astype(f"{order}u{bits // 8}")
                body = part.tobytes()
            elif bits < 8:
                body = _packed(part, bits).tobytes()
            else:
                body = part.astype(dtype).tobytes()
            if codec == 32773:
                body = _packbits(body)
            elif codec != 1:
                body = zlib.compress(body)
            parts.append(body.translate(_REVERSED) if reverse else body)
    data = tiff_file(order, big, parts, tags)
    turned, most = TURNS[turn](numbers), (1 << bits) - 1
    if kind == "white":
        turned = most - turned
    if palette is not None:
        colours = palette.T[turned[..., 0]] >> 8
    elif layout != "u" or bits > 16:  # Pillow takes 8 bits for numbers without a sign.
        colours = np.clip(turned, 0, 255) if bits > 8 else turned & 255
    else:
        colours = turned * 255 // most if bits < 16 else turned >> 8
    if tags.get(338) == [1] and kind == "alpha":
        shares = colours[..., 3:]
        colours = np.minimum(colours * 255 // np.maximum(shares, 1), 255) * (shares > 0)
    colours = colours[..., :3] if colours.shape[2] > 2 else np.repeat(colours[..., :1], 3, 2)
    stored: Numbers | None = turned[..., 0]
    if kind in ("rgb", "alpha"):
        stored = _grey_of(turned[..., :3])
    if kind == "grey alpha" and bits > 8:
        stored = None  # Neither Pillow nor libtiff give the numbers.
    about = f"TIFF {kind} of {bits}{layout} bits, codec {codec}, {order=} {big=} {turn=} {planar=}"
    about += f" {tiled=} {predicted=} {reverse=} {tags.get(338)}"
    return PictureFile(about, data, "tif", stored, colours=colours.astype(np.uint8))


@st.composite
def pillow_tiffs(draw: st.DrawFn) -> PictureFile:
    """TIFFs of libtiff's other codecs and of other colours."""
    rng, (height, width) = _random(draw), _sides(draw, 30)
    mode = _some(draw, "1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "F", "LA")
    codecs = {"1": ["group3", "group4", "tiff_ccitt"]}.get(mode, ["tiff_lzw"])
    codec = _some(draw, None, "tiff_lzw", "packbits", "tiff_adobe_deflate", "lzma", "zstd", *codecs)
    pixels = rng.integers(0, 256, (height, width, 4)).astype(np.uint8)
    if draw(st.booleans()):
        pixels[..., 1:3] = pixels[..., :1]
    numbers: Numbers | None = pixels[..., 0]
    if mode == "1":
        numbers = pixels[..., 0] % 2
        image = Image.fromarray(numbers == 1)
    elif mode in ("I;16", "F"):
        numbers = pixels[..., 0].astype(np.uint16 if mode == "I;16" else np.float32)
        image = Image.fromarray(numbers)
    elif mode == "P":
        image = Image.fromarray(pixels[..., 0])
        image.putpalette(rng.bytes(768))
    elif mode in ("RGB", "RGBA"):
        numbers = _grey_of(pixels[..., :3])
        image = Image.fromarray(pixels[..., : len(mode)])
    elif mode in ("L", "LA"):
        image = Image.fromarray(pixels[..., 0] if mode == "L" else pixels[..., :2], mode)
    else:
        numbers = None
        image = Image.frombytes(mode, (width, height), pixels[..., : len(mode)].tobytes())
    memory = io.BytesIO()
    image.save(memory, "TIFF", compression=codec)
    if mode in ("CMYK", "LAB"):
        numbers = _grey_of(np.asarray(Image.open(memory).convert("RGB")))
    return PictureFile(f"TIFF of {mode} by {codec}", memory.getvalue(), "tiff", numbers)


# BMP


def _run_lengths(numbers: Numbers, bits: int) -> bytes:
    """Return rows from below as runs, and as numbers alone where at least three differ."""
    out = bytearray()
    for row in numbers[::-1].tolist():
        for value, own in itertools.groupby(row):
            count = len(list(own))
            out += bytes([count, value if bits == 8 else value << 4 | value])
        out += b"\0\0"
    return bytes(out + b"\0\1")


_BMP_BITS: Final = (1, 4, 8, 16, 24, 32)


@st.composite
def bmps(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 30)
    bits, head = _some(draw, *_BMP_BITS), _some(draw, 12, 40, 108, 124)
    if head == 12 and bits in (16, 32):
        head = 40
    upright = head > 12 and draw(st.booleans())
    is_runs = bits in (4, 8) and head > 12 and not upright and draw(st.booleans())
    masks: tuple[int, ...] = ()
    numbers = rng.integers(0, 1 << min(bits, 8), (height, width))
    palette, stored = b"", None
    if bits <= 8:
        used = 1 << bits
        if head > 12 and draw(st.booleans()):
            used = draw(st.integers(int(numbers.max()) + 1, used))
        colours = rng.integers(0, 256, (used, 4)).astype(np.uint8)
        palette = colours[:, : 3 if head == 12 else 4].tobytes()
        stored = numbers
        rows = _packed(numbers[..., None], bits)
    elif bits == 16:
        masks = _some(draw, (), (0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F))
        used, rows = 0, rng.integers(0, 1 << 16, (height, width)).astype("<u2").view(np.uint8)
    else:
        used, channels = 0, bits // 8
        pixels = rng.integers(0, 256, (height, width, channels)).astype(np.uint8)
        if draw(st.booleans()):
            pixels[..., 1:3] = pixels[..., :1]
        stored = _grey_of(pixels[..., :3])
        if bits == 32:
            masks = _some(draw, (), (0xFF0000, 0xFF00, 0xFF))
        rows = pixels.reshape(height, -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))
    body = (rows if upright else rows[::-1]).tobytes()
    if is_runs:
        body = _run_lengths(numbers, bits)
    ways = 3 if masks else {(True, 8): 1, (True, 4): 2}.get((is_runs, bits), 0)
    side = -height if upright else height
    if head == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack("<IiiHHIIiiII", head, width, side, 1, bits, ways, len(body), 0, 0, 0, 0)
        if used and used != 1 << bits:
            info = info[:32] + struct.pack("<II", used, 0)
        extra = struct.pack(f"<{len(masks)}I", *masks)
        info += extra if head == 40 else extra.ljust(head - 40, b"\0")
    offset = 14 + len(info) + len(palette)
    data = struct.pack("<2sIHHI", b"BM", offset + len(body), 0, 0, offset) + info + palette + body
    about = f"BMP of {bits} bits, head {head}, {upright=} {is_runs=} {masks=} of {used} colours"
    return PictureFile(about, data, "bmp", stored)


# PNM


@st.composite
def pnms(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 20)
    kind = _some(draw, 1, 2, 3, 4, 5, 6)
    most = 1 if kind in (1, 4) else draw(st.one_of(st.integers(1, 65535), st.just(255)))
    shape = (height, width, 3) if kind in (3, 6) else (height, width)
    numbers = rng.integers(0, most + 1, shape)
    gap = _some(draw, " ", "\n", "\n# a comment\n", "\t", "\r\n")
    ends = [] if kind in (1, 4) else [str(most)]
    head = gap.join([f"P{kind}", str(width), str(height), *ends]).encode() + b"\n"
    if kind == 4:
        body = np.packbits(numbers.astype(np.uint8), axis=1).tobytes()
    elif kind < 4:
        between = _some(draw, " ", "\n", "  ")
        body = between.join(map(str, numbers.reshape(-1).tolist())).encode() + _some(
            draw, b"", b"\n"
        )
    else:
        body = numbers.astype(">u2" if most > 255 else np.uint8).tobytes()
    white = np.rint(numbers / most * 255) if most != 65535 else numbers >> 8
    if kind in (1, 4):
        white = (1 - numbers) * 255
        numbers = 1 - numbers
    colours = white.astype(np.uint8)
    colours = colours if colours.ndim == 3 else np.repeat(colours[..., None], 3, 2)
    stored = _grey_of(numbers) if kind in (3, 6) else numbers
    suffix = "ppm" if kind in (3, 6) else "pgm"
    return PictureFile(f"P{kind} of {most}, {gap=}", head + body, suffix, stored, colours)


# GIF, WebP, JPEG


@st.composite
def gifs(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 30)
    colours = _some(draw, 2, 3, 16, 255, 256)
    count, frames = draw(st.integers(1, 3)), []
    for _ in range(count):
        frames.append(Image.fromarray(rng.integers(0, colours, (height, width)).astype(np.uint8)))
        frames[-1].putpalette(rng.bytes(3 * colours))
    options: dict[str, Any] = {"interlace": draw(st.integers(0, 1)), "optimize": False}
    if draw(st.booleans()):
        options["transparency"] = draw(st.integers(0, colours - 1))
    if count > 1:
        options |= {"save_all": True, "append_images": frames[1:], "duration": 40}
        options["disposal"] = draw(st.integers(0, 3))
    memory = io.BytesIO()
    frames[0].save(memory, "GIF", **options)
    data = bytearray(memory.getvalue())
    place, where = data.index(b",\0\0\0\0", 13), ""
    if draw(st.booleans()):  # A first frame that is a part of the screen.
        top, left = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        struct.pack_into("<HH", data, 6, width + left + draw(st.integers(0, 3)), height + top)
        struct.pack_into("<HH", data, place + 1, left, top)
        where = f"at {top}, {left}"
    numbers = None
    with Image.open(io.BytesIO(bytes(data))) as first:
        if first.mode in ("P", "L"):
            numbers = np.asarray(first)
    about = f"GIF of {count} frames, {where} {sorted(options.items(), key=str)[-1]}"
    return PictureFile(about, bytes(data), "gif", numbers)


@st.composite
def webps(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 40)
    channels, count = _some(draw, 3, 4), draw(st.integers(1, 3))
    pixels = rng.integers(0, 256, (count, height, width, channels)).astype(np.uint8)
    if draw(st.booleans()):
        pixels[..., 1:3] = pixels[..., :1]
    options: dict[str, Any] = {"lossless": draw(st.booleans()), "exact": True, "method": 0}
    images = [Image.fromarray(each) for each in pixels]
    if count > 1:
        options |= {"save_all": True, "append_images": images[1:]}
    if draw(st.booleans()):
        exif = Image.Exif()
        exif[274] = draw(st.integers(1, 8))
        options["exif"] = exif.tobytes()
    memory = io.BytesIO()
    images[0].save(memory, "WEBP", **options)
    with Image.open(memory) as first:  # Colours where alpha is 0 need not stay.
        numbers = _grey_of(np.asarray(first.convert("RGB")))
    about = f"WebP of {count} frames, {channels} channels, {options['lossless']=}"
    return PictureFile(about, memory.getvalue(), "webp", numbers)


@st.composite
def jpegs(draw: st.DrawFn) -> PictureFile:
    rng, (height, width) = _random(draw), _sides(draw, 70)
    mode = _some(draw, "L", "RGB", "RGB", "CMYK")
    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([x * 3, y * 5, x + y, x * y], -1)[..., :channels]
    pixels = ((waves + rng.integers(0, 60, waves.shape)) % 256).astype(np.uint8)
    options: dict[str, Any] = {
        "quality": draw(st.integers(1, 100)),
        "progressive": draw(st.booleans()),
        "optimize": draw(st.booleans()),
        "restart_marker_blocks": draw(st.integers(0, 3)),
    }
    if mode == "RGB":
        options["subsampling"] = _some(draw, 0, 1, 2)
        options["keep_rgb"] = draw(st.booleans()) and options["subsampling"] == 0
    if draw(st.booleans()):
        exif = Image.Exif()
        exif[274] = draw(st.integers(1, 8))
        options["exif"] = exif.tobytes()
    memory = io.BytesIO()
    image = Image.frombytes(mode, (width, height), pixels.tobytes())
    image.save(memory, "JPEG", **options)
    options.pop("exif", None)
    data = memory.getvalue()
    if mode == "RGB" and draw(st.booleans()):
        options = {"quality": options["quality"], "colorsubsampling": _some(draw, "440", "411")}
        data = simplejpeg.encode_jpeg(pixels, **options)
    return PictureFile(f"JPEG of {mode}, {options}", data, "jpg")


PICTURES: Final[dict[str, st.SearchStrategy[PictureFile]]] = {
    "png": pngs(),
    "tiff": st.one_of(tiffs(), tiffs(), pillow_tiffs()),
    "bmp": bmps(),
    "pnm": pnms(),
    "gif": gifs(),
    "webp": webps(),
    "jpeg": jpegs(),
}
