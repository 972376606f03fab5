"""Ranks of the benchmarks: programs started by mpirun, which take a task as JSON; rank 0 ends in
one line of JSON."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from dlio.errors import UsageError

FABRICS: Final[dict[str, dict[str, str]]] = {
    "memory": {},
    "tcp": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    },
}
"""What Open MPI is told, so that messages take this way."""
LINK: Final = "link"
"""A fabric of its own: TCP over a loopback that carries LINK_RATE, both ways together."""
LINK_RATE: Final = 2e9 / 8
"""Bytes/s: of two ranks that send to each other at once, 1 Gbit/s each way."""
TIMEOUT_S: Final = 600.0
_END_TIMEOUT_S: Final = 10.0
_STARTS: Final = 5


def run(
    module: str,
    task: Mapping[str, Any],
    ranks: int,
    fabric: str = "memory",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """What rank 0 of `python -m module TASK` says.

    Args:
        fabric: of FABRICS, or LINK.

    Raises UsageError when the ranks fail, outlast their deadline, or cannot have a link.
    """
    from dlio.cli.launch import find_mpirun

    full = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "^ofi",  # Looking for fabrics takes a second.
        "OMP_NUM_THREADS": "1",
        **FABRICS["tcp" if fabric == LINK else fabric],
        **(environment or {}),
    }
    argv = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    argv += [sys.executable, "-m", module, json.dumps(task)]
    if fabric == LINK:
        argv = _over_link(argv)
    for _ in range(_STARTS):
        code, said, errors = _ended(argv, full, module, timeout_s)
        # mpirun says so, before any rank runs, when an interface goes as it lists them.
        if "listener thread failed to start" not in errors:
            break
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if code or not lines:
        raise UsageError(f"the ranks of {module} failed: {errors.strip()[-800:]}")
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def _ended(
    argv: list[str], environment: Mapping[str, str], module: str, timeout_s: float
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ranks that have ended."""
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.terminate()  # mpirun ends its ranks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END_TIMEOUT_S)
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise UsageError(
                    f"the ranks of {module} took more than {timeout_s:.0f} s: ask for less, or "
                    "wait until the machine is quiet"
                ) from error
            raise
    return process.returncode, said, errors


def why_no_link() -> str | None:
    """What a link lacks here; None where it can be had."""
    if not shutil.which("unshare") or not shutil.which("ip") or not shutil.which("tc"):
        return "a link wants unshare, ip and tc (Debian: util-linux, iproute2)"
    done = subprocess.run(_over_link(["true"]), capture_output=True, text=True, check=False)
    return f"a link wants root: {done.stderr.strip()}" if done.returncode else None


def _over_link(argv: list[str]) -> list[str]:
    """A command in a network namespace of its own, whose loopback carries LINK_RATE; it ends with
    the command."""
    shape = f"tbf rate {int(LINK_RATE * 8)}bit burst 256kb latency 50ms"
    script = (
        f"ip link set lo up && tc qdisc add dev lo root {shape} && "
        f"exec {' '.join(shlex.quote(word) for word in argv)}"
    )
    return ["unshare", "--net", "sh", "-c", script]
