"""Figures and ratios found in a report's own keys.

Benchmarks that keep nested results need not state them twice. A spread, {"median", "min", "max",
"all"}, becomes a Figure, or a Ratio where its name has `_over_`. The last part of its path that
names a quantity (`samples_per_s`, `step_s`) is its name, the others are its labels. `rows` are
tables: their texts are labels.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from dlio_bench.results.report_values import Better, Figure, Ratio, Results

_OTHER: Final = {
    *("schema", "benchmark", "command", "started", "seconds", "seeds", "settings", "environment"),
    *("figures", "ratios", "curves", "waterfalls", "notes", "machine", "case", "options", "sizes"),
    *("raw", "said", "absent", "output"),
}
"""Keys of a report's top level, and of cases, that hold no figures."""
_CONTAINERS: Final = {"formats", "cases"}
_UNITS: Final[tuple[tuple[str, str, Better], ...]] = (
    (r"(?:(?P<name>.+)_)?ms_per_sample", "ms", "lower"),
    (r"(?:(?P<name>.+)_)?(?P<unit>samples|images|bytes|MB|MiB|GB|GiB)_per_s", "/s", "higher"),
    (r"(?P<name>.+?),? (?P<unit>samples|images)/s(?P<rest>.*)", "/s", "higher"),
    (r"(?P<name>.+)_per_s", "1/s", "higher"),
    (r"(?:(?P<name>.+)_)?us", "us", "lower"),
    (r"(?:(?P<name>.+)_)?ms", "ms", "lower"),
    (r"(?P<name>.+)_s(?:_(?P<rest>.+))?", "s", "lower"),
    (r"(?:(?P<name>.+)_)?seconds(?:_(?P<rest>.+))?", "s", "lower"),
    (r"(?P<name>pss|peak|.*memory)_(?P<unit>MB|MiB|bytes)(?:_(?P<rest>.+))?", "", "lower"),
    (r"(?:(?P<name>.+)_)?(?P<unit>MB|MiB|bytes)(?:_(?P<rest>.+))?", "", ""),
    (r"(?:(?P<name>.+)_)?percent", "%", ""),
)
_TOP: Final = "median", "min", "max"


def results_of(
    benchmark: str,
    details: Mapping[str, object],
    *,
    settings: Mapping[str, object],
    seeds: Mapping[str, int] | None = None,
    paths: Sequence[str] = (),
) -> Results:
    """Return the results of a benchmark whose report is `details`; versions are those of its
    `machine`."""
    figures, ratios = collect(details)
    machine = details.get("machine")
    return Results(
        benchmark=benchmark,
        settings=settings,
        seeds=seeds or {},
        figures=figures,
        ratios=ratios,
        details=details,
        paths=tuple(paths),
        versions=machine["versions"] if isinstance(machine, Mapping) else {},
    )


def collect(report: Mapping[str, object]) -> tuple[list[Figure], list[Ratio]]:
    """Return the figures and ratios of a report. Two of one name and labels are numbered."""
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    seen: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for path, labels, values in _leaves(report, (), {}):
        name, unit, better, over, rest = _named(path)
        labels = {**({"case": ", ".join(rest)} if rest else {}), **labels}
        key = (name, tuple(sorted(labels.items())))
        seen[key] = number = seen.get(key, 0) + 1
        if number > 1:
            labels["number"] = str(number)
        if over:
            ratios.append(Ratio(name, values, labels, ""))
        else:
            figures.append(Figure(name, unit, values, labels, better))
    return figures, ratios


_Leaf = tuple[tuple[str, ...], dict[str, str], tuple[float, ...]]
"""A path, labels and values."""


def _leaves(value: object, path: tuple[str, ...], labels: dict[str, str]) -> Iterator[_Leaf]:
    if isinstance(value, Mapping):
        if all(_number(value.get(key)) for key in _TOP):
            every = value.get("all")
            repeats = every if isinstance(every, list | tuple) else [value["median"]]
            yield path, labels, tuple(float(each) for each in repeats)
            return
        for key, inner in value.items():
            if str(key) not in _OTHER:
                yield from _leaves(inner, (*path, str(key)), labels)
    elif _number(value):
        yield path, labels, (float(value),)
    elif isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        where = path[:-1] if path[-1:] == ("rows",) else path
        for row in value:
            yield from _row(row, where, labels)


def _row(row: Mapping[str, Any], path: tuple[str, ...], labels: dict[str, str]) -> Iterator[_Leaf]:
    """Yield the figures of a row: its texts and whole numbers are labels, its others figures."""
    own = labels | {
        key.replace("_", " "): str(cell)
        for key, cell in row.items()
        # A text that says which row it is, and not a figure with its range.
        if (isinstance(cell, str) and not re.match(r"-?\d|-$|never$", cell))
        or (isinstance(cell, int) and key in _COUNTS)
    }
    for key, cell in row.items():
        if isinstance(cell, Mapping):
            yield from _leaves(cell, (*path, key), own)
        elif _number(cell) and key not in _COUNTS:
            yield (*path, key), own, (float(cell),)


_COUNTS: Final = {"ranks", "nodes", "parameters_MB", "seed", "seeds", "network", "losses", "spares"}
"""Columns of numbers that say which row it is."""


def _named(path: Sequence[str]) -> tuple[str, str, Better, bool, list[str]]:
    """Return name, unit, direction, whether it is a ratio, and the rest of a path."""
    for at in range(len(path) - 1, -1, -1):
        part = path[at]
        rest = [each.replace("_", " ") for k, each in enumerate(path) if k != at]
        rest = [each for each in rest if each not in _CONTAINERS]
        if re.search(r"[_ ]over[_ ]", part):
            name = re.sub(r"[_ ]over[_ ]", " / ", part).replace("_", " ")
            return name, "", "", True, rest
        for pattern, unit, better in _UNITS:
            if match := re.fullmatch(pattern, part):
                groups = match.groupdict()
                words = " ".join(filter(None, (groups.get("name"), groups.get("rest"))))
                whole = (groups.get("unit") or "") + unit
                name = words.replace("_", " ") or _USUAL.get(whole, "size")
                return name, whole, better, False, rest
    rest = [each.replace("_", " ") for each in path[:-1] if each not in _CONTAINERS]
    return path[-1].replace("_", " ") if path else "", "", "", False, rest


_USUAL: Final = {
    "samples/s": "throughput",
    "images/s": "throughput",
    "s": "time",
    "ms": "time",
    "us": "time",
    "%": "share",
}


def _number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
