"""Ranks of the benchmarks: programs under mpirun that take a task as JSON, their only argument. The
last line that rank 0 prints is its answer, as JSON."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from dlio.errors import UsageError

if TYPE_CHECKING:
    from dlio.comm import Communicator

FABRICS: Final[dict[str, dict[str, str]]] = {
    "memory": {},
    "tcp": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    },
}
"""Variables that make Open MPI send messages over each fabric."""
LINK: Final = "link"
"""A fabric of its own: TCP over a loopback that carries LINK_RATE, both ways together."""
LINK_RATE: Final = 2e9 / 8
"""Bytes/s: of two ranks that send to each other at once, 1 Gbit/s each way."""
TIMEOUT_S: Final = 600.0


def run(
    module: str,
    task: Mapping[str, object],
    ranks: int,
    fabric: str = "memory",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, object]:
    """Run `python -m module TASK` on `ranks` ranks and return the answer of rank 0.

    Args:
        fabric: one of FABRICS, or LINK.

    Raises UsageError when the ranks fail, exceed `timeout_s`, or a link cannot be set up.
    """
    from dlio.launch.mpi_launch import launch

    full = {
        "OMP_NUM_THREADS": "1",
        **FABRICS["tcp" if fabric == LINK else fabric],
        **(environment or {}),
    }
    try:
        done = launch(
            [sys.executable, "-m", module, json.dumps(task)],
            ranks,
            environment=full,
            capture=True,
            timeout_s=timeout_s,
            wrap=_over_link if fabric == LINK else None,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"the ranks of {module} took more than {timeout_s:.0f} s: ask for less, or wait until "
            "the machine is quiet"
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UsageError(f"the ranks of {module} failed: {done.stderr.strip()[-800:]}")
    results: dict[str, object] = json.loads(lines[-1])
    return results


def answer(work: Callable[..., Mapping[str, object]]) -> None:
    """Call `work` with the task that `run` gave to this rank and its communicator; rank 0 prints
    the results."""
    from dlio.comm import world

    comm = world()
    results = work(json.loads(sys.argv[1]), comm)
    if comm.rank == 0:
        print(json.dumps(results), flush=True)


def pass_s(loader: Iterable[object], comm: "Communicator") -> float:
    """Seconds of a pass, until all ranks have ended it."""
    comm.barrier()
    began = time.perf_counter()
    for _ in loader:
        pass
    comm.barrier()
    return time.perf_counter() - began


def why_no_link() -> str | None:
    """Return the reason that a link cannot be set up here; None if it can."""
    if not shutil.which("unshare") or not shutil.which("ip") or not shutil.which("tc"):
        return "a link wants unshare, ip and tc (Debian: util-linux, iproute2)"
    done = subprocess.run(_over_link(["true"]), capture_output=True, text=True, check=False)
    return f"a link wants root: {done.stderr.strip()}" if done.returncode else None


def _over_link(argv: list[str]) -> list[str]:
    """Return a command that runs `argv` in a network namespace of its own, whose loopback carries
    LINK_RATE. The namespace ends with the command."""
    shape = f"tbf rate {int(LINK_RATE * 8)}bit burst 256kb latency 50ms"
    script = (
        f"ip link set lo up && tc qdisc add dev lo root {shape} && "
        f"exec {' '.join(shlex.quote(word) for word in argv)}"
    )
    return ["unshare", "--net", "sh", "-c", script]
