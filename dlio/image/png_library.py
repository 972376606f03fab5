"""The library libpng that OpenCV brings: found, compared, and handed to the native threads."""

import ctypes
import functools
import glob
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.image.decoder import opencv
from dlio.image.native import LIBRARY

_CALLS: Final = (
    *("get_libpng_ver", "create_read_struct", "create_info_struct", "destroy_read_struct"),
    *("get_error_ptr", "set_read_fn", "get_io_ptr", "read_info", "set_palette_to_rgb"),
    *("set_gray_to_rgb", "set_strip_alpha", "read_update_info", "get_rowbytes", "read_row"),
    "read_end",
)
"""Functions of libpng, in the order of png.c."""


def libpng_path() -> str | None:
    """Return the path of OpenCV's libpng; None if that is a part of OpenCV, or of the system."""
    folder = os.path.dirname(os.path.dirname(str(opencv().__file__)))
    paths = glob.glob(os.path.join(glob.escape(folder), "opencv_*.libs", "libpng16*.so*"))
    return paths[0] if paths else None


@functools.cache
def use_png() -> bool:
    """Have native threads decode PNGs; False where Python's threads do, with OpenCV."""
    cv2, path = opencv(), libpng_path()
    if path is None:
        return False
    try:
        libpng, library = ctypes.CDLL(path), ctypes.CDLL(LIBRARY)
        addresses = (ctypes.c_int64 * len(_CALLS))(
            *(
                ctypes.cast(getattr(libpng, f"png_{name}"), ctypes.c_void_p).value or 0
                for name in _CALLS
            )
        )
        library.dlio_png_use(addresses)
    except (OSError, AttributeError):
        return False
    row = np.arange(5 * 7 * 4, dtype=np.uint8).reshape(5, 7, 4)
    for picture in (row, row[..., :3], row[..., 0]):
        encoded = cv2.imencode(".png", np.ascontiguousarray(picture))[1]
        wanted = cv2.cvtColor(cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        made = pixels_of(encoded, 5 * 7 * 3)
        if made is None or not np.array_equal(made, wanted):
            library.dlio_png_use((ctypes.c_int64 * len(_CALLS))())  # It leaves them all to OpenCV.
            return False
    return True


def pixels_of(image: Buffer, room: int) -> npt.NDArray[np.uint8] | None:
    """Decode a PNG of `room` bytes of RGB at most; None for one that is left to OpenCV."""
    data, out = np.frombuffer(image, np.uint8), np.empty(room, np.uint8)
    shape, pointer = (ctypes.c_int64 * 2)(), ctypes.c_void_p
    call = ctypes.CDLL(LIBRARY).dlio_png
    call.argtypes = (pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t)
    if not call(data.ctypes.data, len(data), shape, out.ctypes.data, room):
        return None
    height, width = shape
    return out[: height * width * 3].reshape(height, width, 3)
