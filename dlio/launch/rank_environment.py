"""Environment that launchers give to ranks.

Variables by which ranks find each other are those of each launcher: of mpirun, torch or Slurm.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping

from dlio.util.cores import available_cores
from dlio.util.live_line import LiveLine
from dlio.util.settings import PROGRESS, SECRET, STORE, TERMINAL


def rank_environment(
    per_node: int,
    live: LiveLine | None = None,
    given: Mapping[str, str] = os.environ,
    cores: int | None = None,
    terminal: bool = True,
) -> dict[str, str]:
    """Return the environment of ranks, before a launcher's own variables, from the one `given`.

    The ranks of a node share its cores, those of this process for None. On a `terminal` each writes
    to this process's as if it were alone, and `live` draws the progress that they report.
    """
    # A rank's output is a pipe, in which Python would hold back lines until 8 KiB have come.
    full = {**given, "PYTHONUNBUFFERED": "1"}
    # torch would start a thread per core in each rank, and each operation waits for all of them:
    # next to busy cores, an epoch of a small MLP took 18 to 22 s with two threads, 1.4 s with one.
    threads = max(1, (cores or available_cores()) // per_node)
    full.setdefault("OMP_NUM_THREADS", str(threads))
    # Sets of texts, from which scripts number words and classes, have one order on all ranks.
    full.setdefault("PYTHONHASHSEED", "0")
    if terminal and sys.stdout.isatty():
        size = shutil.get_terminal_size()
        full |= {TERMINAL: "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}
    if live is not None and live.shown:
        full |= {PROGRESS: "1", TERMINAL: "1"}
    return full


def root_permission() -> dict[str, str]:
    """Return the variables with which Open MPI's mpirun lets root start ranks, as in containers."""
    if os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def meeting_variables(ranks: int, store: str, host: str, port: int) -> dict[str, str]:
    """Return the variables by which the ranks of one node meet, in a store's folder and at a
    port."""
    return {
        STORE: store,
        # The environment of a process is for its own user's eyes only.
        SECRET: secrets.token_hex(32),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
    }
