"""`dlio doctor`: check the machine, or the nodes of a job."""

import json
import os
from typing import Final

from dlio.cli.doctor.examination import DoctorOptions
from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.errors import CommError, UsageError
from dlio.launch.command_ranks import on_ranks

_RANK_VARIABLES: Final = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


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
    from dlio.cli.doctor.examination_text import show
    from dlio.cli.doctor.rank_checks import lost_ranks
    from dlio.comm import Communicator, world
    from dlio.comm.single import SingleCommunicator
    from dlio.launch.mpi_launch import find_mpirun
    from dlio.util.whole_files import write_whole

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
        text = json.dumps(examination)
        if output.report is not None:
            write_whole(output.report, lambda file: file.write(f"{text}\n".encode()))
        if output.as_json:
            print(text)
        else:
            show(examination)
        if examination["worst"] == "error":
            raise UsageError("the doctor has found errors: their remedies are in its list")
