"""Folders that users name, and files in verified folders."""

import errno
import os
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from dlio.errors import TierError, UsageError, printable
from dlio.util.folders import (
    MARK,
    empty_folder,
    is_marked,
    new_folder,
    open_private,
    open_working,
    remove_marked,
    seal,
)
from dlio.util.trusted_files import (
    UntrustedFile,
    closing_descriptor,
    open_file,
    path_of,
    planted,
    read_small,
    shown_as,
)
from dlio.util.user_folders import make_folders, open_folder, parent_of
from dlio.util.whole_files import (
    check_writable,
    move_file,
    name_partial,
    not_written,
    open_partial,
    write_json,
    write_whole,
)
from tests.conftest import FullDisk

READ = os.O_RDONLY


def _same(descriptor: int, path: Path) -> bool:
    with closing_descriptor(descriptor):
        return os.path.samestat(os.fstat(descriptor), path.stat())


def test_own_links_relative_paths_and_dots_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "a")
    (tmp_path / "relative").symlink_to("absolute/b/../b")
    monkeypatch.chdir(tmp_path / "a")
    b = tmp_path / "a" / "b"
    for path in (f"{b}/", f"/{b}//.", f"{tmp_path}/relative", "b", "./../relative", "b/../b"):
        assert _same(open_folder(path), b), path
    # As the kernel goes, `..` leaves the folder behind the link, and not the link.
    assert _same(open_folder(f"{tmp_path}/relative/.."), tmp_path / "a")
    assert _same(open_folder("/"), Path("/"))


def test_loops_files_and_missing_folders_are_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    before = set(os.listdir("/proc/self/fd"))
    for name, kind in (
        ("loop", OSError),
        ("file", NotADirectoryError),
        ("file/x", NotADirectoryError),
        ("dangling", FileNotFoundError),
        ("none/x", FileNotFoundError),
    ):
        with pytest.raises(kind):
            open_folder(str(tmp_path / name))
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_path_by_way_of_a_descriptor_survives_a_renaming(tmp_path: Path) -> None:
    (tmp_path / "here" / "inside").mkdir(parents=True)
    with closing_descriptor(open_folder(str(tmp_path / "here"))) as folder:
        (tmp_path / "here").rename(tmp_path / "there")
        (tmp_path / "here").mkdir()
        write_json(f"{path_of(folder)}/inside/x.json", 1)
        with parent_of(f"{path_of(folder)}/y") as (parent, name):
            assert (_same(os.dup(parent), tmp_path / "there"), name) == (True, "y")
    assert (tmp_path / "there" / "inside" / "x.json").read_text() == "1"
    assert os.listdir(tmp_path / "here") == []


def test_missing_folders_are_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(make_folders(f"{tmp_path}/a/b/"))
        os.close(make_folders(f"{tmp_path}/p/q", 0o700))
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "p/q")}
    assert modes == {"a": 0o775, "a/b": 0o775, "p/q": 0o700}
    assert _same(make_folders(f"{tmp_path}/a/b"), tmp_path / "a" / "b")


def _status(mode: int, uid: int, gid: int = 77777) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("folder", "entry", "is_refused"),
    [
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFLNK | 0o777, 4242), True),
        (_status(stat.S_IFDIR | 0o777, 0), _status(stat.S_IFLNK | 0o777, 4242), True),
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFDIR | 0o755, 4242), True),
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFDIR | 0o777, 4242), True),
        (
            _status(stat.S_IFDIR | 0o1777, 0),
            _status(stat.S_IFDIR | 0o2777, 4242, os.getegid()),
            True,
        ),
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFDIR | 0o770, 4242), True),
        (
            _status(stat.S_IFDIR | 0o1777, 0),
            _status(stat.S_IFLNK | 0o770, 4242, os.getegid()),
            True,
        ),
        (
            _status(stat.S_IFDIR | 0o1777, 0),
            _status(stat.S_IFDIR | 0o2770, 4242, os.getegid()),
            False,
        ),
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFLNK | 0o777, 0), False),
        (_status(stat.S_IFDIR | 0o1777, 0), _status(stat.S_IFLNK | 0o777, os.geteuid()), False),
        (_status(stat.S_IFDIR | 0o1777, 4242), _status(stat.S_IFLNK | 0o777, 4242), False),
        (_status(stat.S_IFDIR | 0o2775, 0), _status(stat.S_IFLNK | 0o777, 4242), True),
        (_status(stat.S_IFDIR | 0o2775, 0), _status(stat.S_IFLNK | 0o777, 0), False),
        (_status(stat.S_IFDIR | 0o2775, 0), _status(stat.S_IFDIR | 0o755, 4242), False),
        (_status(stat.S_IFDIR | 0o775, 4242), _status(stat.S_IFLNK | 0o777, 4242), False),
        (
            _status(stat.S_IFDIR | 0o2775, 4242, os.getegid()),
            _status(stat.S_IFLNK | 0o777, 4242),
            True,
        ),
        (_status(stat.S_IFDIR | 0o755, 4242), _status(stat.S_IFLNK | 0o777, 4242), False),
    ],
)
def test_strangers_are_not_followed_where_all_may_write(
    folder: os.stat_result, entry: os.stat_result, is_refused: bool
) -> None:
    assert bool(planted(folder, entry)) == is_refused


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users: needs root")
def test_links_of_strangers_lead_nowhere_from_their_folders(tmp_path: Path) -> None:
    """Not below their folders in one of a group, and nowhere to a folder of the user."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    colleagues, theirs = tmp_path / "colleagues", tmp_path / "theirs"
    for folder in (mine, other, colleagues, colleagues / "out", theirs):
        folder.mkdir()
    for folder in (other, theirs, colleagues / "out"):
        os.chown(folder, 4242, 4242)
    colleagues.chmod(0o2775)
    for above in (colleagues / "out", theirs):
        for name in ("mine", "other"):
            (above / name).symlink_to(tmp_path / name)
            os.chown(above / name, 4242, 4242, follow_symlinks=False)
    for mode in (0o755, 0o777):
        (colleagues / "out").chmod(mode)
        os.close(open_folder(str(colleagues / "out")))
        for name in ("mine", "other"):
            with pytest.raises(UntrustedFile, match=f"{name} .*is a link by user 4242"):
                open_folder(str(colleagues / "out" / name))
    os.close(open_folder(str(theirs / "other")))
    with pytest.raises(UntrustedFile, match=r"mine .*is a link by user 4242 to a folder of yours"):
        open_folder(str(theirs / "mine"))


def test_no_device_is_replaced_by_a_file(tmp_path: Path) -> None:
    """Root could replace /dev/null, which a report may be sent to. Programs read from a pipe."""
    places = [tmp_path / name for name in ("full", "stdout", "device", "fifo", "socket")]
    places[0].symlink_to("/dev/full")
    places[1].symlink_to("/proc/self/fd/1")
    os.mkfifo(places[3])
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(places[4]))
    with suppress(PermissionError):
        os.mknod(places[2], stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "whole").write_text("whole")
    for place in filter(os.path.lexists, places):
        before = place.lstat()
        with pytest.raises(UsageError, match="a socket or an open file has this name"):
            write_json(str(place), 1)
        with pytest.raises(UsageError, match=r"--report .* has this name; name another place"):
            check_writable("--report", str(place))
        with pytest.raises(OSError, match="has this name"):
            move_file(str(tmp_path / "whole"), str(place))
        assert os.path.samestat(place.lstat(), before)
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["whole", *(each.name for each in places if os.path.lexists(each))]
    )


def test_only_plain_files_with_one_name_are_opened(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("plain")
    (tmp_path / "twice").write_text("twice")
    os.link(tmp_path / "twice", tmp_path / "again")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with closing_descriptor(open_folder(str(tmp_path))) as folder:
        assert read_small(folder, "plain", 5) == b"plain"
        with pytest.raises(OSError, match="larger than 4 bytes"):
            read_small(folder, "plain", 4)
        for name in ("twice", "again", "link", "fifo"):
            for flags in (READ, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND):
                with pytest.raises(UntrustedFile, match=name):
                    open_file(folder, name, flags)
        for name in ("plain", "link", "folder", "fifo"):
            with pytest.raises(FileExistsError):
                open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for name in ("twice", "link", "fifo"):
        with pytest.raises(UntrustedFile):
            open_partial(str(tmp_path / name), new=True)
    assert (tmp_path / "twice").read_text() == "twice"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "out").symlink_to("other")

    def fails(file: object) -> None:
        assert file is not None
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        write_whole(str(tmp_path / "out"), fails)
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    write_whole(str(tmp_path / "out"), lambda file: file.write(b"new"))
    assert (tmp_path / "out").read_text() == "new"
    assert (tmp_path / "other").read_text() == "other"
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_json(str(tmp_path / "none" / "x"), 1)


def test_nothing_stays_of_a_file_whose_writer_is_killed(tmp_path: Path) -> None:
    def die(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        write_whole(str(tmp_path / "out"), die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_a_file_system_may_not_know_files_without_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, names = os.open, []

    def named_only(path: str, flags: int, *rest: int, **kept: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **kept)

    def write(file: IO[bytes]) -> None:
        names.extend(os.listdir(tmp_path))
        file.write(b"new")

    monkeypatch.setattr(os, "open", named_only)
    write_whole(str(tmp_path / "out"), write)
    assert [Path(name).suffix for name in names] == [".tmp"]
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "new"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP, errno.EACCES])
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_file_without_a_name_need_not_get_one_by_a_link(
    number: int, mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    before = os.umask(mask)
    try:
        write_whole(str(tmp_path / "linked"), lambda file: file.write(b"x" * 100_000))
        monkeypatch.setattr(os, "link", no_link)
        write_whole(str(tmp_path / "copied"), lambda file: file.write(b"x" * 100_000))
        with open_partial(str(tmp_path / "partial"), new=True, nameless=True) as file:
            file.write("line\n" * 10_000)
            file.flush()
            name_partial(file, str(tmp_path / "partial"))
    finally:
        os.umask(before)
    assert sorted(os.listdir(tmp_path)) == ["copied", "linked", "partial"]
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "linked").read_bytes()
    assert (tmp_path / "partial").read_text() == "line\n" * 10_000
    modes = {(tmp_path / name).stat().st_mode for name in os.listdir(tmp_path)}
    assert modes == {stat.S_IFREG | 0o664 & ~mask}


def test_a_mark_that_finds_no_room_leaves_nothing(tmp_path: Path, full_disk: FullDisk) -> None:
    parent = os.open(tmp_path, READ)
    with closing_descriptor(parent), full_disk(0), pytest.raises(OSError, match="too large"):
        open_working(parent, "work")
    assert os.listdir(tmp_path) == []


def test_nothing_is_removed_in_a_folder_without_a_mark(tmp_path: Path) -> None:
    for name in ("own", "foreign", "empty"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "link").symlink_to("outside")
    for name in ("own", "foreign"):
        (tmp_path / name / "deep" / "er").mkdir(parents=True)
        (tmp_path / name / "deep" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "own" / MARK).touch()
    (tmp_path / "foreign" / MARK).symlink_to(tmp_path / "own" / MARK)
    with closing_descriptor(open_folder(str(tmp_path))) as folder:
        with closing_descriptor(open_folder(str(tmp_path / "foreign"))) as foreign:
            assert not is_marked(foreign)
            empty_folder(foreign)
        with pytest.raises(UntrustedFile, match="not made by dlio"):
            open_working(folder, "foreign")
        removed = {
            name: remove_marked(folder, name)
            for name in ("own", "foreign", "empty", "link", "none")
        }
    assert [name for name in removed if removed[name]] == ["own", "empty"]
    assert sorted(os.listdir(tmp_path)) == ["foreign", "link", "outside"]
    assert sorted(os.listdir(tmp_path / "foreign")) == [MARK, "deep"]
    assert os.listdir(tmp_path / "outside") == ["kept"]


def test_folders_of_a_tier_have_marks_and_must_have_them(tmp_path: Path) -> None:
    os.close(open_private(str(tmp_path), "top", "set", "node", marked=2))
    assert sorted(os.listdir(tmp_path / "top")) == [MARK, "set"]
    assert sorted(os.listdir(tmp_path / "top" / "set")) == [MARK, "node"]
    os.close(open_private(str(tmp_path), "top", "set", "node", marked=2))
    (tmp_path / "top" / MARK).unlink()
    with pytest.raises(TierError, match="top was not made by dlio"):
        open_private(str(tmp_path), "top", "set", marked=2)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_mark_that_cannot_be_read_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    os.close(open_private(str(tmp_path), "top", "set", marked=2))

    def fails(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("dlio.util.folders.read_small", fails)
    with pytest.raises(TierError, match=os.strerror(number)) as raised:
        open_private(str(tmp_path), "top", "set", marked=2)
    assert "remove it" not in str(raised.value)


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with new_folder(str(tmp_path / "made")) as inside:
            Path(inside, "x").write_text("x")
            assert not (tmp_path / "made").exists()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "made" / "x").stat().st_mode) == 0o664
    with pytest.raises(FileExistsError), new_folder(str(tmp_path / "made")):
        pass
    with pytest.raises(KeyError), new_folder(str(tmp_path / "half")):
        raise KeyError
    assert os.listdir(tmp_path) == ["made"]


def test_sealed_folders_are_not_writable_by_all(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").touch()
    (tmp_path / "outside").touch()
    (tmp_path / "outside").chmod(0o666)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "outside")
    paths = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    for path in paths:
        path.chmod(0o777)
    with closing_descriptor(open_folder(str(tmp_path))) as folder:
        seal(folder, "a")
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o775}
    assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == 0o666


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größe 1.jpg", "größe 1.jpg"),
        ("\x1b[2J\r\n", "\\x1b[2J\\r\\n"),
        (b"a\xff\x07", "a\\udcff\\x07"),
        ("\u202egnp.exe\u0085", "\\u202egnp.exe\\x85"),
    ],
)
def test_names_are_printed_without_control_characters(text: str | bytes, shown: str) -> None:
    assert printable(text) == shown


def test_errors_name_a_folder_as_its_user_does(tmp_path: Path) -> None:
    errors = (
        UsageError("/proc/self/fd/11/x cannot be read, unlike /proc/self/fd/110/y"),
        FileNotFoundError(2, "gone", "/proc/self/fd/11/x"),
        ValueError(3, "/proc/self/fd/11"),
    )
    for error in errors:
        with pytest.raises(type(error)) as caught, shown_as("/proc/self/fd/11", "mine"):
            raise error
        assert "mine" in str(caught.value)
        assert "/proc/self/fd/11/" not in str(caught.value)
    assert "unlike /proc/self/fd/110/y" in str(errors[0])


def test_a_place_in_which_nothing_can_be_made_is_not_told_to_be_created(tmp_path: Path) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert "create its folder" in not_written(str(tmp_path / "a" / "b"), missing)
    assert not_written("/proc/dlio-0", missing).endswith("directory; name another place")
