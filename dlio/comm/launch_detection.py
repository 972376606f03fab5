"""The processes that a launcher started together, by its variables in the environment.

A process that a launcher started among others, but that finds none of them, would do the whole work
by itself, and its copies would overwrite each other's files. `check_launch` refuses that.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
from dlio.util.settings import LAUNCHER, settings
from dlio.util.units import counted

_MPI_SIZES: Final = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
)
_MPI_RANKS: Final = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
)
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MAKES_DISTRIBUTED: Final = (
    *_MPI_SIZES,
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"),
)
"""Variables by which scripts and frameworks find that they are one of several ranks."""
_LARGEST_STEP: Final = 0xFFFFFFF0
"""Numbers of Slurm from here on stand for batch scripts and interactive shells, not for steps."""
_FIRST_PORT: Final = 20000
_PORTS: Final = 12000
_ALONE: Final = "for separate runs on purpose set DLIO_ALONE=1"


@dataclass(frozen=True, slots=True)
class _LaunchedProcesses:
    """Processes that one launcher started together."""

    launcher: str
    count: int
    variable: str
    """The variable that says so, with its value."""
    remedy: str


_hidden: dict[str, str] = {}


@contextmanager
def hidden_launch() -> Iterator[None]:
    """Hide from scripts, and from programs that they start, within a `with` statement that this
    process is one of several ranks. The functions here go on to see it."""
    _hidden.update({name: os.environ[name] for name in _MAKES_DISTRIBUTED if name in os.environ})
    try:
        for name in _hidden:
            del os.environ[name]
        yield
    finally:
        show_launch()


def show_launch() -> None:
    """End what `hidden_launch` has begun."""
    for name, value in _hidden.items():
        os.environ.setdefault(name, value)
    _hidden.clear()


def launch_variable(name: str) -> str | None:
    """Return a variable of the environment, also if it is hidden; None if it is not set."""
    return os.environ.get(name, _hidden.get(name))


def under_torchrun() -> bool:
    """True if torchrun itself started this process, whatever started torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and torchrun_place() is not None


def torchrun_place() -> tuple[int, int] | None:
    """Return (rank, ranks) if torchrun's variables are set, of two or more ranks; else None.

    Raises UsageError if some of them are missing or invalid.
    """
    if whole_number("WORLD_SIZE") < 2 or launch_variable("RANK") is None:
        return None
    rank, size = whole_number("RANK"), whole_number("WORLD_SIZE")
    missing = [name for name in _TORCHRUN if not launch_variable(name)]
    if missing or not 0 <= rank < size:
        wrong = f"{' and '.join(missing)} not set" if missing else f"RANK={rank}"
        raise UsageError(
            f"WORLD_SIZE={size}, but {wrong}: start the ranks with torchrun, or unset RANK and "
            "WORLD_SIZE for a single process"
        )
    return rank, size


def check_launch(ranks: int) -> None:
    """Raise UsageError if a launcher started more processes than the ranks that found each other,
    by MPI or torch.distributed; 1 where there is neither.

    One process on purpose is not refused: a batch script, or a shell in an allocation, where no
    launcher has started tasks.
    """
    if settings().alone:
        return
    for started in _started():
        if started.count > ranks:
            others = "none of the others" if ranks == 1 else f"only {ranks} of them"
            raise UsageError(
                f"{started.launcher} started {counted(started.count, 'process')} "
                f"({started.variable}), but this one finds {others}, so that each would do all of "
                f"the work: {started.remedy}; {_ALONE}"
            )


def _started() -> list[_LaunchedProcesses]:
    """Return what the launchers around this process started, the innermost first."""
    launchers = []
    # A launcher may run inside another one, such as torchrun in a task of srun: the innermost
    # counts.
    if (place := torchrun_place()) is not None:
        size = place[1]
        remedy = "leave -n out, or start it without torchrun"
        launchers.append(_LaunchedProcesses("torchrun", size, f"WORLD_SIZE={size}", remedy))
    mpi = _of_mpi()
    if mpi is not None:
        # Open MPI's daemons may be tasks of srun: their number says nothing of the ranks.
        return [*launchers, mpi]
    srun = None if LAUNCHER in os.environ else _of_srun()
    return launchers if srun is None else [*launchers, srun]


def _of_mpi() -> _LaunchedProcesses | None:
    name = next((name for name in _MPI_SIZES if whole_number(name) > 0), None)
    count = 0 if name is None else whole_number(name)
    rank = next((rank for rank in _MPI_RANKS if whole_number(rank) >= max(1, count)), None)
    if rank is not None:
        name, count = rank, whole_number(rank) + 1
    if name is None:
        return None
    remedy = f"start them with the mpirun (-n {count}) of the MPI library that mpi4py loads"
    return _LaunchedProcesses("an MPI launcher", count, f"{name}={whole_number(name)}", remedy)


def _of_srun() -> _LaunchedProcesses | None:
    """Return the tasks of the Slurm step that this process is one of; None outside steps.

    In a batch script and in a shell of salloc, SLURM_NTASKS counts tasks that nobody has started.
    """
    rank, step = whole_number("SLURM_PROCID"), slurm_step()
    if rank < 0 or (step is None and not rank):
        return None
    if "SLURM_PTY_PORT" in os.environ and not rank:
        return None  # A shell of `srun --pty`.
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID")
    name = next(name for name in names if whole_number(name) >= max(1, rank) or name == names[-1])
    count = max(whole_number(name), rank + 1)
    remedy = (
        f"start them with srun --mpi=pmix, srun dlio launch, mpirun -n {count}, or "
        f"dlio train -n {count}"
    )
    return _LaunchedProcesses("srun", count, f"{name}={whole_number(name)}", remedy)


def meeting_port(number: int) -> int:
    """Return a port for the meeting of ranks, for any number of a job or one drawn by chance.

    It is below the ports that systems give to clients.
    """
    # Asking for a free port would not help: rank 0 listens on another node, and later.
    return _FIRST_PORT + number % _PORTS


def slurm_step(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of the Slurm step that this process belongs to, None outside steps."""
    numbers = [whole_number(name, environment) for name in ("SLURM_STEP_ID", "SLURM_STEPID")]
    return next((number for number in numbers if 0 <= number < _LARGEST_STEP), None)


def whole_number(name: str, environment: Mapping[str, str] | None = None) -> int:
    """Return a variable's whole number, -1 if it is not set or is not one; of this process's
    environment, with what is hidden, by default."""
    text = (launch_variable(name) if environment is None else environment.get(name)) or ""
    return int(text) if text.isascii() and text.isdigit() else -1
