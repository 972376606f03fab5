"""Pretended nodes: host names in UTS namespaces of this machine, and the ways to lose them."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dlio.util.shared_folders import own_memory
from dlio_bench.bench_processes import command_line
from dlio_bench.chaos.leftovers import kill

_FAKESSH: Final = Path(__file__).with_name("fakessh")


def may_pretend() -> bool:
    """True if this user may have UTS namespaces of its own."""
    try:
        done = subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def without_daemons(names: Iterable[str]) -> list[str]:
    """Return the names of temporary files without those of Open MPI's daemons, which stay if their
    node is lost, as on one that has lost its power."""
    return [name for name in names if not name.startswith("prted.")]


class PretendedNodes:
    """The pretended nodes of a job; a list of their namespaces is kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._list = folder / "namespaces"
        self._list.touch()
        self.environment = {"DLIO_RSH": f"bash {_FAKESSH}", "FAKESSH": str(self._list)}

    def processes(self, node: str) -> dict[int, str]:
        """Return the command line of each process on a node."""
        rows = [line.split() for line in self._list.read_text().splitlines()]
        spaces = {row[1] for row in rows if len(row) == 2 and row[0] == node}
        inside = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/uts") in spaces:
                    inside[int(name)] = command_line(int(name))
        return inside

    def lose(self, node: str) -> int:
        """Kill everything on a node, and take away its memory; returns the number of processes."""
        killed = self.processes(node)
        kill(killed)
        memory = Path(own_memory())
        for folder in memory.glob(f"*.{node}"):
            shutil.rmtree(folder, ignore_errors=True)
        return len(killed)

    def relay(self) -> None:
        """Have the words of later agents pass through processes of their own; see `cut`."""
        self.environment["FAKESSH_RELAY"] = str(self.folder / "relays")

    def cut(self, node: str) -> None:
        """Let nothing through between a node's agent and the launcher; both live on.

        Messages of MPI go on: they do not pass through these processes.
        """
        relays = self._relays(node)
        if not relays:
            raise RuntimeError(f"nothing of node {node} passes through relays, which could be cut")
        kill(relays, signal.SIGSTOP)

    def close(self) -> None:
        """End what passes words on."""
        kill(self._relays())

    def _relays(self, node: str | None = None) -> list[int]:
        path = self.folder / "relays"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [int(process) for name, process in rows if node in (None, name)]

    def kill(self, node: str, words: str) -> int:
        """Kill the processes of a node whose command line has some words; returns their number."""
        victims = [process for process, line in self.processes(node).items() if words in line]
        kill(victims)
        return len(victims)
