"""The reaper: a process that removes a job's folder from shared memory after the job has died.

A killed job cannot clean up, and its files in shared memory would continue to occupy memory. So the
process that creates such a folder starts a reaper. It waits for the lock that every user of the
folder shares, gets it when the last of them has ended, removes the folder and ends. If the reaper
is killed, too (by a batch system, together with the job), the next start of dlio removes it.

It is a script of its own, `python -I -S reaper.py LOCK`, which imports next to nothing: it starts
in 10 ms, takes little memory while the job runs, and most jobs leave it nothing to remove.
"""

import fcntl
import os
import sys


def main(lock: str) -> None:
    """Detach from the caller, wait for the lock, and remove the folder that contains it."""
    if os.fork():
        return  # init adopts the child, which therefore never becomes a zombie of the job.
    os.chdir("/")
    try:
        held = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    fcntl.flock(held, fcntl.LOCK_EX)
    is_left = os.fstat(held).st_nlink > 0
    os.close(held)
    if is_left:
        util = os.path.dirname(os.path.abspath(__file__))
        sys.path.insert(0, os.path.dirname(os.path.dirname(util)))
        from dlio.util.shared_folders import sweep_shared_memory

        sweep_shared_memory(os.path.basename(os.path.dirname(lock)))


if __name__ == "__main__":
    main(sys.argv[1])
