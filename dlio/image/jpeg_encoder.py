"""Encoding pixels as JPEGs whose rows are restart intervals, see `jpeg`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dlio.image.decoder import opencv
from dlio.image.jpeg import good_interval, with_kept_starts


def encode_with_restarts(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Return a 4:2:0 JPEG whose rows are restart intervals, with a segment of their offsets.

    Args:
        pixels: RGB, shape (height, width, 3).
    """
    cv2: Any = opencv()
    options = [
        *(cv2.IMWRITE_JPEG_QUALITY, quality),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, good_interval(pixels.shape[1], 16)),
        *(cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    ]
    done, data = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)
    if not done:
        raise ValueError(f"OpenCV cannot encode {pixels.shape}")
    return with_kept_starts(data.data)


def resized(pixels: npt.NDArray[np.uint8], short_side: int) -> npt.NDArray[np.uint8]:
    """Return an image shrunk to a short side in pixels; images are never enlarged."""
    cv2: Any = opencv()
    height, width = pixels.shape[:2]
    scale = short_side / min(height, width)
    if scale >= 1:
        return pixels
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    made: npt.NDArray[np.uint8] = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return made
