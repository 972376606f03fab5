"""Interpreters that have imported torch, for tests that start processes.

Importing torch takes 1.5 s of a core, and most tests with ranks start three or four processes
that do. `WarmPython` starts two servers (`server.py`) once per test session and puts a stand-in
(`client.py`) in the place of `sys.executable`; so everything that a test or dlio itself starts as
`[sys.executable, ...]`, ranks of `mpirun` included, is a fork of a server: a process of its own,
with its own MPI, which starts in 20 ms. `DLIO_TEST_COLD=1` in the environment of a process gives
it the real interpreter.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from dlio.image.native import build as native_build

_HERE = Path(__file__).resolve().parent
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class WarmPython:
    """The stand-in and its servers. `close` ends all.

    Two servers, because hash randomisation is drawn at the start of an interpreter: ranks that
    agree only because their sets are ordered alike must not pass a test.
    """

    SERVERS = 2

    def __init__(self) -> None:
        """Make the stand-in. Until `start`, it runs the real interpreter."""
        self.real = sys.executable
        self._folder = tempfile.mkdtemp(prefix="dlio-warm-")
        self.executable = os.path.join(self._folder, "python")
        source = (_HERE / "client.py").read_text(encoding="utf-8")
        Path(self.executable).write_text(f"#!{self.real} -IS\n{source}", encoding="utf-8")
        os.chmod(self.executable, 0o700)
        # For shells that have the folder on their path.
        command = Path(self._folder, "dlio")
        command.write_text(f'#!/bin/sh\nexec {self.executable} -P -m dlio.cli "$@"\n', "utf-8")
        command.chmod(0o700)
        mpirun = Path(self.real).with_name("mpirun")
        if mpirun.exists():
            os.symlink(mpirun, os.path.join(self._folder, "mpirun"))
        self._nap = _build_nap(self._folder)
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the servers, which answer when they have imported torch."""
        # Coverage is measured in their children, from the start of each.
        environment = {
            **{name: value for name, value in os.environ.items() if "COVERAGE" not in name},
            "OPENBLAS_NUM_THREADS": "1",
            **({} if self._nap is None else {"LD_PRELOAD": self._nap}),
        }
        while len(self._servers) < self.SERVERS:
            path = os.path.join(self._folder, f"{len(self._servers)}.socket")
            self._servers.append(
                subprocess.Popen(
                    [self.real, str(_HERE / "server.py"), path],
                    stdin=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
            )

    def wait(self) -> None:
        """Wait until all servers answer, or have failed."""
        end = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end and any(server.poll() is None for server in self._servers):
            if len(list(Path(self._folder).glob("*.socket"))) == len(self._servers):
                return
            time.sleep(0.02)

    def refused(self) -> Counter[str]:
        """Return how many commands the servers refused, by reason."""
        files = Path(self._folder).glob("*.refused")
        return Counter(line for file in files for line in file.read_text().splitlines())

    def close(self) -> None:
        """End the servers and their programs, and remove the stand-in."""
        for server in self._servers:
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers:
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _build_nap(folder: str) -> str | None:
    """Build the library in which waiting ranks sleep; None where that fails: they then spin."""
    compiler = native_build.compiler()
    if compiler is None:
        return None
    library = os.path.join(folder, "nap.so")
    flags = ["-O2", "-shared", "-fPIC", "-o", library, str(_HERE / "nap.c")]
    built = subprocess.run([*compiler, *flags], check=False, timeout=60)
    return None if built.returncode else library
