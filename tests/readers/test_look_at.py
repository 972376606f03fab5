"""Files that are looked at by one native call are as those that Python looks at one by one."""

import os
from pathlib import Path

import pytest

from dlio.data.links import following_links
from dlio.data.source import Source
from dlio.errors import SourceError
from dlio.image.native import listed_files
from dlio_readers.fileset import look_at

LONG = "l" * 250


def _folder(root: Path) -> list[str]:
    """Make a folder with regular files and others; return names in it, also of none."""
    inner = root / "data" / "inner"
    inner.mkdir(parents=True)
    (root / "outside.jpg").write_bytes(b"not ours")
    names = ["a.jpg", "blank .jpg", LONG, os.fsdecode(b"latin-\xe9.jpg"), "empty.jpg"]
    for size, name in enumerate(reversed(names)):
        (inner / name).write_bytes(b"x" * size)
    (inner / "link.jpg").symlink_to("a.jpg")
    (inner / "up.jpg").symlink_to("../inner/blank .jpg")
    (inner / "lost.jpg").symlink_to("nowhere")
    return [*names, "link.jpg", "up.jpg", "lost.jpg", "missing.jpg"]


def _looked_at(root: Path, names: list[str]) -> tuple[list[list[int]], list[str]]:
    source = Source(str(root / "data"))
    try:
        return look_at(source, "inner", names).tolist(), source.dangling
    finally:
        source.close()


@pytest.mark.parametrize("follows", [False, True])
def test_files_are_as_one_by_one(
    follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _folder(tmp_path)
    with following_links(follows):
        together = _looked_at(tmp_path, names)
        monkeypatch.setattr(listed_files, "_library", lambda: None)
        assert together == _looked_at(tmp_path, names)
    assert [row[0] for row in together[0]] == [4, 3, 2, 1, 0, 4, 3, -1, -1]
    assert together[1] == [str(tmp_path / "data/inner/lost.jpg")]
    assert all(row[1] > 0 for row in together[0][:7])


@pytest.mark.parametrize("name", ["out.jpg", "pipe.jpg", "folder.jpg", "sub/../../../outside.jpg"])
def test_what_is_no_file_of_the_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _folder(tmp_path)
    inner = tmp_path / "data" / "inner"
    (inner / "out.jpg").symlink_to("../../outside.jpg")
    os.mkfifo(inner / "pipe.jpg")
    (inner / "folder.jpg").mkdir()
    (inner / "sub").mkdir()
    messages = []
    for library in (listed_files._library(), None):
        monkeypatch.setattr(listed_files, "_library", lambda library=library: library)
        with pytest.raises(SourceError) as error:
            _looked_at(tmp_path, [*names, name])
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_regular_files_take_one_call_and_links_are_judged_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _folder(tmp_path)
    asked: list[str] = []
    entry = Source.entry

    def counted(source: Source, folder: str, name: str) -> object:
        asked.append(name)
        return entry(source, folder, name)

    monkeypatch.setattr(Source, "entry", counted)
    _looked_at(tmp_path, names)
    assert asked == ["link.jpg", "up.jpg", "lost.jpg", "missing.jpg"]
