"""`dlio cache`: the cache of indexes of data sets."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from dlio.cli.app import CommandGroup
from dlio.util.json_output import json_text
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes

_DAY_S: Final = 86400

GROUP: Final = CommandGroup(
    "Show and clean the cache of indexes of data sets (DLIO_CACHE).",
    {"ls": "dlio.cli.cache_command:list_entries", "clean": "dlio.cli.cache_command:clean"},
)


@dataclass(frozen=True, slots=True)
class CacheListOptions:
    """Options of `dlio cache ls`."""

    as_json: Annotated[bool, Option("Print JSON.", name="json")] = False


def list_entries(options: CacheListOptions) -> None:
    """Show the contents of this user's cache, with sizes and ages."""
    from dlio.data.index import cache_entries, cache_folder

    entries = cache_entries()
    if options.as_json:
        rows = [asdict(entry) for entry in entries]
        print(json_text({"folder": cache_folder(), "entries": rows}, indent=2))
        return
    total = sum(entry.bytes for entry in entries)
    print_line(f"{cache_folder()}: {counted(len(entries), 'entry')}, {format_bytes(total)}")
    for entry in entries:
        days = max(0.0, time.time() - entry.used) / _DAY_S
        print_line(f"  {entry.name}: {format_bytes(entry.bytes)}, written {days:.1f} days ago")


@dataclass(frozen=True, slots=True)
class CacheCleanOptions(CheckedOptions):
    """Options of `dlio cache clean`."""

    older: Annotated[
        float, Option("Only indexes that were written that long ago.", unit="days", least=0)
    ] = 0.0


def clean(options: CacheCleanOptions) -> None:
    """Remove indexes of data sets from this user's cache; they are built again when needed.

    Staged data are not touched: `dlio evict` removes those.
    """
    from dlio.data.index import cache_folder, clean_cache

    count, size = clean_cache(options.older * _DAY_S)
    print_line(f"{cache_folder()}: removed {counted(count, 'index')}, {format_bytes(size)}")
