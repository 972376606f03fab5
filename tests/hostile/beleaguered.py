"""Ranks that exchange messages and sums while others attack their sockets; each runs this file.

Usage: python beleaguered.py FOLDER, as dlio's launcher or torchrun starts it. The ranks meet, write
their process ids into FOLDER, and go on until the file `enough` is there.
"""

import os
import sys
import time

import numpy as np

from dlio.comm import world


def main(folder: str) -> None:
    comm = world()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    rounds, slowest, until = 0, 0.0, None
    while until is None or rounds < until:
        start = time.monotonic()
        for size in (100, 1 << 18):
            sent, inbox = np.full(size, rounds % 251, np.uint8), np.empty(size, np.uint8)
            comm.wait([comm.irecv(inbox, left, 1), comm.isend(sent, right, 1)], "a message")
            assert (inbox == rounds % 251).all()
        total = np.ones(1000)
        comm.wait([comm.iallreduce(total)], "a sum")
        assert (total == comm.size).all()
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
        if rounds == 1:
            with open(os.path.join(folder, f"pid-{comm.rank}"), "w", encoding="ascii") as file:
                file.write(str(os.getpid()))
        if until is None and comm.tell(os.path.exists(os.path.join(folder, "enough"))):
            other = comm.dup()  # Connections made under attack.
            other.barrier()
            other.close()
            until = rounds + 5
        time.sleep(0.01)
    comm.barrier()
    print(f"rank {comm.rank}: slowest round {slowest:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
