"""Folders of drawn pictures. Tests that want the same pictures share the work of drawing them."""

import os
import shutil
from pathlib import Path

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
