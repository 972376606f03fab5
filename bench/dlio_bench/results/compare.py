"""`dlio bench compare`: figures of several reports, and their ratios to the first one's."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Final

from dlio.errors import UsageError, printable
from dlio.util.arguments import one_of
from dlio.util.options import Option, check
from dlio_bench.results.repeats import ENOUGH, interval_of_ratio
from dlio_bench.results.report_values import Figure, Ratio, labels_text
from dlio_bench.results.saved_report import SavedReport, read_report
from dlio_bench.results.terminal import range_text, show_notes, table

Key = tuple[str, str, tuple[tuple[str, str], ...]]
_WARNED: Final = ("processor", "cores", "kernel", "file system")
"""Differences with which figures cannot be compared as such."""
_PLAIN: Final = (
    *(
        "processor",
        "cores",
        "memory",
        "governor",
        "kernel",
        "system",
        "python",
        "decoder",
    ),
    *("batches", "cgroup", "commit"),
)


_FREE: Final = {
    *("path", "paths", "source", "repeats", "seed", "seeds", "loaders", "peers", "keep"),
    *("report", "json", "csv", "rules", "backend"),
}
"""Settings that leave figures comparable: another storage is compared on purpose, and others
change how many values there are, and whose."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The options of `dlio bench compare`."""

    files: Annotated[
        tuple[str, ...],
        Option("Reports of --report; ratios are to the first.", positional=True, metavar="FILE"),
    ]
    worse_than: Annotated[
        float | None,
        Option(
            "End with exit code 1 if a figure with a direction has become worse by more than this "
            "factor, with its whole confidence interval, such as 1.1.",
            least=1,
            default_text="never",
        ),
    ] = None

    vary: Annotated[
        tuple[str, ...],
        Option(
            "Setting that may differ, because its effect is compared, such as workers. Repeatable.",
            metavar="NAME",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)
        if len(self.files) < 2:
            raise UsageError("dlio bench compare: name two reports or more")


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure, or a ratio, of the first report and of another one; None where it has none."""

    first: Figure | Ratio | None
    other: Figure | Ratio | None
    file: str
    """The other report."""

    @property
    def shown(self) -> Figure | Ratio:
        """The one that tells name, unit and direction."""
        either = self.first or self.other
        assert either is not None
        return either

    @property
    def ratio(self) -> float | None:
        """Median of the other report over that of the first."""
        if self.first is None or self.other is None or not median(self.first.values):
            return None
        return median(self.other.values) / median(self.first.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the ratio; None of fewer than two repeats."""
        if self.first is None or self.other is None:
            return None
        return interval_of_ratio(self.other.values, self.first.values)

    @property
    def title(self) -> str:
        """Name and labels in one line."""
        labels = labels_text(self.shown.labels)
        return f"{labels}: {self.shown.name}" if labels else self.shown.name


def command(compared: CompareOptions) -> None:
    """Compare reports of benchmarks, figure by figure.

    Figures are matched by name and labels: medians, ranges, and ratios to the first report with
    95 % confidence intervals. Differences of the machines are printed first. Reports of other
    benchmarks, or settings, have no ratios: --vary names a setting whose effect is compared.
    """
    reports = [read_report(path) for path in compared.files]
    first, others = reports[0], reports[1:]
    settings = dict.fromkeys(key for report in reports for key in report.settings)
    for name in compared.vary:
        one_of("--vary", name.replace("-", "_"), list(settings))
    for other in others:
        show_notes(list(differences(first, other)))
    changes = [change for other in others for change in changes_of(first, other)]
    if not any(change.first and change.other for change in changes):
        raise UsageError(
            f"{first.path}: no figure is in this report and in another one: compare reports of the "
            "same benchmark"
        )
    unlike = {other.path: unlike_settings(first, other, compared.vary) for other in others}
    for other in others:
        mine = [change for change in changes if change.file == other.path]
        _show(first, other, mine, unlike[other.path])
    if compared.worse_than is None:
        return
    if any(unlike.values()):
        raise UsageError("--worse-than: the settings of the reports differ, as said above")
    worse = [change for change in changes if is_worse(change, compared.worse_than)]
    show_notes(
        [
            f"worse by more than {compared.worse_than:g}: {printable(change.title)} in "
            f"{printable(change.file)} ({change.ratio:.3g})"
            for change in worse
        ]
    )
    if worse:
        sys.exit(1)


def changes_of(first: SavedReport, other: SavedReport) -> list[FigureChange]:
    """Return figures and ratios of both reports, those that only one has included.

    Forecasts are compared with forecasts only.
    """
    ours, theirs = _by_key(first), _by_key(other)
    return [
        FigureChange(ours.get(key), theirs.get(key), other.path)
        for key in dict.fromkeys([*ours, *theirs])
    ]


def unlike_settings(
    first: SavedReport, other: SavedReport, varied: Sequence[str] = ()
) -> list[str]:
    """Return a phrase for each setting, or benchmark, with which figures are of other things.

    A setting that only one of the reports has is of another version of dlio, and is left alone.
    """
    if first.benchmark != other.benchmark:
        return [f"benchmark {first.benchmark} and {other.benchmark}"]
    free = _FREE | {name.replace("-", "_") for name in varied}
    return [
        f"{key} {_setting(first.settings[key])} and {_setting(other.settings[key])}"
        for key in first.settings
        if key in other.settings and key not in free and first.settings[key] != other.settings[key]
    ]


def _setting(value: object) -> str:
    return "not given" if value in (None, "") else str(value)


def is_worse(change: FigureChange, factor: float) -> bool:
    """True if the whole interval of the ratio is worse by more than a factor.

    Without an interval, the ratio itself. A figure without a direction is never worse.
    """
    ratio, interval = change.ratio, change.interval
    if ratio is None or not change.shown.better:
        return False
    low, high = interval or (ratio, ratio)
    if change.shown.better == "lower":
        return low > factor
    return high < 1 / factor


def differences(first: SavedReport, other: SavedReport) -> Iterator[str]:
    """Yield a sentence for each difference of the environments, and of the benchmarks, or one for
    two reports of the same run."""
    if replace(first, path="") == replace(other, path=""):
        yield printable(f"warning: {first.path} and {other.path} are of one run: nothing differs")
    if first.benchmark != other.benchmark:
        yield printable(
            f"warning: different benchmarks: {first.benchmark} in {first.path}, {other.benchmark} "
            f"in {other.path}"
        )
    mine, its = _environment(first.environment), _environment(other.environment)
    unknown: dict[str, list[str]] = {first.path: [], other.path: []}
    for key in dict.fromkeys([*mine, *its]):
        for report, known in ((first, mine), (other, its)):
            if known.get(key) is None:
                unknown[report.path].append(key)
        if None not in (mine.get(key), its.get(key)) and mine[key] != its[key]:
            warning = "warning: " if key.split(" of ")[0] in _WARNED else ""
            yield printable(f"{warning}another {key} in {other.path}: {mine[key]} and {its[key]}")
    for path, keys in unknown.items():
        if keys := [key for key in keys if key.split(" of ")[0] in _WARNED]:
            yield printable(f"{path} does not say its {', '.join(keys)}")
    for report in (first, other):
        if report.old:
            yield printable(
                f"{report.path} is an old report: it may lack repeats, and directions of figures"
            )


def _environment(environment: Mapping[str, Any]) -> dict[str, object]:
    """Return the values to compare, by what they are."""
    values = {key: environment[key] for key in _PLAIN if key in environment}
    versions = environment.get("versions")
    if isinstance(versions, dict):
        values |= {f"version of {name}": version for name, version in versions.items()}
    systems = environment.get("file_systems")
    for number, system in enumerate(systems if isinstance(systems, list) else []):
        if isinstance(system, dict):
            values[f"file system of path {number + 1}"] = (
                f"{system.get('type')} ({system.get('options', '')})"
            )
    return values


def _by_key(report: SavedReport) -> dict[Key, Figure | Ratio]:
    values: dict[Key, Figure | Ratio] = {}
    both: list[Figure | Ratio] = [*report.figures, *report.ratios]
    for each in both:
        kind = "ratio" if isinstance(each, Ratio) else "forecast" if each.forecast else "figure"
        values[kind, each.name, tuple(sorted(each.labels.items()))] = each
    return values


def _show(
    first: SavedReport,
    other: SavedReport,
    changes: Sequence[FigureChange],
    unlike: Sequence[str],
) -> None:
    rows = [
        (
            printable(change.title),
            printable(change.shown.unit if isinstance(change.shown, Figure) else ""),
            *(
                "-" if each is None else range_text(each.values)
                for each in (change.first, change.other)
            ),
            *(("", "") if unlike else (f"{change.ratio:.3f}", _interval(change))),
        )
        for change in changes
        if change.ratio is not None
    ]
    if rows:
        table(
            printable(f"{other.path} compared with {first.path}"),
            ("figure", "unit", "first", "other", "ratio", "95 %"),
            rows,
            left=2,
        )
        if unlike:
            names = [words.split()[0] for words in unlike]
            remedy = "" if names == ["benchmark"] else f" (--vary {' --vary '.join(names)} if so)"
            show_notes(
                [
                    printable(
                        f"without ratios, as the reports differ in {'; '.join(unlike)}: figures "
                        f"are of other things, unless you compare just that{remedy}"
                    )
                ]
            )
        if any(row[-1].endswith("*") for row in rows):
            show_notes([f"*: fewer than {ENOUGH} repeats: too few for 95 %, the range of draws"])
    for file, missing in (
        (other.path, [each for each in changes if each.other is None]),
        (first.path, [each for each in changes if each.first is None]),
    ):
        if missing:
            show_notes([f"not in {printable(file)}: {printable(_listed(missing))}"])


def _listed(changes: Sequence[FigureChange]) -> str:
    """Return names of figures, each with all the labels that it has."""
    names: dict[str, list[str]] = {}
    for change in changes:
        listed = names.setdefault(change.shown.name, [])
        if labels := labels_text(change.shown.labels):
            listed.append(labels)
    return "; ".join(
        f"{name} ({' | '.join(labels)})" if labels else name for name, labels in names.items()
    )


def _interval(change: FigureChange) -> str:
    if change.interval is None:
        return "-"
    low, high = change.interval
    few = any(each and len(each.values) < ENOUGH for each in (change.first, change.other))
    return f"{low:.3f} to {high:.3f}{'*' if few else ''}"
