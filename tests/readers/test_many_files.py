"""The work to open a folder grows as the number of its files does, not as its square."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from dlio.data.reader import open_reader

FEW, MANY = 1_000, 8_000
PICTURE = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))

Names = Callable[[int], Iterator[str]]
"""Paths of n files below a data set's folder."""


def flat(count: int) -> Iterator[str]:
    return (f"{k:06d}.jpg" for k in range(count))


def captioned(count: int) -> Iterator[str]:
    return (f"{k // 2:06d}.{('jpg', 'txt')[k % 2]}" for k in range(count))


def named(count: int) -> Iterator[str]:
    return (f"{('cat', 'dog')[k % 2]}.{k}.jpg" for k in range(count))


def masked(count: int) -> Iterator[str]:
    return (f"{k // 2:06d}{('.jpg', '_mask.png')[k % 2]}" for k in range(count))


def classes(count: int) -> Iterator[str]:
    return (f"{k % 4}/{k:06d}.jpg" for k in range(count))


def classes_with_captions(count: int) -> Iterator[str]:
    return (f"{k // 2 % 4}/{k // 2:06d}.{('jpg', 'txt')[k % 2]}" for k in range(count))


def small_classes(count: int) -> Iterator[str]:
    return (f"{k // 2:06d}/{k % 2}.jpg" for k in range(count))


def labelled_pairs(count: int) -> Iterator[str]:
    return (f"{k // 2:06d}.{('jpg', 'cls')[k % 2]}" for k in range(count))


def masks_in_a_folder(count: int) -> Iterator[str]:
    return (f"{('images', 'masks')[k % 2]}/{k // 2:06d}.png" for k in range(count))


LAYOUTS = (
    flat,
    captioned,
    named,
    masked,
    classes,
    classes_with_captions,
    small_classes,
    labelled_pairs,
    masks_in_a_folder,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_opening_of_many_files_takes_linear_work(layout: Names, tmp_path: Path) -> None:
    contents = {".jpg": PICTURE, ".png": PICTURE, ".txt": b"a caption", ".cls": b"1"}
    for suffix, content in contents.items():
        (tmp_path / f"one{suffix}").write_bytes(content)
    took = {}
    for count in (10, FEW, MANY):  # The first loads whatever is loaded once.
        root = tmp_path / f"of-{count}"
        for name in layout(count):
            path = root / name
            try:
                os.link(tmp_path / f"one{path.suffix}", path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True)
                os.link(tmp_path / f"one{path.suffix}", path)
        began = time.process_time()
        open_reader(str(root)).close()
        took[count] = time.process_time() - began
    # Eight times as many files; work that is quadratic takes 64 times as long.
    assert took[MANY] < 24 * took[FEW]
