"""Being a rank, or starting them: what `-n` means to a command."""

from collections.abc import Callable, Sequence

import typer

from dlio.errors import UsageError


def started(ranks: int | None, command: Callable[[], Sequence[str]]) -> bool:
    """Start `-n` ranks on this machine, where nobody has; whether that was done, and is over.

    Args:
        ranks: as the option gave them.
        command: gives the arguments of `dlio` that each rank is to run; checks first what it can.

    Raises UsageError where mpirun started another number of ranks; typer.Exit with the ranks' exit
    code when they failed.
    """
    from dlio.cli.launch import run_ranks
    from dlio.comm.environment import under_mpi

    if not under_mpi() and ranks is not None and ranks > 1:
        code = run_ranks(ranks, list(command()))
        if code:
            raise typer.Exit(code)
        return True

    from dlio.comm import world

    if ranks is not None and ranks != world().size:
        raise UsageError(
            f"-n {ranks} under an mpirun that started {world().size}: leave -n out, or mpirun"
        )
    return False
