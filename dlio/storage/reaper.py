"""A process that outlives a job by a moment, to take its RAM tier out of shared memory.

A job that is killed cannot clean up, and shared memory is memory. So whoever makes a RAM tier's
folder starts this process. It sleeps in the kernel, waiting for the lock that every process of
the job shares, gets it when the last of them has died, removes the folder, and ends. Where it is
killed too (a batch system that kills all of a job), the next start of dlio sweeps.
"""

import fcntl
import os
import subprocess
import sys
from contextlib import suppress

from dlio.storage.folders import locked, remove_if_unheld

_START_TIMEOUT_S = 20.0


def start_reaper(user_folder: str, name: str) -> None:
    """Watch the folder `name` below this user's folder in shared memory, from a process of its
    own session that holds nothing of this one's open."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # Without it, the next start sweeps.
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "dlio.storage.reaper", user_folder, name],
            env={**os.environ, "PYTHONPATH": package},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )


def main(user_folder: str, name: str) -> None:
    if os.fork():
        return  # The one who started us goes on; we are nobody's child and nobody's zombie.
    os.chdir("/")
    user = os.open(user_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    path = os.path.join(name, "alive")
    try:
        alive = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=user)
    except FileNotFoundError:
        return
    fcntl.flock(alive, fcntl.LOCK_EX)
    os.close(alive)
    with locked(user, "sweep"):
        remove_if_unheld(user, name, "alive")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
