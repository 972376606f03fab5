"""A large folder is understood once, and again when anything that was looked at has changed."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlio.data import kept_interpretation, reader
from dlio.data.index import peek_index
from dlio.data.reader import open_reading
from dlio.errors import UsageError
from dlio.util import printable


@pytest.fixture(autouse=True)
def _keeps_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_interpretation, "_FROM", 1)
    monkeypatch.setattr(kept_interpretation, "_SETTLED_NS", -(1 << 62))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Opens a data set; true if it was understood anew."""
    own = reader._understood
    times: list[None] = []

    def counting(*args: Any) -> Any:
        times.append(None)
        return own(*args)

    monkeypatch.setattr(reader, "_understood", counting)

    def opened(path: Path, **options: Any) -> bool:
        times.clear()
        open_reading(path, **options)[0].close()
        return bool(times)

    return opened


def _classes(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        for k in range(3):
            (folder / name / f"{name}{k}.jpg").write_bytes(b"picture")
    return folder


def test_a_folder_is_understood_once(tmp_path: Path, looked: Callable[..., bool]) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    assert looked(data)
    assert not looked(data)
    assert looked(data, layout="classes")
    assert looked(tmp_path / ".." / tmp_path.name / "data")


@pytest.mark.parametrize("folder", ["", "a"])
def test_new_names_are_noticed(tmp_path: Path, looked: Callable[..., bool], folder: str) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    looked(data)
    (data / folder / "notes.txt").write_text("")
    assert looked(data)
    assert not looked(data)


def test_a_folder_that_holds_another_format_by_now_is_not_read_as_before(
    tmp_path: Path, looked: Callable[..., bool]
) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    looked(data)
    _classes(data / "train", "a", "b")
    _classes(data / "val", "a", "b")
    for name in "ab":
        (data / name).rename(tmp_path / name)
    with pytest.raises(UsageError, match="splits train, val"):
        looked(data)


def test_what_is_in_a_file_that_was_read_counts(
    tmp_path: Path, looked: Callable[..., bool]
) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    table = "file,label\n" + "".join(f"{n}/{n}{k}.jpg,x\n" for n in "ab" for k in range(3))
    (data / "labels.csv").write_text(table)
    looked(data)
    assert not looked(data)
    (data / "labels.csv").write_text(table.replace("x", "y"))
    assert looked(data)


def test_a_link_is_looked_at_each_time(tmp_path: Path, looked: Callable[..., bool]) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    (data / "c").symlink_to("a")
    assert looked(data)
    assert looked(data)


def test_what_has_just_changed_is_looked_at_again(
    tmp_path: Path, looked: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_interpretation, "_SETTLED_NS", 3600 * 10**9)
    data = _classes(tmp_path / "data", "a", "b")
    assert looked(data)
    assert looked(data)


def test_splits_are_remembered_each_by_itself_and_words_are_said_again(
    tmp_path: Path,
    looked: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = tmp_path / "data"
    _classes(data / "train", "a", "b")
    (data / "val").mkdir()
    for k in range(3):
        (data / "val" / f"{k}.jpg").write_bytes(b"picture")
    said = []
    for _ in range(2):
        monkeypatch.setattr(printable, "_told", set())
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dlio"):
            anew = looked(data, split="val")
        said.append((anew, [each.getMessage() for each in caplog.records]))
    assert [anew for anew, _ in said] == [True, False]
    assert said[0][1] == said[1][1]
    assert "has no class folders" in "".join(said[0][1])
    assert looked(data, split="train")
    reading = open_reading(data, split="train")[1]
    assert (reading.split, len(reading.others)) == ("train", 1)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"states": {}, "heard": [], "reading": {"format": 1}}']
)
def test_what_is_kept_is_not_believed(
    tmp_path: Path, looked: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(kept_interpretation, "_text", lambda _: text.encode())
        looked(data)
    assert looked(data)
    assert not looked(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("path", each) for each in (3, None, [1], "/etc", "{root}/../b", ["{root}", "/etc"])),
        *(("left_out", each) for each in (7, [7], None)),
        *(("others", each) for each in ("x", {"val": 3}, {"val": [3]})),
        *(("words", 5), ("split", [1]), ("doubts", {}), ("options", []), ("weight", "x")),
    ],
)
# SECURITY.md: S4
def test_a_kept_answer_of_other_types_or_paths_is_not_believed(
    tmp_path: Path,
    looked: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
) -> None:
    data = _classes(tmp_path / "data", "a", "b")
    looked(data)
    assert not looked(data)

    def other(*args: Any) -> Any:
        kept = peek_index(*args)
        assert kept is not None
        head = json.loads(kept["head"].tobytes())
        text = json.dumps(value).replace("{root}", str(data))
        head["reading"][name] = json.loads(text)
        return {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}

    monkeypatch.setattr(kept_interpretation, "peek_index", other)
    assert looked(data)
