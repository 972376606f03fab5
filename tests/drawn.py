"""Folders of pictures that take little time to make, and to decode."""

import os
import shutil
from pathlib import Path

import numpy as np
import simplejpeg

from dlio.cli import demo_pictures
from dlio.cli.demo_pictures import draw_dataset


def draw_once(folder: Path, *, images: int, validation: int, classes: int) -> None:
    """Do as `draw_dataset`, with copies of the pictures that any process of this run drew."""
    stand_in = os.environ.get("DLIO_TEST_PYTHON")
    if stand_in is None:
        draw_dataset(str(folder), images=images, validation=validation, classes=classes)
        return
    # The folder of the run's stand-in for Python is there until its end.
    kept = Path(stand_in).with_name("drawn")
    kept.mkdir(exist_ok=True)
    draw = demo_pictures._write

    def copy(path: str, name: str, number: int) -> None:
        drawn = kept / f"{name}-{number}.jpg"
        if not drawn.exists():
            draw(path, name, number)
            begun = kept / f"{name}-{number}.{os.getpid()}"
            shutil.copyfile(path, begun)
            begun.rename(drawn)
        else:
            shutil.copyfile(drawn, path)

    demo_pictures._write = copy
    try:
        draw_dataset(str(folder), images=images, validation=validation, classes=classes)
    finally:
        demo_pictures._write = draw


def small_pictures(folder: Path, *, images: int, classes: int = 3, seed: int = 1) -> None:
    """Write class folders of pictures of few pixels, in files that are as large as those of many.

    A block holds one of them, as of those that `draw_dataset` draws.
    """
    random = np.random.default_rng(seed)
    for number in range(images):
        pixels = random.integers(0, 200, (48, 40, 3), np.uint8)
        pixels[..., number % classes % 3] += np.uint8(50)  # Classes have colours.
        encoded = simplejpeg.encode_jpeg(pixels, 85)
        comment = random.bytes(int(random.integers(30_000, 60_000)))
        marker = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big")
        place = folder / f"class{number % classes}" / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded[:2] + marker + comment + encoded[2:])
