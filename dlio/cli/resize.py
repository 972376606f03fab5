"""`dlio join` and `dlio leave`: change the number of ranks of a job that runs."""

import os
import tempfile
from dataclasses import dataclass
from typing import Annotated

from dlio.errors import UsageError
from dlio.launch.job_folder import PREFIX, is_job_folder
from dlio.launch.node_requests import read_request, request_nodes
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import counted


@dataclass(frozen=True, slots=True)
class ResizeOptions(CheckedOptions):
    """A job, and by how many ranks it changes."""

    job: Annotated[
        str,
        Option(
            "Name of the job, as `dlio train --fault-tolerance shrink` prints it.",
            positional=True,
            metavar="JOB",
        ),
    ]
    ranks: Annotated[
        int | None, Option("Number of ranks.", short="-n", least=1, default_text="1")
    ] = None
    nodes: Annotated[
        str | None,
        Option(
            "Nodes of a job that was started with --nodes: names with commas between them.",
            metavar="NAMES",
        ),
    ] = None


def join(change: ResizeOptions) -> None:
    """Add a job's spare ranks, or other nodes, from its next batch on."""
    _resize(change, joins=True)


def leave(change: ResizeOptions) -> None:
    """End a job's last ranks, or some nodes, after their batch.

    The others go on.
    """
    _resize(change, joins=False)


def _resize(change: ResizeOptions, joins: bool) -> None:
    """Raises UsageError for an unknown job, or if it cannot have as many ranks, or these nodes."""
    job, more = change.job, change.ranks or 1
    if change.nodes is not None:
        if change.ranks is not None:
            raise UsageError("-n does not go with --nodes: a node has as many ranks as the others")
        asked = request_nodes(_folder_of(job), job, change.nodes, joins)
        print(
            f"{change.nodes} {'join' if joins else 'leave'} {job} after the batch under way: "
            f"{', '.join(asked.nodes)} go on"
        )
        return
    from dlio.comm.survival.active_ranks import RankRequest
    from dlio.comm.survival.rank_requests import read_wanted, write_wanted

    folder = _folder_of(job)
    if read_request(folder) is not None:
        raise UsageError(f"{job} runs on several nodes: name those that join or leave by --nodes")
    read = read_wanted(folder)
    if read is None:
        raise _unknown(job)
    wanted, most = read
    ranks = wanted.ranks + (more if joins else -more)
    if not 1 <= ranks <= most:
        raise UsageError(
            f"{job} is asked to have {counted(wanted.ranks, 'rank')} of {most}, so {ranks} are "
            "not possible" + ("; start it with more --spares" if ranks > most else "")
        )
    write_wanted(folder, RankRequest(wanted.request + 1, ranks), most)
    print(f"{job} is asked to have {counted(ranks, 'rank')}, after {wanted.ranks}")


def _folder_of(job: str) -> str:
    """Return the folder of a job of this user. Raises UsageError if there is none."""
    folder = os.path.join(tempfile.gettempdir(), PREFIX + os.path.basename(job))
    if not is_job_folder(folder):
        raise _unknown(job)
    return folder


def _unknown(job: str) -> UsageError:
    return UsageError(
        f"{job}: not a job of yours that runs here; `dlio train --fault-tolerance shrink` with "
        "--spares 1 or --nodes prints the job's name"
    )
