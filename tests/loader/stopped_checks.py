"""Two ranks, of which one stops answering in the middle of an epoch, and goes on later.

Usage: stopped_checks.py FOLDER. Rank 1 writes its process to FOLDER.pid, stops itself after its
third step; rank 0 writes FOLDER.done when its epoch is over. Each prints a line of JSON.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import dlio
from dlio.comm import world
from dlio.loader.planned_engine import engine as planned
from dlio.plan.epoch import EpochPlan


def main(folder: str, scratch: str) -> None:
    rank = world().rank
    # Windows of a step or two, so that much is still to be sent when the peer stops.
    setattr(planned, "EpochPlan", functools.partial(EpochPlan, window_bytes=20_000))  # noqa: B010
    with (
        dlio.open(folder, tiers="ram:64MiB", image_size=32, seed=3) as data,
        dlio.DataLoader(
            data, 4, True, mode="global", pretend_nodes=2, prefetch_factor=1, num_workers=1
        ) as loader,
    ):
        list(loader)
        world().barrier()
        steps, longest = [], 0.0
        began = time.monotonic()
        for number, _ in enumerate(loader):
            longest = max(longest, time.monotonic() - began)
            steps.append(loader.last_samples.tolist())
            if rank == 1 and number == 2:
                Path(scratch, "pid").write_text(str(os.getpid()), encoding="ascii")
                os.kill(os.getpid(), signal.SIGSTOP)
            began = time.monotonic()
        stats = loader.stats()
        if rank == 0:
            Path(scratch, "done").touch()
        print(
            json.dumps({"rank": rank, "steps": steps, "longest_s": longest, "late": stats["late"]}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
