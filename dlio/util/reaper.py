"""A process that outlives a job by a moment, to take what it left out of shared memory.

A job that is killed cannot clean up, and shared memory is memory. So whoever makes a folder there
starts this process. It sleeps in the kernel, waiting for the lock that every holder of the folder
shares, gets it when the last of them has died, removes the folder, and ends. Where it is killed
too (a batch system that kills all of a job), the next start of dlio sweeps.
"""

import fcntl
import os
import sys

from dlio.util.shared import sweep_shared_memory


def main(lock: str) -> None:
    if os.fork():
        return  # The one who started us goes on; we are nobody's child and nobody's zombie.
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
