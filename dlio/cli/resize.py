"""`dlio join` and `dlio leave`: change the number of ranks of a job that runs."""

import os
import tempfile
from dataclasses import dataclass
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.util.options import Option, check

__all__ = ["Change", "begin_job", "join", "leave"]

_PREFIX: Final = "dlio-job-"


@dataclass(frozen=True, slots=True)
class Change:
    """A job, and by how many ranks it changes."""

    job: Annotated[
        str,
        Option(
            "Name of the job, as `dlio train --fault-tolerance shrink` prints it.",
            positional=True,
            metavar="JOB",
        ),
    ]
    ranks: Annotated[int, Option("Number of ranks.", short="-n", least=1)] = 1

    def __post_init__(self) -> None:
        check(self)


def join(change: Change) -> None:
    """Have spare ranks of a job train with the others, from the next batch on."""
    _ask(change.job, change.ranks)


def leave(change: Change) -> None:
    """Have the last ranks of a job end after their batch; the others go on."""
    _ask(change.job, -change.ranks)


def begin_job(folder: str, ranks: int, spares: int) -> str:
    """Note in a new job's folder how many ranks it has; returns the job's name."""
    from dlio.comm.standing import Wanted
    from dlio.comm.wanted import write_wanted

    write_wanted(folder, Wanted(0, ranks), ranks + spares)
    return os.path.basename(folder).removeprefix(_PREFIX)


def _ask(job: str, more: int) -> None:
    """Raises UsageError for an unknown job, or if it cannot have as many ranks."""
    from dlio.comm.standing import Wanted
    from dlio.comm.wanted import read_wanted, write_wanted

    folder = os.path.join(tempfile.gettempdir(), _PREFIX + os.path.basename(job))
    try:
        is_ours = os.lstat(folder).st_uid == os.geteuid()
    except OSError:
        is_ours = False
    read = read_wanted(folder) if is_ours else None
    if read is None:
        raise UsageError(
            f"{job}: not a job of yours that runs here; `dlio train --fault-tolerance "
            "shrink --spares 1` prints the job's name"
        )
    wanted, most = read
    ranks = wanted.ranks + more
    if not 1 <= ranks <= most:
        raise UsageError(
            f"{job} is asked to have {wanted.ranks} ranks of {most}, so {ranks} are not possible"
            + ("; start it with more --spares" if ranks > most else "")
        )
    write_wanted(folder, Wanted(wanted.request + 1, ranks), most)
    print(f"{job} is asked to have {ranks} ranks, after {wanted.ranks}")
