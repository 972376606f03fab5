"""`dlio doctor`: check the machine, or the nodes of a job."""

import os
from typing import Final

from dlio.cli.doctor.examination import DoctorOptions, Examination
from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.comm.launch_environment import shows_terminal
from dlio.errors import CommError, UsageError, printable
from dlio.launch.command_ranks import on_ranks
from dlio.util.units import counted

_RANK_VARIABLES: Final = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
_STYLES: Final = {"ok": "green", "warning": "yellow", "error": "bold red"}
_MOST_NODES: Final = 4


@with_help(
    "dlio doctor",
    "dlio doctor /data/train --tiers ram:8GiB,/local/scratch:200GiB",
    "srun --nodes 4 --ntasks-per-node 4 dlio doctor --device cuda",
)
def command(options: DoctorOptions, ranks: RankOptions, output: OutputOptions) -> None:
    """Check this machine, or all nodes of a job, before a training does.

    Python, torch, MPI and launchers; whether ranks find each other, their cores and GPUs; limits,
    memory and shared memory; tiers, the data set and clocks. Each line is ok, a warning or an
    error, with its remedy. The exit code is 2 if there is an error.
    """
    output.check_writable()
    on_ranks(ranks.ranks, run_rank, options, output, backend=ranks.backend)


def run_rank(options: DoctorOptions, output: OutputOptions) -> None:
    """Take part as this rank; the first one prints."""
    from dlio.cli.doctor.examination import examine
    from dlio.cli.doctor.rank_checks import lost_ranks
    from dlio.comm import Communicator, world
    from dlio.comm.single import SingleCommunicator
    from dlio.launch.mpi_launch import find_mpirun

    lost = []
    try:
        comm: Communicator = world()
        speaks = comm.rank == 0
    except (UsageError, CommError) as problem:
        comm, lost = SingleCommunicator(), [lost_ranks(str(problem))]
        # Copies that do not find each other: one of them speaks for all.
        speaks = all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)
    try:
        mpirun = find_mpirun()
    except UsageError:
        mpirun = None
    examination = examine(options, comm, lost, mpirun)
    if speaks:
        output.write(examination)
        if not output.as_json:
            show(examination)
        if examination["worst"] == "error":
            raise UsageError("the doctor has found errors: their remedies are in its list")


def show(examination: Examination) -> None:
    """Print one line for each finding, remedies below them, and a last line that sums up."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=shows_terminal())
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for each in examination["findings"]:
        text = Text(printable(each["text"]))
        if each["where"]:
            text.append(f"\non {_nodes(each['where'])}")
        if each["remedy"]:
            text.append(f"\n-> {printable(each['remedy'])}", style="bold")
        table.add_row(
            Text(each["state"], style=_STYLES[each["state"]]), printable(each["subject"]), text
        )
    console.print(table)
    counts = [
        f"{count} {state}{'s' if count > 1 else ''}"
        for state in ("error", "warning")
        if (count := sum(each["state"] == state for each in examination["findings"]))
    ]
    nodes, ranks = len(examination["nodes"]), examination["ranks"]
    print(
        f"{counted(nodes, 'node')}, {counted(ranks, 'rank')}: {', '.join(counts) or 'all is well'}"
    )


def _nodes(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NODES])
    return f"{shown} and {len(names) - _MOST_NODES} more" if len(names) > _MOST_NODES else shown
