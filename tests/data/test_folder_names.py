"""Entries of large folders are packed, and are what a list of them would be."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlio.data import folder_names, index_memory
from dlio.data.folder_names import (
    FolderNames,
    files_among,
    folders_among,
    present,
    sorted_rows,
)
from dlio.data.index_memory import GrowingNames, Names, repeated
from dlio.data.reader import open_reader

SUFFIXES = (".jpg", ".jpeg", ".png")
# As names of files may be: of any bytes but / and NUL, which Python reads with surrogates.
NAMES = st.one_of(
    st.text(st.sampled_from("abK.jpg\u212a\u00df\U0001f600"), min_size=1, max_size=8),
    st.binary(min_size=1, max_size=6)
    .filter(lambda name: not {0, 47}.intersection(name))
    .map(os.fsdecode),
).flatmap(lambda name: st.sampled_from([name, f"{name}.JPG", f"{name}.png", f"{name}.jpeg"]))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_names, "_MANY", 8)
    monkeypatch.setattr(index_memory, "_PIECE", 16)
    monkeypatch.setattr(index_memory, "_SMALL", 64)
    monkeypatch.setattr(index_memory, "_DECODED", 4)


@settings(deadline=None)
@given(st.dictionaries(NAMES, st.booleans(), max_size=60))
def test_packed_entries_are_those_of_a_sorted_list(entries: dict[str, bool]) -> None:
    expected = sorted(entries.items())
    rows = sorted_rows(iter(entries.items()))
    assert isinstance(rows, FolderNames) == (len(entries) >= 8)
    assert list(rows) == expected
    assert len(rows) == len(expected)
    assert rows[1:5] == expected[1:5]
    assert all(row in rows and rows[k] == row for k, row in enumerate(expected))
    assert not any((name, not inner) in rows or (f"{name}x", inner) in rows for name, inner in
                   expected if (f"{name}x", inner) not in expected)  # fmt: skip
    assert folders_among(rows) == [name for name, inner in expected if inner]
    files = [name for name, inner in expected if not inner]
    assert list(files_among(rows)) == files
    pictures = files_among(rows, SUFFIXES)
    assert list(pictures) == [name for name in files if name.lower().endswith(SUFFIXES)]
    assert pictures[:3] == list(pictures)[:3]
    mask = np.arange(len(files)) % 3 == 0
    assert list(present(files_among(rows), mask)) == files[::3]


@settings(deadline=None)
@given(st.lists(NAMES, max_size=40))
def test_the_first_name_that_comes_again_is_known(names: list[str]) -> None:
    made = GrowingNames()
    for name in names:
        made.add(name)
    again = [name for k, name in enumerate(names) if name in names[:k]]
    assert repeated(made.names()) == (len(again), again[0] if again else "")
    assert list(made.names()) == list(Names.of(names)) == names


def test_a_large_folder_is_listed_like_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    names = [f"{k}{end}" for k in range(40) for end in (".jpg", ".PNG")]
    for k, name in enumerate([*names, "b\udcff.jpg", "\ufb01.jpg"]):
        (folder / name).write_bytes(bytes(k + 1))
    (folder / "notes.md").write_text("x")
    reader = open_reader(str(folder))
    monkeypatch.setattr(folder_names, "_MANY", 1 << 14)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "other"))
    other = open_reader(str(folder))
    assert len(reader) == 82
    every = [reader.name(k) for k in range(82)]
    assert every == [other.name(k) for k in range(82)] == sorted(every)
    assert reader.fingerprint == other.fingerprint
    assert [bytes(p) for p in reader.read(np.arange(82))] == [
        bytes(p) for p in other.read(np.arange(82))
    ]
