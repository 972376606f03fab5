"""Starting ranks from a command, or being one of them: the meaning of `-n`.

Ranks are handed the frozen records of the command, not a command line made anew: as JSON in an
environment variable, which only this user's processes can read and which leaves nothing behind.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Final

from dlio.errors import UsageError
from dlio.util.options import as_mapping, from_mapping
from dlio.util.settings import RECORD

__all__ = ["on_ranks", "run_as_rank"]

_LARGEST: Final = 96 << 10
"""Bytes of the records: Linux takes at most 128 KiB for one variable."""


def on_ranks(
    ranks: int | None,
    function: Callable[..., object],
    *records: object,
    check: Callable[[], object] = lambda: None,
) -> bool:
    """Call `function(*records)` on every rank; start them where that was asked for.

    Args:
        ranks: number of ranks to start on this machine, as -n gave it.
        function: a function of a module, whose arguments are records of options. Ranks import it.
        check: called before ranks are started, to find mistakes early.

    Returns True where this process is the launcher, False where it is a rank.

    Raises UsageError where mpirun started another number of ranks; SystemExit with the exit code
    of the ranks when they failed.
    """
    from dlio.comm.environment import under_mpi

    if not under_mpi() and ranks is not None and ranks > 1:
        check()
        from dlio.cli import launch

        task = {
            "function": f"{function.__module__}:{function.__qualname__}",
            "records": [
                [f"{type(each).__module__}:{type(each).__qualname__}", as_mapping(each)]
                for each in records
            ],
        }
        text = json.dumps(task)
        if len(text.encode()) > _LARGEST:
            raise UsageError(
                f"the options are {len(text):,} characters long, {_LARGEST:,} at most: use shorter "
                "paths or fewer repeated options"
            )
        name = function.__module__.rpartition(".")[2]
        code = launch.run_module("dlio.cli.rank", [name], ranks, {RECORD: text})
        if code:
            raise SystemExit(code)
        return True

    from dlio.comm import world

    if ranks is not None and ranks != world().size:
        raise UsageError(
            f"-n {ranks} under an mpirun that started {world().size}: leave out -n, or mpirun"
        )
    function(*records)
    return False


def run_as_rank() -> None:
    """Call the function that `on_ranks` was asked for, in a rank that it started."""
    text = os.environ.pop(RECORD, None)
    if text is None:
        raise UsageError(f"{sys.argv[0]} is started by dlio itself: use `dlio train -n 4`")
    task = json.loads(text)
    records: list[object] = [
        from_mapping(_record(name), values) for name, values in task["records"]
    ]
    _attribute(task["function"])(*records)


def _record(place: str) -> type:
    record = _attribute(place)
    assert isinstance(record, type)
    return record


def _attribute(place: str) -> Callable[..., object]:
    module, _, name = place.partition(":")
    value: Callable[..., object] = getattr(importlib.import_module(module), name)
    return value
