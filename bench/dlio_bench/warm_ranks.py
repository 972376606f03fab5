"""Ranks that are forked from a process which has imported torch.

Importing it takes 3 to 5 seconds of a core for each rank: on two cores, the ranks of a job of 16
begin after a minute, to count messages for a second.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from dlio.launch.job_folder import open_job_folder
from dlio.launch.node import shim
from dlio.launch.node.zygote_process import ZygoteProcess
from dlio.util.private_sockets import listen
from dlio.util.trusted_files import closing_descriptor
from dlio_bench.bench_ranks import LINK, WarmRanks, over_link

_MODULES: Final = ("torch", "torch._dynamo", "dlio.comm", "dlio.exchange.distribute")
"""torch's optimizers import the second one when they are made."""


@contextmanager
def warm_ranks(modules: Sequence[str], fabric: str = "memory") -> Iterator[WarmRanks]:
    """Import torch and modules once, for ranks of one thread each, which end with the block. Those
    over a LINK have it in common.

    Raises EOFError or OSError if the process that is forked does not start.
    """
    with (
        open_job_folder() as folder,
        closing_descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as inside,
        listen(inside, "zygote") as listener,
        closing(
            ZygoteProcess(
                [*_MODULES, *modules],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                listener,
                over_link if fabric == LINK else list,
            )
        ) as zygote,
    ):
        process = zygote.receive()["ready"]
        zygote.order({"start": 0, "environment": {}})
        python = [sys.executable, "-I", "-S", os.path.abspath(shim.__file__), folder, "0"]
        yield WarmRanks(python, f"/proc/{process}/ns/net" if fabric == LINK else None)
