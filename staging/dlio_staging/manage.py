"""`dlio status`, `dlio evict`, `dlio pin`: what lies in a node's disk tiers, and for how long."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dlio.errors import TierError, UsageError
from dlio.storage.inventory import Stored, evict, set_pinned, stored_data
from dlio.storage.places import find_place, scratch_places
from dlio.storage.spec import parse_tiers
from dlio.util.settings import settings
from dlio.util.shared import SHARED_MEMORY, user_folder
from dlio.util.units import format_bytes

_DAY_S = 86400


def find_roots(tiers: str | None) -> list[str]:
    """Where tiers may be: what is named, or DLIO_TIERS, and else wherever one lies."""
    text = tiers if tiers is not None else settings().tiers
    if text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if all(os.path.isdir(os.path.expanduser(part)) for part in parts):
            return [os.path.abspath(os.path.expanduser(part)) for part in parts]
        return [spec.root for spec in parse_tiers(text) if spec.kind == "disk"]
    places = [place.path for place in scratch_places().values()]
    usual = [*places, "/tmp", "/var/tmp", os.getcwd()]  # noqa: S108 - only looked at
    found = [root for root in usual if os.path.isdir(os.path.join(root, user_folder()))]
    return list(dict.fromkeys(os.path.abspath(root) for root in found))


def describe_status(tiers: str | None) -> dict[str, Any]:
    """What `dlio status --json` prints: `scratch` places, and `tiers` with their data sets."""
    scratch = {
        name: {**asdict(place), "free_bytes": _free(place.path)}
        for name, place in scratch_places().items()
    }
    found = []
    for root in find_roots(tiers):
        place = find_place(root)
        sets = [
            {**asdict(entry), "in_use": entry.in_use, "path": entry.path}
            for entry in stored_data(root)
        ]
        found.append(
            {
                "root": root,
                "kind": place.kind,
                "filesystem": place.filesystem,
                "free_bytes": _free(root),
                "data_sets": sets,
            }
        )
    shared = _shared_memory()
    return {"scratch": scratch, "tiers": found, "shared_memory": shared}


def status(
    tiers: Annotated[
        str | None,
        typer.Option(help="Which tiers, as in --tiers elsewhere, or their folders."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is staged on this node: who uses it, its size, age and hits; and which scratch
    there is. Exit code 0, whatever there is."""
    told = describe_status(tiers)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for name, place in told["scratch"].items():
        typer.echo(
            f"scratch {name}: {place['path']} ({place['kind']}, {place['filesystem']}, "
            f"{format_bytes(place['free_bytes'])} free)"
        )
    if told["shared_memory"]:
        typer.echo(f"RAM tiers: {format_bytes(told['shared_memory'])} in {SHARED_MEMORY}")
    for tier in told["tiers"]:
        typer.echo(
            f"{tier['root']}: {tier['kind']} ({tier['filesystem']}), "
            f"{format_bytes(tier['free_bytes'])} free"
        )
        for entry in tier["data_sets"]:
            _tell(entry)
        if not tier["data_sets"]:
            typer.echo("  nothing is staged here")
    if not told["tiers"]:
        typer.echo("no tiers found: name them with --tiers, or stage something")


def evict_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SRC]...", help="Sources, as they were staged, or fingerprints."),
    ] = None,
    tiers: Annotated[str | None, typer.Option(help="In which tiers. Or DLIO_TIERS.")] = None,
    job: Annotated[
        str | None, typer.Option(help="What this job used last, and nobody uses now.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All that is not in use or pinned.")] = False,
    older: Annotated[
        float | None, typer.Option(help="Only what was not used for that many days.", min=0)
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned ones too.")] = False,
) -> None:
    """Remove staged data. What a living process uses stays; so does what is pinned.

    Made for epilogs: `dlio evict --job $SLURM_JOB_ID` asks nothing and is content with nothing to
    do. Exit codes: 0 done, 2 when something that was named is in use, pinned or not there.
    """
    if not names and job is None and not all_ and older is None:
        raise UsageError("say what to evict: a source, --job, --older or --all")
    count = size = 0
    problems = []
    for root in find_roots(tiers):
        for entry in stored_data(root):
            named = entry.fingerprint in (names or ()) or _is_source(entry, names or ())
            if not (named or _chosen(entry, job, all_, older)):
                continue
            if not named and (entry.in_use or (entry.pinned and not pinned)):
                continue
            try:
                size += evict(root, entry.fingerprint, pinned=pinned)
                count += 1
            except TierError as error:
                problems.append(str(error))
    if names and not count and not problems:
        raise TierError(f"{', '.join(names)}: not staged here: `dlio status` shows what is")
    typer.echo(f"evicted {count} data set(s), {format_bytes(size)}")
    if problems:
        raise TierError("; ".join(problems))


def pin_command(
    names: Annotated[list[str], typer.Argument(metavar="SRC...", help="Sources, or fingerprints.")],
    tiers: Annotated[str | None, typer.Option(help="In which tiers. Or DLIO_TIERS.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Let go again.")] = False,
) -> None:
    """Keep staged data from being evicted to make room, or let go of it."""
    done = 0
    for root in find_roots(tiers):
        for entry in stored_data(root):
            if entry.fingerprint in names or _is_source(entry, names):
                set_pinned(root, entry.fingerprint, not remove)
                typer.echo(
                    f"{entry.source or entry.fingerprint} in {root}: "
                    f"{'no longer pinned' if remove else 'pinned'}"
                )
                done += 1
    if not done:
        raise TierError(f"{', '.join(names)}: not staged here: `dlio status` shows what is")


def _chosen(entry: Stored, job: str | None, all_: bool, older: float | None) -> bool:
    if older is not None and time.time() - entry.used < older * _DAY_S:
        return False
    if job is not None:
        last = max(entry.leases, key=lambda lease: lease.since, default=None)
        return last is not None and last.job == job
    return all_ or older is not None


def _is_source(entry: Stored, names: Sequence[str]) -> bool:
    return bool(entry.source) and any(
        entry.source in (name, os.path.abspath(os.path.expanduser(name))) for name in names
    )


def _tell(entry: dict[str, Any]) -> None:
    users = [
        f"job {lease['job']} pid {lease['pid']}" for lease in entry["leases"] if lease["alive"]
    ]
    state = ["pinned"] if entry["pinned"] else []
    state.append(f"in use by {', '.join(users)}" if users else f"used {_ago(entry['used'])}")
    typer.echo(
        f"  {entry['source'] or entry['fingerprint']}: {format_bytes(entry['bytes'])}, "
        f"{entry['blocks']:,} blocks, staged {_ago(entry['created'])}, {entry['hits']:,} hits, "
        f"{', '.join(state)}"
    )


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, size in (("days", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _free(path: str) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _shared_memory() -> int:
    """Bytes of this user's RAM tiers on this node."""
    total = 0
    for folder, _, names in os.walk(os.path.join(SHARED_MEMORY, user_folder())):
        for name in names:
            if name.endswith(".blk"):
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except OSError:
                    continue
    return total
