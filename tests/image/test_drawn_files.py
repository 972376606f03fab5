"""Pictures and masks of drawn formats, depths, palettes and orientations are those of Pillow.

The stored numbers are the judge where Pillow differs: it limits pictures of 16 bits to 255 in place
of scaling them, and stretches the numbers of masks of 2 and 4 bits. TIFFs of such depths are
written here, byte by byte.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image.decoder import decode_whole, image_size
from dlio.image.segmentation_masks import decode_mask
from tests.readers.picture_files import TURNS

Bytes = npt.NDArray[np.uint8]


class _Drawn(NamedTuple):
    """A file, and its contents."""

    about: str
    data: bytes
    numbers: npt.NDArray[Any] | None = None
    """The stored numbers of a mask, as shown; None for colours."""
    picture: Bytes | None = None
    """RGB; None if Pillow is the judge."""


_PILLOW: Final = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "PPM": ("1", "L", "RGB"),
    "WEBP": ("RGB", "RGBA"),
}
_COMPRESSIONS: Final = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")


def _pillows(generator: np.random.Generator, form: str) -> _Drawn:
    """A file that Pillow writes."""
    height, width = (int(side) for side in generator.integers(1, 40, 2))
    mode = str(generator.choice(_PILLOW[form]))
    pixels = generator.integers(0, 256, (height, width, 4), np.uint8).astype(np.uint8)
    numbers: npt.NDArray[Any] | None = pixels[..., 0]
    picture, options = None, dict[str, Any]()
    if mode == "1":
        numbers = pixels[..., 0] % 2
        image = Image.fromarray(numbers == 1)
    elif mode == "P":
        colours = int(generator.choice((2, 3, 16, 256)))
        numbers = (pixels[..., 0].astype(int) % colours).astype(np.uint8)
        image = Image.fromarray(numbers)
        palette = generator.integers(0, 256, (colours, 3))
        if generator.random() < 0.5:
            palette[:] = palette[:, :1]
        image.putpalette(palette.reshape(-1).tolist())
    elif mode in ("L", "LA"):
        image = Image.fromarray(pixels[..., 0] if mode == "L" else pixels[..., :2], mode)
    elif mode in ("RGB", "RGBA"):
        if generator.random() < 0.5:
            pixels[..., 1:3] = pixels[..., :1]
        else:
            numbers = None
        image = Image.fromarray(pixels[..., : len(mode)])
    elif mode == "I;16":
        deep = pixels[..., 0].astype(np.uint16) * int(generator.choice((1, 257)))
        numbers, image = deep, Image.fromarray(deep)
        picture = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, 2)
    else:
        kind = np.int32 if mode == "I" else np.float32
        numbers = pixels[..., 0].astype(kind) - (5 if generator.random() < 0.3 else 0)
        image = Image.fromarray(numbers)
    if form == "TIFF":
        options["compression"] = str(generator.choice(_COMPRESSIONS))
    if form == "WEBP":
        options["lossless"] = True
    if form in ("PNG", "TIFF") and generator.random() < 0.5:
        exif = Image.Exif()
        exif[274] = turn = int(generator.integers(1, 9))
        options["exif"] = exif
        if form == "TIFF" and numbers is not None:
            numbers = TURNS[turn](numbers)
            picture = None if picture is None else TURNS[turn](picture)
    if form == "PNG" and mode in ("RGB", "L", "RGBA") and generator.random() < 0.3:
        other = Image.new(mode, image.size)
        options |= {"save_all": True, "append_images": [other]}
        options["default_image"] = bool(generator.random() < 0.5)
    memory = io.BytesIO()
    image.save(memory, form, **options)
    if form == "WEBP" and mode == "RGBA":
        numbers = None  # Colours below alpha 0 are not kept.
    return _Drawn(f"{form} {mode} {options}", memory.getvalue(), numbers, picture)


def _pnm(generator: np.random.Generator) -> _Drawn:
    """A PGM or PPM of any white, as bytes or as text, with comments."""
    height, width = (int(side) for side in generator.integers(1, 20, 2))
    kind, most = int(generator.choice((2, 3, 5, 6))), int(generator.choice((1, 15, 100, 255, 1023)))
    shape = (height, width, 3) if kind in (3, 6) else (height, width)
    numbers = generator.integers(0, most + 1, shape)
    note = "# a comment\n" if generator.random() < 0.5 else ""
    head = f"P{kind}\n{note}{width} {height}\n{most}\n".encode()
    body = numbers.astype(">u2" if most > 255 else np.uint8).tobytes()
    if kind < 4:
        body = " ".join(map(str, numbers.reshape(-1).tolist())).encode() + b"\n"
    scaled = np.round(numbers * (255 / most)).astype(np.uint8)
    picture = scaled if scaled.ndim == 3 else np.repeat(scaled[..., None], 3, 2)
    return _Drawn(f"P{kind} of {most}", head + body, numbers if len(shape) == 2 else None, picture)


def _tiff(generator: np.random.Generator) -> _Drawn:
    """A TIFF of 1, 2, 4 or 8 bits: grey in both directions or of a palette, or with alpha."""
    height, width = (int(side) for side in generator.integers(1, 30, 2))
    order, turn = str(generator.choice(("<", ">"))), int(generator.integers(1, 9))
    bits, kind = int(generator.choice((1, 2, 4, 8))), int(generator.choice((0, 1, 3)))
    packed = bool(generator.random() < 0.5)
    tags: dict[int, tuple[int, ...]] = {}
    numbers = generator.integers(0, 1 << bits, (height, width)).astype(np.uint8)
    most = (1 << bits) - 1
    if kind == 3:
        colours = generator.integers(0, 65536, (3, 1 << bits))
        tags[320] = tuple(colours.reshape(-1).tolist())
        picture = (colours.T[numbers] >> 8).astype(np.uint8)
        meant = numbers
    else:
        meant = numbers if kind else most - numbers
        picture = np.repeat((meant.astype(int) * 255 // most).astype(np.uint8)[..., None], 3, 2)
    spread = np.unpackbits(numbers[..., None], axis=2)[..., 8 - bits :].reshape(height, -1)
    body = np.packbits(spread, axis=1).tobytes()
    file = _tiff_file(
        order,
        zlib.compress(body) if packed else body,
        {
            256: (width,),
            257: (height,),
            258: (bits,),
            259: (8 if packed else 1,),
            262: (kind,),
            274: (turn,),
            277: (1,),
            278: (height,),
            **tags,
        },
    )
    about = f"TIFF of {bits} bits, kind {kind}, orientation {turn}, {order}, {packed}"
    return _Drawn(about, file, TURNS[turn](meant), TURNS[turn](picture))


def _alpha(generator: np.random.Generator) -> _Drawn:
    """An RGBA TIFF of either alpha, of grey or of colours."""
    height, width = (int(side) for side in generator.integers(1, 30, 2))
    pixels = generator.integers(0, 256, (height, width, 4)).astype(np.uint8)
    alpha, is_grey = int(generator.integers(0, 3)), bool(generator.random() < 0.5)
    if is_grey:
        pixels[..., 1:3] = pixels[..., :1]
    tags = {258: (8, 8, 8, 8), 259: (1,), 262: (2,), 277: (4,), 278: (height,), 338: (alpha,)}
    file = _tiff_file("<", pixels.tobytes(), {256: (width,), 257: (height,), **tags})
    return _Drawn(f"RGBA TIFF, alpha {alpha}", file, pixels[..., 0] if is_grey else None)


def _tiff_file(order: str, body: bytes, tags: Mapping[int, tuple[int, ...]]) -> bytes:
    """A TIFF of one strip and of tags that are short numbers."""
    tags = {**tags, 273: (8,), 279: (len(body),)}
    body += bytes(len(body) % 2)
    rows, more, at = b"", b"", 8 + len(body)
    behind = at + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        kind = 4 if tag in (273, 279) else 3
        data = struct.pack(f"{order}{len(values)}{'I' if kind == 4 else 'H'}", *values)
        if len(data) > 4:
            data, more = struct.pack(order + "I", behind + len(more)), more + data
        rows += struct.pack(order + "HHI", tag, kind, len(values)) + data.ljust(4, b"\0")
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", at)
    return start + body + struct.pack(order + "H", len(tags)) + rows + bytes(4) + more


def _bmp(generator: np.random.Generator) -> _Drawn:
    """A BMP of 1, 4 or 8 bits with a palette, from the top or from the bottom."""
    height, width = (int(side) for side in generator.integers(1, 30, 2))
    bits, upright = int(generator.choice((1, 4, 8))), bool(generator.random() < 0.5)
    numbers = generator.integers(0, 1 << bits, (height, width)).astype(np.uint8)
    palette = generator.integers(0, 256, (1 << bits, 4)).astype(np.uint8)
    spread = np.unpackbits(numbers[..., None], axis=2)[..., 8 - bits :].reshape(height, -1)
    rows = np.packbits(spread, axis=1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))
    offset = 54 + palette.nbytes
    side = height if not upright else -height
    head = struct.pack("<2sIHHI", b"BM", offset + rows.nbytes, 0, 0, offset)
    head += struct.pack("<IiiHHIIiiII", 40, width, side, 1, bits, 0, rows.nbytes, 0, 0, 0, 0)
    body = (rows if upright else rows[::-1]).tobytes()
    picture = np.ascontiguousarray(palette[numbers][..., 2::-1])
    return _Drawn(f"BMP of {bits} bits", head + palette.tobytes() + body, numbers, picture)


def _check(seed: int) -> None:
    generator = np.random.default_rng(seed)
    makers = (*(lambda g, form=form: _pillows(g, form) for form in _PILLOW), _pnm, _tiff, _alpha)
    drawn = (*makers, _bmp)[seed % (len(makers) + 1)](generator)
    where = f"seed {seed}: {drawn.about}"
    picture = drawn.picture
    if picture is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of Pillow's own writer of EXIF.
            picture = np.asarray(Image.open(io.BytesIO(drawn.data)).convert("RGB"))
    made = decode_whole(drawn.data, where)
    assert made.shape == picture.shape, where
    assert np.abs(made.astype(int) - picture).max() <= 1, where
    assert image_size(drawn.data, where) == picture.shape[:2], where
    numbers = drawn.numbers
    if numbers is None or (numbers < 0).any() or (numbers > 255).any():
        reason = "in colour" if numbers is None else "masks are of 0 to 255"
        if numbers is not None or (picture.max(axis=2) > picture.min(axis=2)).any():
            with pytest.raises(DecodeError, match=reason):
                decode_mask(drawn.data, where)
        return
    assert np.array_equal(decode_mask(drawn.data, where), numbers), where


@pytest.mark.parametrize("seed", range(27))
def test_a_drawn_file_has_the_pixels_and_numbers_that_are_in_it(seed: int) -> None:
    _check(seed)


@pytest.mark.nightly
def test_and_so_have_many() -> None:
    for seed in range(27, 27 + 900):
        _check(seed)


@pytest.mark.parametrize("default", [True, False])
def test_an_animated_png_shows_its_default_image(default: bool) -> None:
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime", "blue")]
    memory = io.BytesIO()
    frames[0].save(memory, "PNG", save_all=True, append_images=frames[1:], default_image=default)
    assert decode_whole(memory.getvalue(), "x")[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(("channels", "kind"), [(5, "it has 5 channels")])
def test_a_tiff_of_more_channels_is_refused_for_what_it_is(channels: int, kind: str) -> None:
    tags = {256: (2,), 257: (2,), 258: (8,) * channels, 259: (1,), 262: (2,), 277: (channels,)}
    file = _tiff_file("<", bytes(4 * channels), {**tags, 278: (2,), 338: (0,) * (channels - 3)})
    with pytest.raises(DecodeError, match=kind):
        decode_whole(file, "x")


@pytest.mark.filterwarnings("ignore:T")  # Pillow warns of each tag that it skips.
@pytest.mark.parametrize("codec", _COMPRESSIONS)
def test_a_tiff_without_its_whole_palette_is_refused_as_by_pillow(codec: str) -> None:
    memory, drawn = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(drawn).convert("P").save(memory, "TIFF", compression=codec)
    file = memory.getvalue()
    entry = file.index(struct.pack("<HHI", 320, 3, 768))
    lost = bytearray(file)
    struct.pack_into("<I", lost, entry + 8, len(file) - 1530)
    longer = bytearray(file)
    struct.pack_into("<I", longer, entry + 4, 1 << 20)
    for damaged in (lost, longer):
        with pytest.raises(OSError, match="cannot identify"):
            Image.open(io.BytesIO(bytes(damaged)))
        with pytest.raises(DecodeError, match="its palette is missing"):
            decode_whole(bytes(damaged), "x")


def test_a_float_tiff_is_limited_as_by_pillow() -> None:
    values = np.array([[-3.5, 0.4, 12.6, 254.9], [255.1, 1e9, np.nan, 7]], np.float32)
    memory = io.BytesIO()
    Image.fromarray(values).save(memory, "TIFF")
    made = decode_whole(memory.getvalue(), "x")[..., 0]
    assert made.tolist() == [[0, 0, 12, 254], [255, 255, 0, 7]]
