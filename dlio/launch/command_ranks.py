"""Implement `-n`: start the ranks of a command, or run as one of them.

The launcher passes the command's records of options to the ranks as JSON in an environment
variable. Only this user's processes can read it, and it leaves no file behind.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Final, TypeAlias

from dlio.errors import UsageError
from dlio.util.child_processes import module_command
from dlio.util.extras import how_to_install
from dlio.util.limits import OPEN_FILES, lacks_files
from dlio.util.live_line import LiveLine
from dlio.util.options import as_mapping, from_mapping
from dlio.util.settings import RECORD, settings
from dlio.util.signals import ending_at_once, passing_on
from dlio.util.units import counted

_LARGEST: Final = 96 << 10
"""Maximum size of the records in bytes: Linux limits a variable to 128 KiB."""
_RANK_MAIN: Final = "dlio.cli.rank_main"
_Starter: TypeAlias = Callable[[str, Sequence[str], int, Mapping[str, str], LiveLine], int]


def on_ranks(
    ranks: int | None,
    function: Callable[..., object],
    *records: object,
    check: Callable[[], object] = lambda: None,
    min_ranks: int | None = None,
    spares: int = 0,
    backend: str = "auto",
    start: _Starter | None = None,
    live: bool = False,
    may_end: bool = False,
) -> bool:
    """Call `function(*records)` on every rank; start the ranks if -n was given.

    Args:
        ranks: number of ranks to start on this machine, from -n; None to start none.
        function: a module-level function of records of options. Ranks import it by name.
        check: called before ranks are started, to find mistakes early.
        min_ranks: fewest ranks that continue when others are lost; None to end with any rank.
        spares: number of ranks beyond `ranks` that wait to take the place of others.
        backend: `mpi`, `torch`, or `auto` for MPI if it is installed.
        start: runs (module, its arguments, ranks, their variables, live line) in place of the
            launcher for this machine, and returns the exit code.
        live: the ranks tell of their progress, which is drawn if standard output is a terminal.
        may_end: the ranks end by themselves at SIGUSR1: the launcher passes SIGTERM and SIGUSR1 on.

    Returns True if this process is the launcher, False if it is a rank.

    Raises UsageError if mpirun started another number of ranks; SystemExit with the exit code of
    the ranks if they failed.
    """
    from dlio.comm.launch_detection import check_launch
    from dlio.comm.launch_environment import under_mpi, under_torch

    alone = not under_torch() and (backend == "torch" or not under_mpi())
    if alone and ranks is not None and (ranks + spares > 1 or start is not None):
        check_launch(1)
        with ExitStack() as stack:
            stack.enter_context(passing_on(may_end))
            line = stack.enter_context(LiveLine("checking the data", shown=live))
            check()
            module = function.__module__.rpartition(".")[2]
            text = _task(function, records, may_end, ranks + spares if start is None else 1)
            code = _launch(module, text, ranks, min_ranks, spares, backend, start, line)
        if code:
            raise SystemExit(code)
        return True

    from dlio.comm import world

    if ranks is not None and ranks + spares != world().size:
        raise UsageError(
            f"-n {ranks}, but a launcher has started {counted(world().size, 'rank')}: use either "
            "-n, or "
            "mpirun, srun or torchrun"
        )
    with ending_at_once(may_end):
        function(*records)
    return False


def captured_ranks(
    ranks: int,
    function: Callable[..., object],
    *records: object,
    backend: str = "auto",
    environment: Mapping[str, str],
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Call `function(*records)` on every rank, and return the exit code and the output.

    Arguments are those of `on_ranks`; `environment` has variables of the ranks' own. Raises
    subprocess.TimeoutExpired after `timeout_s`.
    """
    from dlio.launch import mpi_launch, torch_launch

    text = _task(function, records, ranks=ranks)
    _check_length(text)
    command = module_command(_RANK_MAIN, function.__module__.rpartition(".")[2])
    by_mpi = backend == "mpi" or (backend == "auto" and has_mpi())
    launch = mpi_launch.launch if by_mpi else torch_launch.launch
    full = {**environment, RECORD: text}
    return launch(command, ranks, environment=full, capture=True, timeout_s=timeout_s)


def _task(
    function: Callable[..., object],
    records: Sequence[object],
    may_end: bool = False,
    ranks: int = 1,
) -> str:
    """Return the call of a function as JSON, for `run_as_rank` of so many ranks."""
    task = {
        "ranks": ranks,
        "may_end": may_end,
        "function": f"{function.__module__}:{function.__qualname__}",
        "command": sys.argv,
        "records": [
            [f"{type(each).__module__}:{type(each).__qualname__}", as_mapping(each)]
            for each in records
        ],
    }
    return json.dumps(task)


def _check_length(task: str) -> None:
    if len(task.encode()) > _LARGEST:
        raise UsageError(
            f"the options are {len(task):,} characters long, {_LARGEST:,} at most: use shorter "
            "paths or fewer repeated options"
        )


def _launch(
    name: str,
    task: str,
    ranks: int,
    min_ranks: int | None,
    spares: int,
    backend: str,
    start: _Starter | None,
    live: LiveLine,
) -> int:
    from dlio.launch import mpi_launch, torch_launch

    _check_length(task)
    module, more = _RANK_MAIN, {RECORD: task}
    if sys.stdout.isatty():
        live.say("waiting for the first batch")
        live.write(sys.stdout, [f"starting {counted(ranks, 'rank')}\n"])
    if start is not None:
        if settings().logs is not None:
            raise UsageError(
                "--logs does not go with --nodes and --fault-tolerance restart: redirect the "
                "command's output"
            )
        return start(module, [name], ranks, more, live)
    command = module_command(module, name)
    if backend == "mpi" or (backend == "auto" and has_mpi()):
        return mpi_launch.launch(
            command, ranks, environment=more, min_ranks=min_ranks, spares=spares, live=live
        ).returncode
    if spares:
        raise UsageError(
            f"--spares needs MPI: {how_to_install('mpi')}, and leave --backend torch out"
        )
    if backend == "auto":
        said = "dlio: no MPI is installed: ranks exchange over torch.distributed\n"
        live.write(sys.stderr, [said])
    return torch_launch.launch(
        command, ranks, environment=more, min_ranks=min_ranks, live=live
    ).returncode


def has_mpi() -> bool:
    """True if this Python can start and be a rank of MPI."""
    from dlio.launch.mpi_launch import find_mpirun

    try:
        find_mpirun()
    except UsageError:
        return False
    return importlib.util.find_spec("mpi4py") is not None


def run_as_rank() -> None:
    """Call the function that `on_ranks` passed to this rank."""
    from dlio.comm.launch_environment import under_mpi, under_torch

    text = os.environ.pop(RECORD, None)
    if text is None:
        raise UsageError(f"{sys.argv[0]} is for dlio's internal use: start `dlio train -n 4`")
    task = json.loads(text)
    # Else each rank would do all of the work; of those that MPI does not find, `world` tells.
    if task["ranks"] > 1 and not (under_mpi() or under_torch()):
        raise UsageError(
            f"{counted(task['ranks'], 'rank')} were to start, but this process has no variables of "
            "a launcher, so that each rank would do all of the work: run `dlio doctor`, or take "
            "--backend torch"
        )
    sys.argv[:] = task["command"]  # Reports name the command that the user gave.
    records = [from_mapping(resolve_name(name), values) for name, values in task["records"]]
    try:
        with ending_at_once(task["may_end"]):
            resolve_name(task["function"])(*records)
    except (OSError, RuntimeError) as error:
        if lacks_files(error):
            raise UsageError(f"{error}: {OPEN_FILES}") from error
        raise
