"""A task of srun as a rank: `srun dlio launch COMMAND` and the ranks that `dlio launch` starts so.

Without a plug-in of Slurm's for the MPI in use, tasks do not find each other. Slurm tells each one
its place; torch.distributed and dlio read that from torch's variables, as torchrun sets them.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dlio.comm.allocation import expand_counts, expand_hosts
from dlio.comm.launch_detection import meeting_port, slurm_step, whole_number
from dlio.comm.launch_environment import under_mpi
from dlio.errors import UsageError
from dlio.util.units import counted


def is_task(environment: Mapping[str, str] = os.environ) -> bool:
    """True if srun started this process among others."""
    if slurm_step(environment) is None or "SLURM_PTY_PORT" in environment:
        return False
    return whole_number("SLURM_PROCID", environment) >= 0 and _tasks(environment) > 1


def task_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a task of srun's. Those of the meeting stay if they are set.

    Raises UsageError if Slurm's variables do not tell the task's place.
    """
    node = whole_number("SLURM_NODEID", environment)
    try:
        per_node = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
        local_size = per_node[node]
    except (KeyError, IndexError):
        raise UsageError(
            "srun's variables SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST and SLURM_NODEID do "
            "not tell this task's place: start the ranks by `dlio launch` in the job's script"
        ) from None
    job, step = whole_number("SLURM_JOB_ID", environment), slurm_step(environment) or 0
    port = meeting_port(max(job, 0) * 31 + step)
    return {
        "MASTER_ADDR": environment.get("MASTER_ADDR") or hosts[0],
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(_tasks(environment)),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
    }


def become_rank(argv: Sequence[str], ranks: int | None, backend: str) -> NoReturn:
    """Replace this task by a program that finds the other tasks: by MPI (`mpi`), by torch's
    variables (`torch`), or by MPI where srun has set it up (`auto`).

    Raises UsageError if there are other tasks than `ranks`, or none of the ways works.
    """
    tasks = _tasks(os.environ)
    if ranks not in (None, tasks):
        raise UsageError(
            f"-n {ranks}, but srun has started {counted(tasks, 'task')}: leave out either -n or "
            "srun"
        )
    more: dict[str, str] = {}
    if backend == "torch" or not under_mpi():
        if backend == "mpi":
            raise UsageError(
                "--backend mpi: srun has set up no MPI for its tasks: use srun --mpi=pmix, or run "
                "`dlio launch` in the job's script without srun, which starts mpirun"
            )
        if importlib.util.find_spec("torch") is None:
            raise UsageError(
                "torch is not installed, and srun has set up no MPI for its tasks: use srun "
                "--mpi=pmix, or run `dlio launch` in the job's script without srun"
            )
        more = task_variables(os.environ)
    try:
        os.execvpe(argv[0], list(argv), {**os.environ, **more})  # noqa: S606 - the user's command
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error


def _tasks(environment: Mapping[str, str]) -> int:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    counts = [whole_number(name, environment) for name in names]
    return next((count for count in counts if count > 0), 1)
