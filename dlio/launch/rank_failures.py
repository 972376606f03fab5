"""Reasons of the ends of ranks, as they tell their launcher, which prints the cause last.

A rank that fails takes the others with it, by mpirun or because they miss it. Their reports are not
the cause, and may come later. Each rank therefore leaves a file in the job's folder,
and the launcher chooses.
"""

import json
import os
import re
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from dlio.util.input_files import read_json
from dlio.util.settings import FAILURES
from dlio.util.whole_files import write_whole

_PREFIX: Final = "failed-"
_SIGNAL: Final = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_CODE: Final = re.compile(r"Process name: \[\S+,(\d+)\] Exit code: (\d+)")
_EARLY: Final = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exiting improperly")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The end of one rank."""

    rank: int
    at_s: float
    """Time of the node's monotonic clock."""
    text: str
    """A traceback, of several lines, or nothing."""
    line: str
    """The end in one line, without the rank."""
    follows: bool = False
    """True if another rank's end may be the cause."""
    names_rank: bool = True
    """False if the line is complete, and need not say which rank has ended so."""


def leave_failure(failure: RankFailure) -> bool:
    """Leave a failure for the launcher; False if it does not ask for one."""
    folder = os.environ.get(FAILURES, "")
    if not os.path.isdir(folder):
        return False
    path = os.path.join(folder, f"{_PREFIX}{failure.rank}")
    with suppress(OSError):
        write_whole(path, lambda file: file.write(json.dumps(asdict(failure)).encode()))
        return True
    return False


def failures_in(folder: str) -> list[RankFailure]:
    """Return the failures in a job's folder: causes first, each the oldest first."""
    failures = []
    with suppress(OSError):
        for name in os.listdir(folder):
            # Others are being written, or their rank was ended while it wrote.
            if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal():
                fields: Any = read_json(os.path.join(folder, name))
                failures.append(RankFailure(**fields))
    return sorted(failures, key=lambda each: (each.follows, each.at_s))


def lines_of(failures: list[RankFailure]) -> list[str]:
    """Return the lines that tell of failures, the cause last."""
    if not failures:
        return []
    cause = failures[0]
    same = sorted(each.rank for each in failures if each.line == cause.line)
    others = {
        each.line: each.rank for each in failures if each.line != cause.line and not each.follows
    }
    text = cause.text and cause.text.rstrip("\n") + "\n"
    return [
        *(f"dlio: then rank {rank} {line}\n" for line, rank in others.items()),
        *text.splitlines(keepends=True),
        f"dlio: error: {_named(same) + ' ' if cause.names_rank else ''}{cause.line}\n",
    ]


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


_WHY: Final[dict[int, str]] = {
    signal.SIGKILL: "; the kernel does so when memory runs out",
    signal.SIGBUS: "; the kernel does so when a file mapped into memory was cut off by another "
    "process or cannot be read from its disk, or when /dev/shm or a huge page runs out: see the "
    "kernel's log, and let nothing write to data sets or dlio's cache while they are used",
}


def ended_by_signal(rank: int, number: int) -> str:
    """Return the line that tells of a rank's end by a signal."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"rank {rank} was ended by {name}, and with it the others{_WHY.get(number, '')}"


def ended_by_code(rank: int, code: int) -> str:
    """Return the line that tells of a rank's end by an exit code, of which nothing else tells."""
    return f"rank {rank} ended by itself with exit code {code}, and with it the others"


def told_by_mpirun(banner: list[str]) -> tuple[str, bool] | None:
    """Return a rank's end by a banner of Open MPI's mpirun, in one line, and True for a signal.

    None if the banner tells nothing more than that a rank has called MPI_Abort.
    """
    text = " ".join(" ".join(banner).split())
    if match := _SIGNAL.search(text):
        return ended_by_signal(int(match[1]), int(match[2])), True
    if match := _CODE.search(text):
        return ended_by_code(int(match[1]), int(match[2])), False
    if match := _EARLY.search(text):
        return f"rank {match[1]} ended by itself with exit code 0, before the others had", False
    return None
