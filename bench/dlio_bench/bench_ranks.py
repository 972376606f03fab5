"""Ranks of the benchmarks: functions that every rank of a job calls with the same arguments.

    python -m dlio_bench.bench_ranks MODULE:FUNCTION JSON

calls a function with the communicator of all ranks and the arguments in JSON. The last line that
rank 0 prints is its result, as JSON.
"""

import json
import pkgutil
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dlio.errors import UsageError

if TYPE_CHECKING:
    from dlio.comm import Communicator

TaskValue = Any
"""A value in the task or the result of ranks, as JSON has it; its users know its type."""
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


@dataclass(frozen=True, slots=True)
class WarmRanks:
    """Where ranks are forked, for `run`; see `dlio_bench.warm_ranks`."""

    python: list[str]
    """The command that has a rank forked; a module's name and its arguments follow."""
    network: str | None
    """File of the namespace with the network of the ranks; None for this process's."""

    def beside(self, argv: list[str]) -> list[str]:
        """Return a command that runs `argv` in the network of the ranks."""
        return argv if self.network is None else ["nsenter", f"--net={self.network}", *argv]


def rank_argv(
    function: Callable[..., object],
    task: Mapping[str, object],
    python: Sequence[str] = (sys.executable, "-m"),
) -> list[str]:
    """Return the command of a rank that calls a module's function with the communicator, and the
    task as keywords. The function's result and the task have a form in JSON. `python` runs the
    module that follows it; see also `warm_ranks`."""
    name = f"{function.__module__}:{function.__qualname__}"
    return [*python, "dlio_bench.bench_ranks", name, json.dumps(task)]


def run(
    function: Callable[..., object],
    task: Mapping[str, object],
    ranks: int,
    fabric: str = "memory",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    warm: WarmRanks | None = None,
) -> dict[str, TaskValue]:
    """Have `ranks` ranks, of one thread each, call a function as `rank_argv` has it, over one of
    FABRICS or LINK; return the result of rank 0. The ranks are new processes, or forks of `warm`,
    which is for this fabric.

    Raises UsageError when the ranks fail, exceed `timeout_s`, or a link cannot be set up.
    """
    from dlio.launch.mpi_launch import launch

    name = function.__module__
    argv = rank_argv(function, task, *([] if warm is None else [warm.python]))
    wrap = over_link if fabric == LINK else None
    full = {
        "OMP_NUM_THREADS": "1",
        **FABRICS["tcp" if fabric == LINK else fabric],
        **(environment or {}),
    }
    try:
        done = launch(
            argv,
            ranks,
            environment=full,
            capture=True,
            timeout_s=timeout_s,
            wrap=wrap if warm is None else warm.beside,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"the ranks of {name} took more than {timeout_s:.0f} s: ask for less, or wait until "
            "the machine is quiet"
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise UsageError(f"the ranks of {name} failed: {done.stderr.strip()[-800:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def start_process_group(backend: str, comm: "Communicator") -> None:
    """Start torch's process group of all ranks of this machine. Collective."""
    import torch.distributed as dist

    port = 0
    if comm.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    place = f"tcp://127.0.0.1:{comm.tell(port)}"
    dist.init_process_group(backend, place, rank=comm.rank, world_size=comm.size)


def timed(work: Callable[[], object], times: int, comm: "Communicator") -> float:
    """Seconds of each of some calls, of all ranks together. Collective."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(times):
        work()
    comm.barrier()
    return (time.perf_counter() - began) / times


def pass_s(loader: Iterable[object], comm: "Communicator") -> float:
    """Seconds of a pass, until all ranks have ended it."""
    return timed(lambda: deque(loader, 0), 1, comm)


def why_no_link() -> str | None:
    """Return the reason that a link cannot be set up here; None if it can."""
    if not shutil.which("unshare") or not shutil.which("ip") or not shutil.which("tc"):
        return "a link wants unshare, ip and tc (Debian: util-linux, iproute2)"
    done = subprocess.run(over_link(["true"]), capture_output=True, text=True, check=False)
    return f"a link wants root: {done.stderr.strip()}" if done.returncode else None


def over_link(argv: list[str]) -> list[str]:
    """Return a command that runs `argv` in a network namespace of its own, whose loopback carries
    LINK_RATE. The namespace ends with the command."""
    shape = f"tbf rate {int(LINK_RATE * 8)}bit burst 256kb latency 50ms"
    script = (
        f"ip link set lo up && tc qdisc add dev lo root {shape} && "
        f"exec {' '.join(shlex.quote(word) for word in argv)}"
    )
    return ["unshare", "--net", "sh", "-c", script]


def call(function: str, text: str) -> None:
    """Call a function as one of the ranks, and print the result on rank 0.

    Ranks are those of mpirun, or, with the environment that torchrun sets, of torch.distributed.
    """
    import torch

    from dlio.comm import world
    from dlio.comm.launch_detection import torchrun_place

    torch.set_num_threads(1)
    if torchrun_place() is not None:
        torch.distributed.init_process_group("gloo")
    comm = world()
    result = pkgutil.resolve_name(function)(comm, **json.loads(text))
    if comm.rank == 0:
        print(json.dumps(result), flush=True)
    if torchrun_place() is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    call(*sys.argv[1:])
