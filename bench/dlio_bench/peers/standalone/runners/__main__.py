"""`python -m runners NAME`: serve one contender."""

import importlib
import sys
from typing import Final

from .protocol import serve

WHERE: Final = {
    "dali": "dali",
    "ffcv": "ffcv",
    "ffcv_256": "ffcv",
    "ffcv_raw": "ffcv",
    "grain": "grain",
    "litdata": "torchlike",
    "mosaic": "torchlike",
    "spdl": "spdl",
    "tbl_raw": "turbo",
    "tbl_raw_uint8": "turbo",
    "tfdata": "tfdata",
    "turboloader": "turbo",
    "turboloader_uint8": "turbo",
    "webdataset": "torchlike",
}
"""Module of each contender, which has a function of its name."""


if __name__ == "__main__":
    name = sys.argv[1]
    module = importlib.import_module(f"{__package__}.{WHERE[name]}")
    serve(getattr(module, name), sys.argv[2:])
