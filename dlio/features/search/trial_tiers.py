"""One staged copy for all trials, made by `dlio stage`."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any, Final

from dlio.errors import UsageError
from dlio.util.child_processes import module_command
from dlio.util.units import format_bytes
from dlio.util.user_folders import make_folders

_SPARE: Final = 64 << 20
"""Bytes of a tier beyond those of the data: headers of blocks, and room for their sizes."""


def checked_tiers(tiers: str) -> str:
    """Return the tiers of --tiers. Raises UsageError for those that trials cannot share."""
    from dlio.storage.tier_spec import parse_tiers

    specs = parse_tiers(tiers)
    if not specs or any(spec.kind != "disk" for spec in specs):
        raise UsageError(
            f"--tiers {tiers}: trials share a copy in a folder; a RAM tier lives no longer than "
            "its trial. Name a folder: /local/scratch:200GiB, or /dev/shm/search:8GiB for memory"
        )
    return ",".join(map(str, specs))


def own_tiers(folder: str, paths: Sequence[str]) -> str:
    """Make a tier of the search's own with room for data sets, and return it as --tiers takes it.

    Args:
        folder: of the search.
        paths: the data sets.
    """
    from dlio.data.reader import open_reader
    from dlio.data.reader_contract import data_bytes

    total = 0
    for path in paths:
        reader = open_reader(path)
        total += data_bytes(reader)
        reader.close()
    root = os.path.abspath(os.path.join(folder, "tiers"))
    os.close(make_folders(root))
    size = total + total // 8 + _SPARE
    return f"{root}:{-(-size >> 20)}MiB"


def stage(path: str, tiers: str) -> int:
    """Stage a data set, or the rest of it; return the bytes that were read from the source.

    Raises UsageError with the reason of `dlio stage`, and if another data set had to make room.
    """
    done = subprocess.run(
        [*module_command("dlio.cli"), "stage", path, "--tiers", tiers, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(f"staging {path}: {said[-1].removeprefix('dlio: ').strip()}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if report["evicted"]:
        raise UsageError(
            f"--tiers {tiers}: too small for all data of the search, of which {path} takes "
            f"{format_bytes(report['data_bytes'])}: {report['evicted'][0]}; give more capacity"
        )
    return int(report["read_bytes"])
