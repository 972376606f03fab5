"""No reader follows a link out of a data set's folder, whichever of its parts is one."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.errors import DlioError
from dlio.util import link_free
from tests.hostile.linked_sets import (
    FORMATS,
    REPLACEMENTS,
    Options,
    parts_of,
    picture,
    remove,
)

Outcome = tuple[list[bytes], list[int]] | str
"""(payloads, labels), or the error."""


def outcome(root: Path, options: Options) -> Outcome:
    """Open and read a data set, by a path that ends in a link itself."""
    named = root.parent / "named"
    if not named.is_symlink():
        named.symlink_to(root)
    try:
        reader = open_reader(str(named), **options)
        payloads = [bytes(each) for each in reader.read(np.arange(len(reader)))]
        labels = np.asarray(reader.labels).tolist()
        reader.close()
    except DlioError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        return text
    return payloads, labels


def copied(made: Path, folder: Path) -> Path:
    """Copy a data set, with times of long ago: its listing may be kept."""
    root = folder / "data"
    shutil.copytree(made, root, symlinks=True)
    for path in (root, *root.rglob("*")):
        os.utime(path, (1e9, 1e9))
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))


def check(
    name: str, tmp_path: Path, rng: np.random.Generator, kinds: list[str], parts: int
) -> None:
    """Replace drawn parts of a data set by links, and compare with data sets that lack them."""
    made = tmp_path / "made"
    made.mkdir()
    options = FORMATS[name](made)
    (tmp_path / "whole").mkdir()
    whole = outcome(copied(made, tmp_path / "whole"), options)
    assert not isinstance(whole, str), whole
    places = parts_of(made)
    chosen = rng.permutation(len(places))[:parts].tolist()
    for number, place in enumerate(chosen):
        for kind in kinds:
            folder = tmp_path / f"{number} {kind}"
            (folder / "less").mkdir(parents=True)
            root = copied(made, folder)
            stays = REPLACEMENTS[kind](root / places[place], root)
            seen = outcome(root, options)
            if stays:
                assert seen == whole, f"{places[place]} {kind}: {seen}"
            elif not isinstance(seen, str):
                less = copied(made, folder / "less")
                remove(less / places[place])
                assert seen == outcome(less, options), f"{places[place]} {kind} was followed"
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_that_is_a_link_out_is_refused_or_left_out(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(len(name))
    check(name, tmp_path, rng, ["inside", "outside", "fifo"], 3)


@pytest.mark.nightly
@pytest.mark.parametrize("has_call", [True, False], ids=["openat2", "by components"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_part_and_every_kind_of_link(
    name: str, has_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_call:
        monkeypatch.setattr(link_free, "_kernel_calls", lambda: None)
    check(name, tmp_path, np.random.default_rng(7), list(REPLACEMENTS), 6)


@pytest.mark.parametrize("part", ["a", "a/in", "a/0.jpg"])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_part_that_is_exchanged_while_it_is_read_gives_nothing_else(
    part: str, is_read: bool, tmp_path: Path
) -> None:
    root, outside = tmp_path / "data", tmp_path / "outside"
    FORMATS["classes"](root)
    shutil.copytree(root, outside)
    for path in outside.rglob("*.jpg"):
        marked = bytes(reversed(path.read_bytes()))
        path.write_bytes(marked)
    reader = open_reader(str(root))
    every = np.arange(len(reader))
    before = [bytes(each) for each in reader.read(every)]
    if not is_read:
        reader = open_reader(str(root))
    (root / part).rename(tmp_path / "moved")
    (root / part).symlink_to(outside / part)
    for sample in every.tolist():
        with contextlib.suppress(DlioError):
            assert bytes(reader.read(np.array([sample]))[0]) == before[sample]


@pytest.mark.parametrize("name", ["hdf5", "arrow", "parquet", "tar", "arrays", "classes"])
def test_a_name_that_looks_like_a_url_is_a_name(name: str, tmp_path: Path) -> None:
    """`way::part` next to a link `way`: fsspec would take it for the link, and judges none."""
    made = tmp_path / "made"
    made.mkdir()
    options = FORMATS[name](made)
    for number, place in enumerate(parts_of(made)):
        outcomes = []
        for mark in ("..", "::"):
            root = copied(made, tmp_path / f"{number}{mark}")
            part, other = root / place, next(p for p in reversed(parts_of(made)) if p != place)
            outside = root.parent / "outside"
            (shutil.copytree if (made / other).is_dir() else shutil.copy)(made / other, outside)
            part.rename(part.with_name(f"way{mark}{part.name}"))
            if mark == "::":
                part.with_name("way").symlink_to(outside)
            outcomes.append(outcome(root, options))
        assert isinstance(outcomes[1], str) or outcomes[1] == outcomes[0], place


@pytest.mark.parametrize("mark", ["::", "://"])
def test_names_of_lists_that_look_like_urls_are_names(mark: str, tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(picture(1))
    root = tmp_path / "data"
    FORMATS["coco"](root)
    file = root / "annotations/instances_train2017.json"
    evil = f"x{mark}file://{tmp_path}/secret.jpg"
    file.write_text(file.read_text().replace("in/b.jpg", evil))
    assert isinstance(outcome(root, {}), str)


def test_links_out_are_followed_if_the_user_wants_it(tmp_path: Path) -> None:
    root = tmp_path / "data"
    FORMATS["classes"](root)
    whole = outcome(root, {})
    assert REPLACEMENTS["outside"](root / "a", root) is False
    assert isinstance(outcome(root, {}), str)
    assert outcome(root, {"follow_links": True}) == whole


def test_names_in_annotations_do_not_lead_out_by_dots(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(picture(1))
    root = tmp_path / "data"
    FORMATS["coco"](root)
    file = root / "annotations/instances_train2017.json"
    file.write_text(file.read_text().replace("in/b.jpg", "../../secret.jpg"))
    assert "outside" in str(outcome(root, {})) or "lead" in str(outcome(root, {}))


_STRACE = shutil.which("strace")
_READ = """
import sys, numpy as np
from dlio.data import kept_interpretation
from dlio.data.reader import open_reader
kept_interpretation._FROM = 10**9  # Later openings would look at fewer names around the folder.
reader = open_reader(sys.argv[1])
for sample in range(int(sys.argv[2])):
    reader.read(np.array([sample]))
"""
_CALLS = "open,openat,openat2,read,pread64,preadv,preadv2,fstat,newfstatat,lstat,stat,statx,close"


@pytest.mark.cold
@pytest.mark.skipif(_STRACE is None, reason="no strace")
def test_a_picture_takes_as_many_system_calls_as_a_file_that_nobody_judges(tmp_path: Path) -> None:
    """open, read, fstat, close."""
    root = tmp_path / "data"
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(1000):
            (root / name / f"{number:04d}.jpg").write_bytes(picture(1))
    for path in (root, root / "a", root / "b"):
        os.utime(path, (1e9, 1e9))
    len(open_reader(str(root)))  # Keeps the index, for those that are counted.
    counts = [_calls_of(root, wanted, tmp_path) for wanted in (100, 900, 1900)]
    assert np.diff(counts).tolist() == [4 * 800, 4 * 1000 + 2]  # And the second folder, once.


def _calls_of(root: Path, wanted: int, folder: Path) -> int:
    log = folder / f"{wanted}"
    assert _STRACE is not None
    script = [sys.executable, "-c", _READ, str(root), str(wanted)]
    command = [_STRACE, "-f", "-y", "-e", f"trace={_CALLS}", "-o", str(log), *script]
    subprocess.run(command, check=True, timeout=300)
    return sum(f"{root}" in line for line in log.read_text().splitlines())
