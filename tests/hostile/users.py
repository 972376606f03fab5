"""Two real users of a machine, and processes that run as one of them."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_GROUP = 54321
"""Number of a group that both users are in."""
_DEADLINE_S = 600
"""Of a process that another user's files hang; others take longer on a busy machine."""


@dataclass(frozen=True)
class User:
    """A user of the machine."""

    uid: int
    gid: int
    home: Path

    def run(self, act: Callable[[], Any], umask: int = 0o022) -> Any:
        """Return the result of a function, run by this user in a process of its own.

        An error is returned as text, "<type>: <message>". Raises TimeoutError when the function
        hangs. All modules that it needs must be loaded: users need not be able to read them.
        """
        reads, writes = os.pipe()
        process = os.fork()
        if not process:
            code = 1
            with contextlib.suppress(BaseException):
                os.close(reads)
                code = self._child(act, umask, writes)
            os._exit(code)
        os.close(writes)
        deadline = time.monotonic() + _DEADLINE_S
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                os.close(reads)
                raise TimeoutError("the other user's files hang it")
            time.sleep(0.002)
        with os.fdopen(reads, "rb") as file:
            return json.loads(file.read())

    def _child(self, act: Callable[[], Any], umask: int, writes: int) -> int:
        os.setgroups([SHARED_GROUP])
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        os.umask(umask)
        os.environ.pop("DLIO_CACHE", None)
        os.environ["HOME"] = str(self.home)
        os.environ["XDG_CACHE_HOME"] = str(self.home / ".cache")
        os.chdir("/")
        try:
            result = act()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writes, json.dumps(result).encode())
        return 0


@dataclass(frozen=True)
class Machine:
    """Folders that two users share, and data that both can read."""

    alice: User
    mallory: User
    top: Path
    data: Path

    def folder(self, kind: str) -> Path:
        """Return a new folder: `sticky` as /tmp, `open` to all, or `group` for the shared group."""
        place = Path(tempfile.mkdtemp(dir=self.top, prefix=f"{kind}-"))
        os.chown(place, 0, SHARED_GROUP if kind == "group" else 0)
        place.chmod({"sticky": 0o1777, "open": 0o777, "group": 0o2775}[kind])
        return place

    def belongings(self) -> dict[str, tuple[int, int, bytes]]:
        """Alice's home: kind and mode, owner and contents of every file outside the cache."""
        held = {}
        for path in sorted(self.alice.home.rglob("*")):
            if ".cache" not in path.parts:
                status = path.lstat()
                body = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
                held[str(path)] = (status.st_mode, status.st_uid, body)
        return held


@contextlib.contextmanager
def two_users(pictures: Path) -> Iterator[Machine]:
    """Make two users with homes, and folders that they share; remove all of that at the end.

    Args:
        pictures: a data set, which is copied.
    """
    top = Path(tempfile.mkdtemp(prefix="dlio-users-"))
    names: list[str] = []
    try:
        top.chmod(0o755)
        users = []
        for each in ("alice", "mallory"):
            name = f"dlio-{each[0]}-{os.getpid()}"
            home = top / each
            _run("useradd", "--no-create-home", "--home-dir", str(home), "--user-group", name)
            names.append(name)
            uid, gid = (int(_run("id", flag, name)) for flag in ("-u", "-g"))
            home.mkdir(mode=0o700)
            (home / "thesis").mkdir()
            (home / "thesis" / "letter.txt").write_text("years of work\n")
            (home / "profile").write_text("umask 022\n")
            for path in (home, *home.rglob("*")):
                os.chown(path, uid, gid)
            users.append(User(uid, gid, home))
        data = top / "data"
        shutil.copytree(pictures, data)
        for path in (data, *data.rglob("*")):
            path.chmod(0o755)
        yield Machine(users[0], users[1], top, data)
    finally:
        for name in names:
            _run("userdel", name)
        shutil.rmtree(top, ignore_errors=True)


def _run(*argv: str) -> str:
    for _ in range(50):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
        if not done.returncode:
            return done.stdout.strip()
        time.sleep(0.1)  # Another process has locked the list of users.
    raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
