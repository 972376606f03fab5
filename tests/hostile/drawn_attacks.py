"""Attacks drawn over alice's deeds, the names that mallory takes, the entries of these names, the
rights of the folder and alice's umask: before a deed, and again and again while it runs.

In each alice's deed ends in its result or in one line, within the deadline, and nothing that she
has made may be written by all users. That her home has not changed is checked for all attacks.
"""

import contextlib
import fcntl
import itertools
import os
import random
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.commands import attack, daily, is_refused
from tests.hostile.deeds import DAILY, DEEDS
from tests.hostile.users import SHARED_GROUP, Machine, User

_DRAWN = 300
_RACED = 60
_RIGHTS = ("sticky", "open", "group")
_UMASKS = (0, 0o022, 0o077)


def _free_folder(path: Path, _: Machine) -> None:
    path.mkdir()
    path.chmod(0o777)
    (path / ".dlio").write_text("dlio\n")


def _file(mode: int) -> Callable[[Path, Machine], object]:
    def plant(path: Path, _: Machine) -> None:
        path.write_text("{}\n")
        path.chmod(mode)

    return plant


def _folder(mode: int) -> Callable[[Path, Machine], object]:
    def plant(path: Path, _: Machine) -> None:
        path.mkdir()
        path.chmod(mode)

    return plant


def _socket(path: Path, _: Machine) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _huge_file(path: Path, _: Machine) -> None:
    """A sparse file: reading all of it would take the machine's memory."""
    path.touch()
    path.chmod(0o666)
    os.truncate(path, 1 << 40)


def _locked(path: Path, _: Machine) -> None:
    """A file whose lock a process of mallory's holds until the attack is over."""
    path.touch()
    path.chmod(0o666)
    held = os.open(path, os.O_RDWR)
    if not os.fork():
        fcntl.flock(held, fcntl.LOCK_EX)
        os.closerange(0, held)
        os.closerange(held + 1, 1 << 16)
        for _second in range(120):
            time.sleep(1)
            if not path.exists():
                break
        os._exit(0)
    os.close(held)


PLANTS: dict[str, Callable[[Path, Machine], object]] = {
    "link home": lambda path, machine: path.symlink_to(machine.alice.home / "thesis"),
    "link file": lambda path, machine: path.symlink_to(machine.alice.home / "profile"),
    "link new": lambda path, machine: path.symlink_to(machine.alice.home / "new"),
    "link device": lambda path, _: path.symlink_to("/dev/zero"),
    "fifo": lambda path, _: os.mkfifo(path, 0o666),
    "folder": _free_folder,
    "file": _file(0o666),
    "socket": _socket,
    "hard link": lambda path, machine: path.hardlink_to(machine.mallory.home / "profile"),
    "link process": lambda path, _: path.symlink_to("/proc/self/root/dev/zero"),
    "link fd": lambda path, _: path.symlink_to("/proc/self/fd/0"),
    "link itself": lambda path, _: path.symlink_to(path.name),
    "huge": _huge_file,
    "private file": _file(0o600),
    "private folder": _folder(0o700),
    "sticky folder": _folder(0o1777),
    "folder of the group": _folder(0o2775),
    "link up": lambda path, machine: path.symlink_to(
        os.path.relpath(machine.alice.home, path.parent)
    ),
    "locked": _locked,
    "device": lambda path, _: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
}
"""Entries that mallory can make; a device is made by root, as in a container."""


def _place(machine: Machine, name: str, rights: str) -> tuple[Path, Path]:
    """Return a new folder, and the path of a name in it."""
    place = machine.folder(rights)
    return place, place / name.replace(f"dlio-{os.getuid()}", f"dlio-{machine.alice.uid}")


def _check_open(place: Path, machine: Machine) -> None:
    """Assert that nothing of alice's in a folder, or in her home, may be written by all users."""
    free = []
    for path in (*place.rglob("*"), *machine.alice.home.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            is_hers = status.st_uid == machine.alice.uid and not stat.S_ISLNK(status.st_mode)
            if is_hers and status.st_mode & 0o002:
                free.append(str(path))
    assert not free, free


def _is_told(result: object) -> bool:
    """True for a result, and an error in one line; a checkpoint that is not written is told."""
    worked = not isinstance(result, str) or result.startswith("/")
    return worked or is_refused(result) or str(result).startswith("AssertionError: [")


def _drawn(deed: str, name: str, plant: str, rights: str, umask: int) -> Any:
    def act(machine: Machine) -> None:
        place, path = _place(machine, name, rights)

        def prepare() -> None:
            os.umask(0)
            path.parent.mkdir(exist_ok=True)
            os.chmod(path.parent, 0o777) if path.parent != place else None
            PLANTS[plant](path, machine)

        if plant == "device":
            prepare()
        else:
            assert machine.mallory.run(prepare) is None
        before = sorted(os.listdir(path)) if plant == "folder" else []
        result = machine.alice.run(lambda: DEEDS[deed][0](machine, place), umask=umask)
        assert _is_told(result), result
        _check_open(place, machine)
        if plant == "folder" and is_refused(result):
            assert sorted(os.listdir(path)) == before
        if plant == "locked":
            path.unlink(missing_ok=True)

    act.__name__ = f"{deed} {name} {plant} {rights} {umask:o}".replace("/", "-").replace(" ", "_")
    return (daily if deed in DAILY and umask == 0 else attack)(act)


@contextlib.contextmanager
def _exchanging(user: User, place: Path, target: Path) -> Iterator[None]:
    """While the block runs, a process of this user exchanges all entries of a folder, and of the
    folders there, for links to `target`, and back."""
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            os.setgroups([SHARED_GROUP])
            os.setresgid(*[user.gid] * 3)
            os.setresuid(*[user.uid] * 3)
            draw = random.Random(0)
            while os.getppid() != 1:
                _exchange(place, target, draw)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _exchange(place: Path, target: Path, draw: random.Random) -> None:
    names = [path for path in (*place.iterdir(), *place.glob("*/*")) if ".hid" not in str(path)]
    if not names:
        return
    path = draw.choice(names)
    hidden = path.with_name(f".hid-{path.name}")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        path.symlink_to(target)
        time.sleep(draw.choice((0, 1e-4, 1e-3, 1e-2)))
        path.unlink()
    with contextlib.suppress(OSError):
        hidden.rename(path)


def _raced(deed: str, rights: str, target: str, umask: int) -> Any:
    def act(machine: Machine) -> None:
        place = machine.folder(rights)
        (place / "way").mkdir()
        os.chown(place / "way", machine.mallory.uid, SHARED_GROUP if rights == "group" else -1)
        (place / "way").chmod(0o2775 if rights == "group" else 0o777)
        with _exchanging(machine.mallory, place, machine.alice.home / target):
            for _ in range(5):
                result = machine.alice.run(lambda: DEEDS[deed][0](machine, place), umask=umask)
                assert _is_told(result), result
        _check_open(place, machine)

    act.__name__ = f"raced {deed} {rights} {target} {umask:o}".replace("/", "-").replace(" ", "_")
    return attack(act)


EVERY = [
    (deed, name, plant, rights, umask)
    for deed, (_, names) in DEEDS.items()
    for name, plant, rights, umask in itertools.product(names, PLANTS, _RIGHTS, _UMASKS)
]
EVERY_RACE = list(
    itertools.product(DEEDS, ("open", "group"), ("thesis", "profile", "new"), _UMASKS)
)
_draw = random.Random(45)
ATTACKS: list[Any] = [
    *(_drawn(*each) for each in _draw.sample(EVERY, _DRAWN)),
    *(_raced(*each) for each in _draw.sample(EVERY_RACE, _RACED)),
]
