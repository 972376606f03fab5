"""Names below a data set's folder: the place that is judged is the one that is opened."""

import errno
import gc
import os
import pickle
from pathlib import Path

import pytest

from dlio.data import links
from dlio.data.links import DataRoot, following_links, opened_by_user
from dlio.data.source import Source, file_at
from dlio.errors import SourceError
from dlio.util import link_free


@pytest.fixture(params=["openat2", "by components"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set `data` with `a/x`, next to `secret`; with and without the kernel's call."""
    if request.param == "by components":
        monkeypatch.setattr(link_free, "_kernel_calls", lambda: None)
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/a/x").write_bytes(b"own")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/x").write_bytes(b"secret")
    return tmp_path / "data"


def _read(root: DataRoot, path: Path | str) -> bytes:
    with open(root.open_regular(str(path)), "rb") as file:
        return file.read()


@pytest.mark.parametrize("target", ["a", "{root}/a", "../data/a", "../named/a"])
def test_a_link_that_stays_inside_is_followed(folder: Path, target: str) -> None:
    (folder.parent / "named").symlink_to(folder)
    (folder / "to").symlink_to(target.format(root=folder))
    (folder / "file").symlink_to("to/x")
    root = DataRoot(str(folder), follows=False)
    for name in ("to/x", "file", "a/x", "to/x"):
        assert _read(root, folder / name) == b"own"


@pytest.mark.parametrize("target", ["../secret", "{root}/../secret", "/", "a/../../secret"])
def test_a_link_out_is_refused_with_its_name_and_a_remedy(folder: Path, target: str) -> None:
    (folder / "to").symlink_to(target.format(root=folder))
    root = DataRoot(str(folder), follows=False)
    inner = str(folder.parent / "secret/x")[1:] if target == "/" else "x"
    for open_ in (root.open, root.open_regular):
        with pytest.raises(SourceError, match=f"{folder}/to is a link to .*--follow-links"):
            open_(f"{folder}/to/{inner}")
    with pytest.raises(SourceError, match="is a link to"):
        Source(str(folder)).names("to")
    assert _read(DataRoot(str(folder), follows=True), f"{folder}/to/{inner}") == b"secret"


@pytest.mark.parametrize("name", ["../secret/x", "a/../../secret/x", "..", "a/.."])
def test_dots_lead_nowhere_else(folder: Path, name: str) -> None:
    root = DataRoot(str(folder), follows=False)
    assert _read(root, folder / "a/x") == b"own"  # Its folder is open by now.
    assert _read(root, f"{folder}/a/../a/x") == b"own"
    with pytest.raises((SourceError, IsADirectoryError)):
        root.open_regular(f"{folder}/{name}")


def test_a_folder_that_is_exchanged_between_judging_and_opening_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "to").symlink_to("a")
    real = os.path.realpath

    def exchange(path: str, **options: bool) -> str:
        found_out = real(path, **options)
        if path == f"{folder}/to/x" and not (folder / "a").is_symlink():
            (folder / "a").rename(folder / "b")
            (folder / "a").symlink_to("../secret")
        return found_out

    monkeypatch.setattr(os.path, "realpath", exchange)
    with pytest.raises(SourceError, match="exchanged"):
        _read(DataRoot(str(folder), follows=False), folder / "to/x")


def test_a_folder_that_is_exchanged_once_it_is_open_is_pinned(folder: Path) -> None:
    root = DataRoot(str(folder), follows=False)
    assert _read(root, folder / "a/x") == b"own"
    (folder / "a").rename(folder / "b")
    (folder / "a").symlink_to("../secret")
    assert _read(root, folder / "a/x") == b"own"
    root.close()
    with pytest.raises(SourceError, match="is a link to"):
        root.open(f"{folder}/a/x")


def test_a_circle_and_a_pipe_wait_for_nobody(folder: Path) -> None:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    os.mkfifo(folder / "fifo")
    (folder / "to").symlink_to("fifo")
    root = DataRoot(str(folder), follows=False)
    with pytest.raises(SourceError, match="circle"):
        root.open(f"{folder}/one")
    for name in ("fifo", "to"):
        with pytest.raises(OSError, match="not a regular file"):
            root.open_regular(f"{folder}/{name}")
    with pytest.raises(NotADirectoryError):
        root.open(f"{folder}/a/x/y")
    with pytest.raises(FileNotFoundError):
        root.open(f"{folder}/a/y")


def test_a_path_that_the_user_names_is_trusted_and_nothing_else(folder: Path) -> None:
    named = folder.parent / "named"
    named.symlink_to("data")
    (folder / "split").symlink_to("../secret")
    assert file_at(f"{named}/a/x").opened().read() == b"own"
    with opened_by_user(str(named)):
        assert Source(f"{named}/a").read("x") == b"own"
        with pytest.raises(SourceError, match="is a link to"):
            Source(f"{named}/split").read("x")
        with pytest.raises(SourceError, match="is a link to"):
            file_at(f"{named}/split/x").opened()
    with opened_by_user(f"{named}/split"):  # The user has named it, and a reader its parent.
        assert Source(str(named)).read("split/x") == b"secret"
    with following_links(True), opened_by_user(str(named)):
        assert Source(f"{named}/split").read("x") == b"secret"
    again = pickle.loads(pickle.dumps(DataRoot(str(named), follows=False)))
    with pytest.raises(SourceError):
        again.open(f"{named}/split/x")


def test_a_data_set_that_was_made_anew_is_found(folder: Path) -> None:
    root = DataRoot(str(folder), follows=False)
    assert _read(root, folder / "a/x") == b"own"
    folder.rename(folder.parent / "old")
    other = folder.parent / "other"
    (other / "a").mkdir(parents=True)
    (other / "a/y").write_bytes(b"anew")
    folder.symlink_to(other)
    assert _read(root, folder / "a/y") == b"anew"


def test_folders_that_stay_open_are_few_and_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # Roots of other tests.
    before = len(os.listdir("/proc/self/fd"))
    most = len(links._open_folders) + 2
    monkeypatch.setattr(links, "_most_folders", lambda: most)
    root = DataRoot(str(folder), follows=False)
    for number in range(8):
        (folder / f"{number}").mkdir()
        (folder / f"{number}/x").write_bytes(b"own")
        assert _read(root, folder / f"{number}/x") == b"own"
    assert len(os.listdir("/proc/self/fd")) == before + 2
    root.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_without_the_call_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_free, "_OPENAT2", 100_000)
    assert link_free._kernel_calls.__wrapped__() is None


def test_errors_are_those_of_the_system(folder: Path) -> None:
    (folder / "to").symlink_to("a")
    for path, number in ((f"{folder}/to/x", errno.ELOOP), (f"{folder}/none", errno.ENOENT)):
        with pytest.raises(OSError, match=os.strerror(number)):
            link_free.open_unlinked(path)
