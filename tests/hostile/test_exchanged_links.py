"""Parts of a data set are exchanged with links out of it, again and again, while commands run.

The kernel notes whatever is opened outside: nothing may be.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlio
from dlio.cli import main
from dlio.errors import DlioError
from dlio_staging.verify import find_folders
from tests.conftest import examples
from tests.hostile.linked_sets import FORMATS, Options, parts_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify and renameat2 are Linux's")

_OPENED = 0x21  # IN_ACCESS | IN_OPEN
_EVENT = struct.Struct("iIII")
_EXCHANGE = """
import ctypes, itertools, random, sys, time
call = ctypes.CDLL(None, use_errno=True).renameat2
pairs = [pair.split("\\t") for pair in sys.stdin.read().split("\\n")]
print("begun", flush=True)
draw = random.Random(0)
for one, other in itertools.cycle(pairs):
    for _ in range(2):
        if call(-100, one.encode(), -100, other.encode(), 2):
            sys.exit(f"{one}: {ctypes.get_errno()}")
        time.sleep(draw.choice((0, 1e-5, 1e-3)))
"""
COMMANDS = (
    ("ls", "DATA"),
    ("verify", "DATA"),
    ("pack", "DATA", "packed"),
    ("stage", "DATA", "--tiers", "tier:64MiB"),
    ("view", "DATA", "--output", "view.html", "--no-browser", "--count", "2"),
)


class Watch:
    """Whatever is opened or read in a folder, by the kernel's notes. Opens nothing there."""

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._file = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._file >= 0
        self._paths: dict[int, str] = {}
        for path in (folder, *folder.rglob("*")):
            number = library.inotify_add_watch(self._file, os.fsencode(path), _OPENED)
            assert number >= 0
            self._paths[number] = str(path)
        self.seen()

    def seen(self) -> list[str]:
        """Return the files and folders that were opened or read since the last call."""
        events = b""
        with contextlib.suppress(BlockingIOError):
            events = os.read(self._file, 1 << 16)
        seen = []
        while events:
            number, mask, _, length = _EVENT.unpack_from(events)
            name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode()
            seen.append(f"{self._paths.get(number)} {name} {mask:x}")
            events = events[_EVENT.size + length :]
        return seen

    def close(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def exchanging(root: Path, outside: Path) -> Iterator[None]:
    """Exchange every part of a data set, one after another, with a link to the same part outside,
    and back."""
    links = root.parent / "links"
    links.mkdir()
    pairs = []
    for number, part in enumerate(parts_of(root)):
        (links / f"{number}").symlink_to(outside / part)
        pairs.append(f"{root / part}\t{links / f'{number}'}")
    command = [sys.executable, "-c", _EXCHANGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("\n".join(pairs).encode())
        other.stdin.close()
        assert other.stdout.readline() == b"begun\n"
        try:
            yield
            assert other.poll() is None
        finally:
            other.kill()


def _load(root: str, options: Options) -> None:
    with contextlib.suppress(DlioError), dlio.open(root, tiers="none", **options) as data:
        for _ in dlio.DataLoader(data, 2, num_workers=2):
            pass


def test_files_that_are_opened_outside_are_noted(tmp_path: Path) -> None:
    FORMATS["classes"](tmp_path / "data")
    watch = Watch(tmp_path / "data")
    assert not watch.seen()
    os.stat(tmp_path / "data" / "a" / "0.jpg")
    assert not watch.seen()
    (tmp_path / "data" / "a" / "0.jpg").read_bytes()
    assert watch.seen()
    list((tmp_path / "data" / "b").iterdir())
    assert watch.seen()
    watch.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "zarr 3" else pytest.mark.nightly) for name in FORMATS],
)
# SECURITY.md: S1
def test_nothing_outside_is_opened_while_links_are_exchanged(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLIO_CACHE", "cache")
    monkeypatch.setenv("DLIO_NO_FORK", "1")
    root, outside = tmp_path / "data", tmp_path / "outside"
    root.mkdir()
    (tmp_path / "tier").mkdir()
    options = FORMATS[name](root)
    shutil.copytree(root, outside)
    watch = Watch(outside)
    split = ("--split", options["split"]) if "split" in options else ()
    with exchanging(root, outside):
        for _ in range(examples(3)):
            for words in COMMANDS:
                shutil.rmtree("cache", ignore_errors=True)
                shutil.rmtree("packed", ignore_errors=True)
                with pytest.raises(SystemExit):
                    main([*(word.replace("DATA", "data") for word in words), *split])
                said = capfd.readouterr().err
                assert "Traceback" not in said, (words, said)
                assert watch.seen() == [], (words, said)
            _load(str(root), options)
            assert watch.seen() == [], "loader"
    watch.close()


# SECURITY.md: S10
def test_a_folder_that_is_exchanged_while_blocks_are_sought_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tier" / "node").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "00000001.blk").touch()
    own, calls = os.scandir, itertools.count()

    def scandir(place: int | str) -> object:
        if next(calls) == 1:
            (tmp_path / "tier" / "node").rename(tmp_path / "hidden")
            (tmp_path / "tier" / "node").symlink_to(tmp_path / "outside")
        return own(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert find_folders(str(tmp_path / "tier")) == []
    assert next(calls) == 2
    monkeypatch.undo()
    assert find_folders(str(tmp_path / "outside")) == [str(tmp_path / "outside")]
