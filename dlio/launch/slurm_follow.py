"""The output of a job of Slurm's, as it is written, until the job ends."""

import os
import time
from typing import Final

from dlio.errors import UsageError
from dlio.util.child_processes import printed_by
from dlio.util.input_files import open_input
from dlio.util.printable import print_line

_EVERY_S: Final = 2.0
_ANSWER_TIMEOUT_S: Final = 60.0
_SILENT: Final = 5
"""Answers in a row that Slurm may owe, as while its controller restarts."""
_FAILED: Final = 1


def follow(job: str, path: str, every_s: float = _EVERY_S) -> int:
    """Print a job's output until the job ends, through requeues. Ctrl-C ends the printing alone.

    Returns 0 if it has completed, else 1.

    Raises UsageError if Slurm does not answer, or no longer knows how the job has ended.
    """
    printed, state, silent = 0, "", 0
    while silent < _SILENT:
        now = _state(job)
        printed = _print_from(path, printed)
        silent = silent + 1 if now is None else 0
        if now is not None and now not in (state, _FORGOTTEN):
            state = now
            print_line(f"job {job} is {state}")
        if now == _FORGOTTEN:
            _print_from(path, printed, to_end=True)
            raise UsageError(
                f"Slurm no longer knows how job {job} has ended, and keeps no accounts (sacct): "
                f"see its output, {path}"
            )
        if now is not None and now.split()[0] in _ENDS:
            _print_from(path, printed, to_end=True)
            return 0 if now == "COMPLETED" else _FAILED
        time.sleep(every_s)
    raise UsageError(f"Slurm does not answer (scontrol show job {job}): its output is {path}")


_FORGOTTEN: Final = "forgotten"
_ENDS: Final = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
)


def _state(job: str) -> str | None:
    """Return a job's state, with the reason if it waits; None if Slurm does not answer. Some
    minutes after a job's end only Slurm's accounts know it."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    printed, complained = printed_by(command, _ANSWER_TIMEOUT_S)
    if "Invalid job id" in complained:
        accounts = ["sacct", "--noheader", "--parsable2", "--allocations"]
        printed, _ = printed_by([*accounts, "--format=State", f"--jobs={job}"], _ANSWER_TIMEOUT_S)
        return next((line.strip() for line in printed.splitlines() if line.strip()), _FORGOTTEN)
    known = {key: value for key, _, value in (word.partition("=") for word in printed.split())}
    state, reason = known.get("JobState"), known.get("Reason", "None")
    # Some jobs that wait can never run, as those of more nodes than a partition has.
    return f"{state} ({reason})" if state == "PENDING" and reason != "None" else state


def _print_from(path: str, at: int, to_end: bool = False) -> int:
    """Print the whole lines of a file from a position on, all of it if it has ended; return the new
    position."""
    if not os.path.exists(path):
        return at
    with open_input(path) as file:
        file.seek(at)
        data = file.read()
    end = len(data) if to_end else data.rfind(b"\n") + 1
    for line in data[:end].decode(errors="replace").splitlines():
        print_line(line)
    return at + end
