"""MPI as a new process sees it: `python -m dlio.cli.doctor.probe` prints one line of JSON.

A process of its own, because loading MPI initialises it, and a wrong library can end the process.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Final

from dlio.util.child_processes import module_command

_TIMEOUT_S: Final = 60.0
_OF_LAUNCHERS: Final = ("OMPI_", "PMI_", "PMIX_", "PMI", "SLURM_", "MPI_", "HYDRA_", "PALS_")


@dataclass(frozen=True, slots=True)
class MpiFacts:
    """The MPI library that mpi4py loads, as it describes itself."""

    library: str = ""
    """Name and version; empty if none could be loaded."""
    threads: str = ""
    """Thread level: `single`, `funneled`, `serialized` or `multiple`."""
    survives: bool = False
    """True if it has ULFM, so that ranks can survive the loss of others."""
    cuda_aware: bool = False
    size: int = 1
    """Ranks of its world."""
    paths: list[str] = field(default_factory=list)
    """Files of MPI libraries in the process."""
    problem: str = ""
    """Why none could be loaded."""


def probe_mpi() -> MpiFacts:
    """Return the facts of a process that no launcher started."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)
    }
    kept = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environment |= {name: os.environ[name] for name in kept if name in os.environ}
    try:
        # Without a launcher, Open MPI leaves its shared memory and its folder behind.
        with tempfile.TemporaryDirectory(prefix="dlio-mpi-", ignore_cleanup_errors=True) as folder:
            done = subprocess.run(
                module_command("dlio.cli.doctor.probe"),
                env=environment | {"TMPDIR": folder, "OMPI_MCA_btl_sm_backing_directory": folder},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return MpiFacts(problem=f"a process that loads MPI did not end: {error}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return MpiFacts(problem=last[0][:300])
    return MpiFacts(**json.loads(lines[-1]))


def this_process() -> MpiFacts:
    """Return the facts of this process; it initialises MPI."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        return MpiFacts(problem=str(problem).splitlines()[0][:300])
    from dlio.comm.devices import loaded_libraries, sums_device_memory

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    paths = sorted({os.path.realpath(str(each._name)) for each in loaded_libraries()})
    return MpiFacts(
        library=MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 "),
        threads=levels[MPI.Query_thread()],
        # MPI without ULFM does not know the errors of lost ranks.
        survives=getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_UNKNOWN) != MPI.ERR_UNKNOWN,
        cuda_aware=sums_device_memory(),
        size=MPI.COMM_WORLD.size,
        paths=paths,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(this_process())), flush=True)
