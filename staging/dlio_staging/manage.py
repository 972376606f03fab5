"""`dlio status`, `dlio evict`, `dlio pin`: the contents of a node's disk tiers."""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from dlio.errors import TierError, UsageError, printable
from dlio.storage.file_system_kind import file_system_of, scratch_folders
from dlio.storage.inventory import (
    StoredDataset,
    evict,
    holds_data,
    known_roots,
    set_pinned,
    stored_data,
)
from dlio.storage.tier_spec import parse_tiers
from dlio.util.json_output import json_text
from dlio.util.options import Option, check
from dlio.util.printable import print_line
from dlio.util.settings import settings
from dlio.util.shared_folders import SHARED_MEMORY, own_memory
from dlio.util.units import counted, format_bytes

_DAY_S: Final = 86400


def find_roots(tiers: str | None) -> list[str]:
    """Return the folders of disk tiers: those given, those of DLIO_TIERS, or all that are found.

    Tiers are given as for `--tiers`, or as folders separated by commas; they are found in scratch
    places, in the current folder, and wherever this user has kept some. Raises UsageError for a
    folder that is not there.
    """
    text = tiers if tiers is not None else settings().tiers
    if text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [root for part in parts for root in _roots_of(part)]
    places = [place.path for place in scratch_folders().values()]
    usual = [*places, *known_roots(), "/tmp", "/var/tmp", os.getcwd()]  # noqa: S108 - only looked at
    return [root for root in dict.fromkeys(map(os.path.abspath, usual)) if holds_data(root)]


def _roots_of(part: str) -> list[str]:
    folder = os.path.expanduser(part)
    if os.path.isdir(folder):
        return [os.path.abspath(folder)]
    if ":" not in part:
        raise UsageError(f"tier {part}: no such folder: `dlio status` shows those in use")
    return [spec.root for spec in parse_tiers(part) if spec.kind == "disk"]


def describe_status(tiers: str | None) -> dict[str, object]:
    """Return the output of `dlio status --json`: scratch places, and tiers with their data sets."""
    scratch = {
        name: {**asdict(place), "free_bytes": _free(place.path)}
        for name, place in scratch_folders().items()
    }
    listed = []
    named = tiers is not None or bool(settings().tiers)
    for root in find_roots(tiers):
        kept = stored_data(root)
        if not named and not any(entry.bytes for entry in kept):
            continue  # Left by a job that is over: nothing to use, or to remove.
        place = file_system_of(root)
        sets = [{**asdict(entry), "in_use": entry.in_use, "path": entry.path} for entry in kept]
        listed.append(
            {
                "root": root,
                "kind": place.kind,
                "filesystem": place.filesystem,
                "free_bytes": _free(root),
                "data_sets": sets,
            }
        )
    shared = _shared_memory()
    return {"scratch": scratch, "tiers": listed, "shared_memory": shared}


def _tiers(text: str) -> Option:
    default = "DLIO_TIERS, or all that this user has used"
    return Option(text, metavar="TIERS", default_text=default)


def _names(text: str) -> Option:
    text += ", named as they were staged or by their fingerprints."
    return Option(text, positional=True, metavar="SRC")


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Options of `dlio status`."""

    tiers: Annotated[
        str | None, _tiers("Tiers, as for --tiers of other commands, or their folders.")
    ] = None
    as_json: Annotated[bool, Option("Print JSON.", name="json")] = False


def status(options: StatusOptions) -> None:
    """Show the data staged on this node, and the node's scratch places.

    Each data set is shown with its users, size, age and hits. The exit code is always 0.
    """
    about: dict[str, Any] = describe_status(options.tiers)
    if options.as_json:
        print(json_text(about, indent=2))
        return
    for name, place in about["scratch"].items():
        print_line(
            f"scratch {name}: {place['path']} ({place['kind']}, {place['filesystem']}, "
            f"{format_bytes(place['free_bytes'])} free)"
        )
    if about["shared_memory"]:
        print_line(f"RAM tiers: {format_bytes(about['shared_memory'])} in {SHARED_MEMORY}")
    for tier in about["tiers"]:
        print_line(
            f"{tier['root']}: {tier['kind']} ({tier['filesystem']}), "
            f"{format_bytes(tier['free_bytes'])} free"
        )
        for entry in tier["data_sets"]:
            _print_entry(entry)
        if not tier["data_sets"]:
            print_line("  nothing is staged here")
    if not about["tiers"]:
        print_line("nothing is staged in tiers found here: name others with --tiers")


@dataclass(frozen=True, slots=True)
class EvictOptions:
    """Options of `dlio evict`."""

    names: Annotated[tuple[str, ...], _names("Data sets to remove")] = ()
    tiers: Annotated[str | None, _tiers("Tiers to remove data from.")] = None
    job: Annotated[
        str | None,
        Option("Remove data that this job used last and no process uses now.", metavar="JOB"),
    ] = None
    everything: Annotated[
        bool, Option("Remove all data that is neither in use nor pinned.", name="all")
    ] = False
    older: Annotated[
        float | None,
        Option("Remove only data that has not been used for this long.", unit="days", least=0),
    ] = None
    pinned: Annotated[bool, Option("Remove pinned data, too.")] = False

    def __post_init__(self) -> None:
        check(self)
        if not self.names and self.job is None and not self.everything and self.older is None:
            raise UsageError("say what to evict: a source, --job, --older or --all")


def evict_command(options: EvictOptions) -> None:
    """Remove staged data.

    Data that a living process uses stays, and so does pinned data. Made for epilogs of batch jobs:
    `dlio evict --job $SLURM_JOB_ID` asks nothing and succeeds when there is nothing to do. Exit
    codes: 0, or 2 when a named data set is in use, pinned or absent.
    """
    count = size = kept = 0
    problems = []
    for root in find_roots(options.tiers):
        for entry in stored_data(root):
            named = entry.fingerprint in options.names or _is_source(entry, options.names)
            if not (named or _chosen(entry, options)):
                continue
            if not named and (entry.in_use or (entry.pinned and not options.pinned)):
                kept += 1
                continue
            try:
                size += evict(root, entry.fingerprint, pinned=options.pinned)
                count += 1
            except TierError as error:
                problems.append(str(error))
    if options.names and not count and not problems:
        raise TierError(f"{', '.join(options.names)}: not staged here: `dlio status` shows what is")
    stays = f"; in use or pinned, and left: {kept}" if kept else ""
    print_line(f"evicted {counted(count, 'data set')}, {format_bytes(size)}{stays}")
    if problems:
        raise TierError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class PinOptions:
    """Options of `dlio pin`."""

    names: Annotated[tuple[str, ...], _names("Data sets")]
    tiers: Annotated[str | None, _tiers("Tiers that hold the data.")] = None
    remove: Annotated[bool, Option("Remove the protection again.")] = False


def pin_command(options: PinOptions) -> None:
    """Protect staged data from making room for other data, or end that."""
    names = options.names
    done = 0
    for root in find_roots(options.tiers):
        for entry in stored_data(root):
            if entry.fingerprint in names or _is_source(entry, names):
                set_pinned(root, entry.fingerprint, not options.remove)
                print_line(
                    f"{printable(entry.source or entry.fingerprint)} in {root}: "
                    f"{'no longer pinned' if options.remove else 'pinned'}"
                )
                done += 1
    if not done:
        raise TierError(f"{', '.join(names)}: not staged here: `dlio status` shows what is")


def _chosen(entry: StoredDataset, options: EvictOptions) -> bool:
    """True if `--older`, `--job` or `--all` selects a data set."""
    if options.older is not None and time.time() - entry.used < options.older * _DAY_S:
        return False
    if options.job is not None:
        last = max(entry.leases, key=lambda lease: lease.since, default=None)
        return last is not None and last.job == options.job
    return options.everything or options.older is not None


def _is_source(entry: StoredDataset, names: Sequence[str]) -> bool:
    """True if a data set was staged from one of `names`."""
    return bool(entry.source) and any(
        entry.source in (name, os.path.abspath(os.path.expanduser(name))) for name in names
    )


def _print_entry(entry: dict[str, Any]) -> None:
    users = [
        f"job {printable(lease['job'])} pid {lease['pid']}"
        for lease in entry["leases"]
        if lease["alive"]
    ]
    state = ["pinned"] if entry["pinned"] else []
    state.append(f"in use by {', '.join(users)}" if users else f"used {_ago(entry['used'])}")
    print_line(
        f"  {printable(entry['source'] or entry['fingerprint'])}: "
        f"{format_bytes(entry['bytes'])}, "
        f"{counted(entry['blocks'], 'block')}, staged {_ago(entry['created'])}, {entry['hits']:,} "
        f"hits, {', '.join(state)}"
    )


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, size in (("days", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _free(path: str) -> int:
    """Return the free bytes of a folder's file system; 0 if it is gone."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _shared_memory() -> int:
    """Return the bytes of this user's RAM tiers on this node."""
    total = 0
    for folder, _, names in os.walk(own_memory()):
        for name in names:
            if name.endswith(".blk"):
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total
