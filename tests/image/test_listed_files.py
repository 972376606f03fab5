"""Many files of a folder that are looked at by one call: what `os.stat` says of each."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlio.data.index_memory import Names
from dlio.image.native import pool_library
from dlio.image.native.listed_files import files_a_look, look_at_files

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())
COUNT = 700
"""More than are under way at a time."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    for k in range(COUNT):
        path = tmp_path / f"{k}.jpg"
        if k % 9 == 1:
            path.symlink_to(f"{k - 1}.jpg" if k % 2 else "nothing")
        elif k % 9 == 2:
            path.mkdir()
        elif k % 9 == 3:
            os.mkfifo(path)
        elif k % 9 != 4:
            path.write_bytes(bytes(k))
            os.utime(path, ns=(0, -1 if k % 2 else 1_234_567_890_123_456_789))
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def _said(folder: int, name: str, follows: bool) -> list[int]:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=follows)
    except (OSError, ValueError):
        return [0, 0, 0, 0]
    if not stat.S_ISREG(status.st_mode):
        return [0, 0, 0, 0]
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, 1]


@pytest.mark.parametrize("count", [1, 31, 32, 128, 129, COUNT])
@pytest.mark.parametrize("follows", [False, True])
def test_each_is_as_the_system_says(folder: int, follows: bool, count: int) -> None:
    names = [f"{k}.jpg" for k in range(COUNT)][-count:]
    names[0] = ["", "a\0b", "x" * 300, "é" * 60, "7.jpg"][count % 5]
    text = Names.of(names)
    rows = look_at_files(folder, follows, text.blob, text.ends)
    assert rows.tolist() == [_said(folder, name, follows) for name in names]


def test_a_part_of_a_long_list_is_looked_at(folder: int) -> None:
    text = Names.of([f"{k}.jpg" for k in range(COUNT)])
    whole = look_at_files(folder, True, text.blob, text.ends)
    some = look_at_files(folder, True, text.blob, text.ends[:300])
    assert np.array_equal(whole[:300], some)


def test_calls_are_of_many_files_where_the_kernel_takes_them_together() -> None:
    assert files_a_look() in (64, 1024)
