"""The reaper: a process that removes a job's folder from shared memory when the job has died.

A job that is killed cannot clean up, and its files there occupy memory. So whoever makes such a
folder starts this process. It sleeps in the kernel until it gets the lock that every holder of the
folder shares, which is when the last holder has died; it then removes the folder and ends. Where
the reaper is killed too (by a batch system, with all of the job), the next start of dlio does it.
"""

import fcntl
import os
import sys

from dlio.util.shared import sweep_shared_memory

__all__ = ["main"]


def main(lock: str) -> None:
    """Detach from the caller, wait for the lock, and remove the folder that it is in."""
    if os.fork():
        return  # The child is adopted by init, and never becomes a zombie of the job's.
    os.chdir("/")
    try:
        held = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    fcntl.flock(held, fcntl.LOCK_EX)
    os.close(held)
    sweep_shared_memory(os.path.basename(os.path.dirname(lock)))


if __name__ == "__main__":
    main(sys.argv[1])
