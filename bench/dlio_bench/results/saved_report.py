"""Reports read back from files: those of the envelope, and older ones without it."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dlio.errors import UsageError, printable
from dlio.util.input_files import as_usage, read_json
from dlio_bench.results.envelope import SCHEMA
from dlio_bench.results.figure_collection import collect
from dlio_bench.results.report_values import Figure, PlotCurve, Ratio, Results, Waterfall

_LEAST, _MOST = 1e-140, 1e140
_KINDS: Final = ("cdf", "time", "scaling")


@dataclass(slots=True)
class SavedReport(Results):
    """A report; all texts are as the file has them and may hold anything. Figures have no invalid
    values; those without any value are left out."""

    path: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str = ""
    seconds: float | None = None
    old: bool = False
    """True if it has no envelope: repeats and directions may be missing."""

    @property
    def name(self) -> str:
        """The file's name without its folder and ending."""
        return os.path.splitext(os.path.basename(self.path))[0]


TRAINING: Final = "training"
"""In place of a benchmark's name, that of `dlio train --report`: figures of one run."""


def find_reports(paths: Sequence[str]) -> list[str]:
    """Return the JSON files that paths name, those directly in a folder in the order of names.

    Raises UsageError if a path does not exist, or a folder holds none.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        inside = sorted(name for name in os.listdir(path) if name.endswith(".json"))
        if not inside:
            raise UsageError(f"{path}: no *.json in this folder; write reports there by --report")
        files += [os.path.join(path, name) for name in inside]
    return files


def read_report(path: str) -> SavedReport:
    """Read a report of `--report`, or one of docs/benchmarks/data.

    Raises UsageError, which names the file, if it is not a report or of another schema.
    """
    try:
        loaded = read_json(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file of --report") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON; name a file of --report") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: not a report; name a file of --report")
    if isinstance(inner := loaded.get("report"), dict) and "schema" in inner:
        loaded = inner  # With its title and data, as the site keeps it.
    schema = loaded.get("schema")
    if schema is None:
        with as_usage(path, "measure again"):
            return _old(path, loaded)
    if schema != SCHEMA:
        raise UsageError(
            f"{path}: schema {printable(str(schema))}, but this dlio reads {SCHEMA}; measure "
            "again, or use the dlio that wrote it"
        )
    with as_usage(path, f"this is a damaged report of {SCHEMA}: measure again"):
        return _report(path, loaded)


def _report(path: str, loaded: Mapping[str, Any]) -> SavedReport:
    seconds, words = loaded["seconds"], [str(word) for word in loaded["command"]]
    return SavedReport(
        path=path,
        benchmark=str(loaded["benchmark"]),
        figures=[
            Figure(unit=str(each["unit"]), forecast=bool(each["forecast"]), **same)
            for each, same in _repeated(loaded["figures"])
        ],
        ratios=[Ratio(**same) for _, same in _repeated(loaded["ratios"])],
        curves=[_curve(each) for each in loaded["curves"]],
        waterfalls=[
            Waterfall(str(each["name"]), _parts(each["parts"]), _texts(each["labels"]))
            for each in loaded["waterfalls"]
        ],
        notes=[str(note) for note in loaded["notes"]],
        environment=dict(loaded["environment"]),
        command=shlex.join([*map(os.path.basename, words[:1]), *words[1:]]),
        started=str(loaded["started"] or ""),
        seconds=None if seconds is None or not _is_shown(float(seconds)) else float(seconds),
        settings=dict(loaded["settings"]),
        seeds=dict(loaded["seeds"]),
    )


def _old(path: str, loaded: Mapping[str, Any]) -> SavedReport:
    """Return a report without an envelope: bare, or stored with its provenance."""
    inner = loaded.get("report", loaded)
    machine = loaded.get("machine")
    if not isinstance(inner, dict) or not isinstance(machine, dict):
        raise UsageError(
            f"{path}: not a report of dlio bench: no schema, and no machine; measure again"
        )
    figures, ratios = collect(inner)
    figures = [each for each in figures if all(map(_is_shown, each.values))]
    ratios = [each for each in ratios if all(map(_is_shown, each.values))]
    if not figures and not ratios:
        raise UsageError(f"{path}: an old report without figures that can be read; measure again")
    config = inner.get("config")
    if isinstance(config, dict) and isinstance(inner.get("epochs"), list):
        versions = inner.get("versions")
        return SavedReport(
            path=path,
            benchmark=TRAINING,
            figures=figures,
            ratios=ratios,
            environment={**machine, "versions": versions if isinstance(versions, dict) else {}},
            command="dlio train",
            settings=config,
        )
    return SavedReport(
        path=path,
        benchmark=str(inner.get("benchmark", loaded.get("title", ""))) or "unnamed",
        figures=figures,
        ratios=ratios,
        environment={**machine, "load_average": loaded.get("load_average")},
        command=str(loaded.get("command", "")),
        started=str(loaded.get("date", "")),
        old=True,
    )


def _repeated(
    stored: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield the figures, or ratios, that have values, with the fields that both kinds have."""
    for each in stored:
        if values := _values(each["values"]):
            better = each["better"] if each["better"] in ("higher", "lower") else ""
            labels = _texts(each["labels"])
            same = {"name": str(each["name"]), "values": values, "labels": labels, "better": better}
            yield each, same


def _curve(each: Mapping[str, Any]) -> PlotCurve:
    if each["kind"] not in _KINDS:
        raise ValueError(f"a curve of kind {each['kind']!r}")
    pairs = [
        (float(x), float(y))
        for x, y in zip(each["x"], each["y"], strict=True)
        if x is not None and y is not None and _is_shown(float(x)) and _is_shown(float(y))
    ]
    return PlotCurve(
        str(each["name"]),
        each["kind"],
        str(each["x_name"]),
        str(each["y_name"]),
        tuple(x for x, _ in pairs),
        tuple(y for _, y in pairs),
        _texts(each["labels"]),
        bool(each["forecast"]),
    )


def _values(stored: Sequence[Any]) -> tuple[float, ...]:
    values = (float(value) for value in stored if value is not None)
    return tuple(value for value in values if _is_shown(value))


def _is_shown(value: float) -> bool:
    """True for a value that has a place on an axis: differences and ratios of such have one, too.
    No quantity is beyond."""
    return not value or _LEAST <= abs(value) <= _MOST


def _parts(stored: Mapping[str, Any]) -> dict[str, float]:
    parts = {str(name): float(value) for name, value in stored.items() if value is not None}
    return {name: value for name, value in parts.items() if _is_shown(value)}


def _texts(stored: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in stored.items()}
