#!/bin/sh
# OpenCV 5.0.0.93: the greatest value that a PGM file declares is not used.
#
# A PGM says which value is white: 255 in most, 1023 in those of a camera of 10 bits, 100 in some of
# measurements. OpenCV reads the numbers as if white were 255 or 65535; asked for 8 bits
# (IMREAD_GRAYSCALE or IMREAD_COLOR) it takes the upper byte, so that a picture of 10 bits has the
# levels 0 to 3 of 255, and looks black. Pillow 13.0.0 scales by the declared value.
#
# Output seen:
#   white of 100: OpenCV 100, Pillow 255
#   white of 1023, as 8 bits: OpenCV 3, Pillow 255
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 opencv-python-headless==5.0.0.93 pillow==13.0.0
"$folder/venv/bin/python" - <<'PYTHON'
import io

import cv2
import numpy as np
import PIL
from PIL import Image

assert (cv2.__version__, PIL.__version__) == ("5.0.0", "13.0.0"), (cv2.__version__, PIL.__version__)


def opencv(data: bytes) -> int:
    return int(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE).max())


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


eight = b"P5\n2 1\n100\n" + bytes([0, 100])
ten = b"P5\n2 1\n1023\n" + np.array([0, 1023], ">u2").tobytes()
of_eight, of_ten = int(pillow(eight).max()), int(pillow(ten).max()) // 257
print(f"white of 100: OpenCV {opencv(eight)}, Pillow {of_eight}")
print(f"white of 1023, as 8 bits: OpenCV {opencv(ten)}, Pillow {of_ten}")
assert (opencv(eight), of_eight) == (100, 255)
assert (opencv(ten), of_ten) == (3, 255)
PYTHON
