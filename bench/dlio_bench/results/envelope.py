"""The envelope of a benchmark's report: one JSON form for all commands of `dlio bench`.

    started = begin(output)
    ...
    finish(output, results, started)

`schema.json` next to this file is its JSON Schema.
"""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Final

from dlio.cli.option_records import OutputOptions
from dlio.util.whole_files import write_json
from dlio_bench.results.machine import (
    PACKAGES,
    describe_file_system,
    describe_machine,
    load_average,
)
from dlio_bench.results.repeats import ENOUGH, interval_of_median
from dlio_bench.results.report_values import Ratio, Results

SCHEMA: Final = "dlio-bench/1"


@dataclass(frozen=True, slots=True)
class RunStart:
    """Beginning of a run."""

    at: datetime
    clock_s: float
    """Of time.monotonic()."""
    load_average: float | None


def begin(output: OutputOptions) -> RunStart:
    """Note the time and the load. Raises UsageError if the report cannot be written."""
    output.check_writable()
    return RunStart(datetime.now(UTC), time.monotonic(), load_average())


def finish(output: OutputOptions, results: Results, start: RunStart) -> None:
    """Write the report of --report, and print that of --json on the last line."""
    if output.report is not None or output.as_json:
        output.write(envelope(results, start))


def save(output: OutputOptions, results: Results, start: RunStart) -> None:
    """Write the report of --report during a run, so that a later failure does not lose it."""
    if output.report is not None:
        write_json(output.report, envelope(results, start))


def envelope(results: Results, start: RunStart | None = None) -> dict[str, object]:
    """Return the report as JSON values; without `start` it has no beginning, duration and load
    before.

    Keys of `results.details` stand at its top level; those of the envelope take precedence. A value
    that JSON does not have (NaN, infinity) is written as null.
    """
    machine = describe_machine(PACKAGES)
    versions = machine["versions"]
    assert isinstance(versions, dict)
    versions |= results.versions
    before = start.load_average if start is not None else None
    own = {
        "schema": SCHEMA,
        "benchmark": results.benchmark,
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "started": start.at.isoformat(timespec="seconds") if start is not None else None,
        "seconds": time.monotonic() - start.clock_s if start is not None else None,
        "seeds": dict(results.seeds),
        "settings": dict(results.settings),
        "environment": {
            **machine,
            "file_systems": [describe_file_system(path) for path in results.paths],
            "load_average": [before, load_average()],
        },
        "figures": [{**asdict(each), **_summary(each.values)} for each in results.figures],
        "ratios": [_ratio(each) for each in results.ratios],
        "curves": [asdict(each) for each in results.curves],
        "waterfalls": [asdict(each) for each in results.waterfalls],
        "notes": list(results.notes),
    }
    rest = {key: value for key, value in results.details.items() if key not in own}
    whole = _finite({**own, **rest})
    assert isinstance(whole, dict)
    return whole


def _ratio(ratio: Ratio) -> dict[str, object]:
    finite = [value for value in ratio.values if math.isfinite(value)]
    return {
        **asdict(ratio),
        **_summary(ratio.values),
        "interval": interval_of_median(finite),
        "too_few": len(finite) < ENOUGH,
    }


def _summary(values: Sequence[float]) -> dict[str, object]:
    """Median, least and largest of the values that are numbers; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"median": None, "min": None, "max": None}
    return {"median": median(finite), "min": min(finite), "max": max(finite)}


def _finite(value: object) -> object:
    """Return JSON values: numbers of numpy as Python's, tuples as lists, and no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    # numpy's scalars give Python's numbers.
    item = getattr(value, "item", None)
    if callable(item):
        return _finite(item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
