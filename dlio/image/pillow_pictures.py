"""Pictures that OpenCV refuses, or takes in another way than the loaders of torchvision, by Pillow.

Of them are PNGs and GIFs without their end, GIFs whose first frame is not the whole screen, and
TIFFs whose headers are not as the format says. What Pillow refuses as well is damaged.
"""

import io
import struct
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.image.file_headers import BITS, PNG, SAMPLES, TIFF, TiffHeader, pnm_most
from dlio.util.forks import new_lock
from dlio.util.printable import tell_once

if TYPE_CHECKING:
    from PIL.Image import Image

    from dlio.image.picture import Pixels

_FORMATS: Final = ("PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG", "PPM")
MOST_CHANNELS: Final = 4
"""Of those beyond, Pillow would drop some of a TIFF's."""
_quiet = new_lock()


def by_pillow(image: Buffer, most: int) -> "Image | None":
    """Return a picture of at most `most` pixels, loaded; None if Pillow refuses it."""
    from PIL import Image  # Here: few pictures need it.

    try:
        # Filters of warnings are the process's. An odd header is warned of here, not in pixels.
        with _quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(image), formats=_FORMATS)
            channels = getattr(picture, "tag_v2", {}).get(SAMPLES, 1)
            if picture.width * picture.height > most or channels > MOST_CHANNELS:
                return None
            if picture.format == "TIFF":  # Its header is read once more.
                picture.load()
        picture.load()
    except Exception:  # It has errors of many types.
        return None
    picture.info.pop("transparency", None)  # Which a conversion to RGB drops with a warning.
    return picture


def limited_grey(image: Buffer, name: object, most: int) -> "Pixels | None":
    """Return a picture of at most `most` pixels with 16 bits of grey as torchvision's loader has
    it: numbers above 255 are white. None for other ones."""
    if not _is_grey_of_16_bits(image) or (picture := by_pillow(image, most)) is None:
        return None
    if np.asarray(picture).max(initial=0) > 255:
        tell_once(
            f"{name} has 16 bits of grey: numbers above 255 become white, as in torchvision; "
            "transforms of dlio.transforms get such pictures scaled to 8 bits",
            "white",
        )
    return np.array(picture.convert("RGB"))


def _is_grey_of_16_bits(image: Buffer) -> bool:
    head = bytes(image[:26])
    if head.startswith(PNG):
        return head[24:] == b"\x10\0"
    if head.startswith(TIFF):
        with suppress(struct.error, IndexError):
            header = TiffHeader.parse(image)
            return (header.value(image, BITS, 1), header.value(image, SAMPLES, 1)) == (16, 1)
    return head.startswith((b"P2", b"P5")) and pnm_most(image) > 255


def as_rgb(picture: "Image") -> "Pixels":
    """Return 8 bits of each colour, shape (height, width, 3); 16 bits are scaled."""
    if picture.mode.startswith("I;16"):
        grey = (np.asarray(picture) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    return np.array(picture.convert("RGB"))


def as_numbers(picture: "Image") -> npt.NDArray[np.generic]:
    """Return the stored numbers, shape (height, width), of a palette in place of its colours; or
    RGB, shape (height, width, 3). Grey of 2 and 4 bits is stretched to 255."""
    if picture.mode == "1":
        return np.array(picture).astype(np.uint8)
    if picture.mode in ("LA", "PA"):
        return np.array(picture)[..., 0]
    if picture.mode in ("L", "P", "I", "F") or picture.mode.startswith("I;16"):
        return np.array(picture)
    return np.array(picture.convert("RGB"))
