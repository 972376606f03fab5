"""Files that are compressed or in memory, pictures and databases are opened anew for a thread."""

import bz2
import gzip
import io
import lzma
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dlio.util.thread_copies import own_copy


class _Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        return self.held


@pytest.mark.parametrize("open_packed", [gzip.open, bz2.open, lzma.open])
def test_a_compressed_file_has_a_place_of_its_own(
    open_packed: Callable[..., Any], tmp_path: Path
) -> None:
    with open_packed(tmp_path / "a", "wt") as file:
        file.write("".join(f"line {k}\n" for k in range(100)))
    with open_packed(tmp_path / "a", "rb") as first:
        lines = [first.readline() for _ in range(3)]
        place = first.tell()
        second = own_copy(_Holder(first)).held
        assert second is not first
        with second:
            assert second.tell() == place
            second.seek(0)
            assert [second.readline() for _ in range(3)] == lines
            assert first.tell() == place


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_picture_that_is_opened_from_a_file_has_a_frame_of_its_own(
    in_memory: bool, tmp_path: Path
) -> None:
    frames = [Image.fromarray(np.full((4, 4), k, np.uint8)) for k in range(4)]
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    with open(tmp_path / "a.tif", "rb") as file:
        source: Any = io.BytesIO(file.read()) if in_memory else file
        with Image.open(source) as picture:
            picture.seek(1)
            other = own_copy(_Holder(picture)).held
            assert other is not picture
            assert other.tell() == 1
            other.seek(3)
            assert np.asarray(other)[0, 0] == 3
            assert np.asarray(picture)[0, 0] == 1
            other.close()


def test_a_database_in_memory_and_its_cursor_are_each_threads_own() -> None:
    with closing(sqlite3.connect(":memory:")) as first:
        cursor = first.cursor()
        cursor.execute("create table numbers (n integer)")
        cursor.executemany("insert into numbers values (?)", [(k,) for k in range(5)])
        cursor.execute("select n from numbers")
        copy = own_copy(_Holder([first, cursor])).held
        with closing(copy[0]):
            assert copy[1].connection is copy[0]
            assert copy[1].execute("select sum(n) from numbers").fetchone() == (10,)
            assert cursor.fetchone() == (0,)
