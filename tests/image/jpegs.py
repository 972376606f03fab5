"""JPEGs of every kind that a decoder meets, drawn at random, and libjpeg-turbo's pixels of them."""

import io
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from dlio.image.crop import Box
from dlio.image.jpeg import with_kept_starts

KINDS: Final = ("baseline", "restarts", "rows", "lengths", "progressive", "cmyk", "1x2")


def drawn(generator: np.random.Generator, kind: str, most: int = 90) -> bytes:
    """A JPEG of this kind with random size, contents, quality, sampling and tables."""
    height, width = (int(side) for side in generator.integers(1, most + 1, 2))
    mode = "CMYK" if kind == "cmyk" else "L" if generator.random() < 0.15 else "RGB"
    image = Image.fromarray(_pixels(generator, height, width)).convert(mode)
    sampling = str(generator.choice(["4:4:4", "4:2:2", "4:2:0"]))
    options: dict[str, Any] = {
        "quality": int(generator.integers(1, 101)),
        "optimize": bool(generator.random() < 0.5),
    }
    if mode == "RGB":
        options["subsampling"] = sampling
    if kind == "progressive":
        options["progressive"] = True
    if kind == "restarts":
        options["restart_marker_blocks"] = int(generator.integers(1, 9))
    if kind in ("rows", "lengths"):
        options["restart_marker_rows"] = 1
        across = -(-width // (16 if mode == "RGB" and sampling != "4:4:4" else 8))
        if generator.random() < 0.5:
            divisors = [k for k in range(1, across + 1) if across % k == 0]
            options = {**options, "restart_marker_blocks": int(generator.choice(divisors))}
            del options["restart_marker_rows"]
    memory = io.BytesIO()
    image.save(memory, "JPEG", **options)
    made = memory.getvalue()
    if kind == "1x2":
        pixels = np.ascontiguousarray(np.asarray(image.convert("RGB")))
        made = simplejpeg.encode_jpeg(pixels, options["quality"], "RGB", colorsubsampling="440")
    return with_kept_starts(made) if kind == "lengths" else made


def _pixels(generator: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Noise, extremes, a smooth image or a plain one: coefficients of all sizes."""
    texture = generator.integers(0, 4)
    noise = generator.integers(0, 256, (height, width, 3), np.uint8)
    if texture == 0:
        return noise
    if texture == 1:
        extreme: npt.NDArray[np.uint8] = np.where(noise < 128, 0, 255).astype(np.uint8)
        return extreme
    coarse = Image.fromarray(noise[: height // 8 + 1, : width // 8 + 1])
    if texture == 2:
        return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    return np.broadcast_to(noise[:1, :1], noise.shape)


def whole(image: bytes) -> npt.NDArray[np.uint8]:
    """All pixels, by libjpeg-turbo in the mode that dlio uses. Raises ValueError for damage."""
    pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
        image, "RGB", fastdct=True, fastupsample=True
    )
    return pixels


def box_within(generator: np.random.Generator, height: int, width: int) -> Box:
    """A random part; one in four is whole in height or width."""
    high, wide = int(generator.integers(1, height + 1)), int(generator.integers(1, width + 1))
    if generator.random() < 0.25:
        high = height
    if generator.random() < 0.25:
        wide = width
    top, left = generator.integers(0, height - high + 1), generator.integers(0, width - wide + 1)
    return Box(int(top), int(left), high, wide, flip=False)
