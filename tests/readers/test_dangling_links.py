"""Data sets of links whose targets were purged, or are not fetched yet."""

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import dlio
from dlio.data.links import following_links
from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio.util.units import counted
from dlio_staging.verify import verify
from tests.readers.test_labels import UNRELATED


def _made(tmp_path: Path, *, folders: bool) -> Path:
    """Links to 20 pictures in two classes of a scratch folder, or to its folders."""
    root = tmp_path / "data"
    root.mkdir()
    for label in "ab":
        scratch = tmp_path / "scratch" / label
        scratch.mkdir(parents=True)
        for number in range(10):
            picture = np.full((4, 4, 3), number, np.uint8)
            cv2.imwrite(str(scratch / f"{number}.png"), picture)
        if folders:
            (root / label).symlink_to(scratch)
        else:
            (root / label).mkdir()
            for number in range(10):
                (root / label / f"{number}.png").symlink_to(scratch / f"{number}.png")
    return root


def _purge_pictures(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "scratch" / "a" / f"{number}.png").unlink()


def _purge_a_class(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "a").rename(tmp_path / "gone")


def _purge_all(tmp_path: Path) -> None:
    (tmp_path / "scratch").rename(tmp_path / "gone")


@pytest.mark.parametrize(
    ("folders", "purge", "count"),
    [
        (False, _purge_pictures, "5 of 20"),
        (False, _purge_a_class, "10 of 20"),
        (False, _purge_all, "20 of 20"),
        (True, _purge_a_class, "1 of 11"),
        (True, _purge_all, "2 of 2"),
    ],
)
def test_purged_targets_are_counted_in_an_error(
    folders: bool, purge: Callable[[Path], None], count: str, tmp_path: Path
) -> None:
    root = _made(tmp_path, folders=folders)
    with following_links(True):
        assert len(open_reader(str(root))) == 20
        purge(tmp_path)
        # Twice: the first listing is not kept.
        for _ in range(2):
            with pytest.raises(SourceError, match=f"links to missing files: {count} file"):
                open_reader(str(root))
    with pytest.raises(SourceError, match="links to missing files"):
        dlio.open(root, follow_links=True)
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "verify", str(root), "--follow-links"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert count in done.stderr
    assert "sound" not in done.stdout


def test_folders_without_classes_and_label_tables_count_them_too(tmp_path: Path) -> None:
    root = _made(tmp_path, folders=False)
    with following_links(True):
        _purge_pictures(tmp_path)
        with pytest.raises(SourceError, match="5 of 10"):
            open_reader(str(root / "a"))
        rows = [f"{number}.png,{number % 2}" for number in range(10)]
        (root / "a" / "labels.csv").write_text("\n".join(["file,label", *rows]))
        with pytest.raises(SourceError, match="5 of 10"):
            open_reader(str(root / "a"))


def test_links_that_are_no_samples_may_lead_to_nothing(tmp_path: Path) -> None:
    root = _made(tmp_path, folders=False)
    (root / "notes.txt").symlink_to("gone.txt")
    (root / "a" / "LICENSE.md").symlink_to("gone")
    with following_links(True):
        assert len(open_reader(str(root))) == 20


_FILES = st.lists(
    st.sampled_from(
        ["sound", "link", "hard link", "upper", "gif", "empty", "hidden", "heic", "dangling"]
    ),
    min_size=1,
    max_size=9,
)


@UNRELATED
@given(files=_FILES)
def test_no_file_of_a_class_vanishes_in_silence(
    files: list[str], tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path_factory.mktemp("drawn")
    for name in "ab":
        (root / name).mkdir()
        cv2.imwrite(str(root / name / "0.png"), np.zeros((4, 4, 3), np.uint8))
    for number, kind in enumerate(files, 1):
        place = root / "b" / f"{number}.png"
        if kind == "link":
            place.symlink_to("0.png")
        elif kind == "hard link":
            place.hardlink_to(root / "b" / "0.png")
        elif kind == "dangling":
            place.symlink_to("gone.png")
        elif kind == "gif":
            Image.new("P", (4, 4)).save(place.with_suffix(".jpg"), "GIF")
        else:
            names = {"upper": f"{number}.PNG", "hidden": f".{number}.png", "heic": f"{number}.heic"}
            data = b"" if kind == "empty" else (root / "a" / "0.png").read_bytes()
            place.with_name(names.get(kind, place.name)).write_bytes(data)
    count = Counter(files)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dlio"):
        if count["dangling"]:
            with pytest.raises(SourceError, match=rf"missing files: {count['dangling']} of"):
                open_reader(str(root))
            return
        reader = open_reader(str(root))
    read = len(files) - count["hidden"] - count["heic"]
    assert reader.labels.tolist() == [0] + [1] * (1 + read)
    assert (f"leaves out {counted(count['heic'], 'picture')}" in caplog.text) == bool(count["heic"])
    checked = verify(str(root))
    assert len(checked.damaged) == count["empty"]
    assert len(checked.notices) == bool(count["heic"])
