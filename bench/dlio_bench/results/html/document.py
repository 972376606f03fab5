"""The page: an overview of all reports, and a section for each.

Names, labels and notes of reports may hold anything: all go through `dlio.util.printable.as_html`.
The page needs no network and runs no script, which its content security policy also forbids.
"""

import base64
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Final

from dlio.errors import UsageError, printable
from dlio.util.options import Option, check
from dlio.util.printable import as_html
from dlio.util.units import counted
from dlio.util.whole_files import check_writable, write_whole
from dlio_bench.results.html.plots import format_number, plain_labels, plot, strip, waterfall
from dlio_bench.results.repeats import ENOUGH, interval_of_median
from dlio_bench.results.report_values import Figure, PlotCurve, Ratio
from dlio_bench.results.saved_report import SavedReport, find_reports, read_report

_ROWS_OPEN: Final = 40
"""Figures of a report from which on their table is folded, but for those of the first name: the
benchmark's main figure."""


def page(reports: Sequence[SavedReport], title: str) -> str:
    """Return the HTML of a page with reports, in their order."""
    with open(os.path.join(os.path.dirname(__file__), "style.css"), encoding="utf-8") as file:
        style = file.read()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    numbers = itertools.count()
    sections = "".join(_section(k, report, numbers) for k, report in enumerate(reports))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{as_html(title)}</title>\n<style>{style}</style></head>\n"
        f'<body><header id="top"><h1>{as_html(title)}</h1>{_overview(reports)}</header>\n'
        f"<main>{sections}</main></body></html>\n"
    )


def _cores(number: object) -> str:
    """Return a report's number of cores in words; the report may have been changed."""
    return counted(number, "core") if isinstance(number, int) else "unknown number of cores"


def _overview(reports: Sequence[SavedReport]) -> str:
    rows = []
    for k, report in enumerate(reports):
        environment = report.environment
        cells = (
            report.benchmark,
            report.started.replace("T", " ").replace("+00:00", " UTC"),
            "" if report.seconds is None else f"{report.seconds:,.0f} s",
            f"{environment.get('processor', '')}, {_cores(environment.get('cores'))}",
            str(environment.get("commit") or ""),
        )
        link = f'<a href="#r{k}">{as_html(report.name)}</a>'
        rows.append([link, *(as_html(cell) for cell in cells)])
    heads = ("report", "benchmark", "started", "took", "machine", "commit")
    notes = "".join(
        f'<p class="note"><a href="#r{k}">{as_html(report.name)}</a>: {as_html(note)}</p>'
        for k, report in enumerate(reports)
        for note in report.notes
    )
    return _table("Reports", heads, rows) + notes


def _section(number: int, report: SavedReport, numbers: Iterator[int]) -> str:
    parts = [
        f'<section aria-labelledby="r{number}"><h2 id="r{number}">{as_html(report.name)}</h2>',
        f'<p class="muted">benchmark {as_html(report.benchmark)} '
        '<a class="back" href="#top">back to the overview</a></p>',
    ]
    if report.command:
        parts.append(f'<p class="command">{as_html(report.command)}</p>')
    parts += [f'<p class="note">{as_html(note)}</p>' for note in report.notes]
    if report.old:
        parts.append('<p class="note">An old report: repeats may be missing.</p>')
    if report.ratios:
        parts.append(_ratios(report.ratios))
    plots: dict[tuple[str, str], list[PlotCurve]] = {}
    for curve in report.curves:
        plots.setdefault((curve.name, curve.kind), []).append(curve)
    drawn = [plot(curves, numbers) for curves in plots.values()]
    drawn += [waterfall(each, numbers) for each in report.waterfalls]
    if drawn:
        parts.append(f'<h3>Plots</h3><div class="figures">{"".join(drawn)}</div>')
    if report.figures:
        table, count = _figures(report.figures), len(report.figures)
        if count > _ROWS_OPEN:
            first = [each for each in report.figures if each.name == report.figures[0].name]
            parts.append(f"<h3>Figures</h3>{_figures(first)}")
            parts.append(f"<details><summary>All figures ({count})</summary>{table}</details>")
        else:
            parts.append(f"<h3>Figures</h3>{table}")
    parts += [_environment(report), "</section>"]
    return "".join(parts)


def _figures(figures: Sequence[Figure]) -> str:
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.name, figure.unit), []).append(figure)
    rows = []
    for (name, unit), members in groups.items():
        values = [value for figure in members for value in figure.values]
        low, high = min(0.0, *values), max(0.0, *values)
        for figure in members:
            forecast = ' <span class="forecast">forecast</span>' if figure.forecast else ""
            rows.append(
                (
                    as_html(name) + forecast,
                    as_html(plain_labels(figure.labels)),
                    _median(figure.values),
                    as_html(unit),
                    figure.better,
                    strip(figure.values, low, high),
                    str(len(figure.values)),
                )
            )
    heads = (
        *("figure", "of", "#median (min to max)", "unit", "better"),
        *("repeats, from 0", "#repeats"),
    )
    return _table("Medians of all repeats, and their range", heads, rows)


def _ratios(ratios: Sequence[Ratio]) -> str:
    ends = [value for ratio in ratios for value in ratio.values]
    low, high = min(0.0, *ends), max(1.0, *ends)
    rows = []
    for ratio in ratios:
        interval, mark = interval_of_median(ratio.values), "*" if len(ratio.values) < ENOUGH else ""
        text = "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}{mark}"
        rows.append(
            (
                as_html(ratio.name),
                as_html(plain_labels(ratio.labels)),
                _median(ratio.values),
                text,
                strip(ratio.values, low, high, interval),
                str(len(ratio.values)),
            )
        )
    heads = ("ratio", "of", "#median (min to max)", "#95 %", "repeats, from 0", "#repeats")
    foot = (
        f'<p class="muted">* fewer than {ENOUGH} repeats: too few for a 95 % interval of a '
        "median, which is wider than this.</p>"
    )
    few = any(row[3].endswith("*") for row in rows)
    return "<h3>Ratios</h3>" + _table("Ratios of the same repeat", heads, rows) + foot * few


def _environment(report: SavedReport) -> str:
    rows: list[tuple[str, object]] = [*report.environment.items()]
    rows += [(f"seed: {key}", value) for key, value in report.seeds.items()]
    rows += [(f"setting: {key}", value) for key, value in report.settings.items()]
    items = "".join(
        f"<dt>{as_html(str(key).replace('_', ' '))}</dt><dd>{as_html(_text(value))}</dd>"
        for key, value in rows
        if value not in (None, "", [], {})
    )
    return f"<details><summary>Environment and settings</summary><dl>{items}</dl></details>"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list | tuple):
        return "; ".join(_text(each) for each in value)
    return format_number(value) if isinstance(value, float) else str(value)


def _median(values: Sequence[float]) -> str:
    text = format_number(median(values))
    if len(values) == 1:
        return text
    return (
        f'<span>{text} <span class="range">({format_number(min(values))} to '
        f"{format_number(max(values))})</span></span>"
    )


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls on its own where it is too wide, by keyboard too.

    On a phone each row is a block, with the heads next to the cells. A column without any text is
    left out. `#` in a head, which is a text of ours, marks a column of numbers. Cells are HTML, and
    the first one is the head of its row.
    """
    cells = [list(row) for row in rows]
    kept = [k for k in range(len(heads)) if not k or any(row[k] for row in cells)]
    head = "".join(f'<th scope="col"{_class(heads[k])}>{heads[k].lstrip("#")}</th>' for k in kept)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(
            f'<td data-head="{heads[k].lstrip("#")}"{_class(heads[k])}>{row[k]}</td>'
            for k in kept[1:]
        )
        + "</tr>"
        for row in cells
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _class(head: str) -> str:
    return ' class="number"' if head.startswith("#") else ""


# The command


@dataclass(frozen=True, slots=True)
class HtmlOptions:
    """The options of `dlio bench html`."""

    sources: Annotated[
        tuple[str, ...],
        Option("Reports of --report, or folders of them.", positional=True, metavar="DIR|FILE"),
    ]
    output: Annotated[str, Option("File to write.", metavar="FILE")] = "page.html"
    title: Annotated[str, Option("Heading of the page.", metavar="TEXT")] = "dlio bench"

    def __post_init__(self) -> None:
        check(self)
        if not self.sources:
            raise UsageError("dlio bench html: name reports, or a folder of them")


def command(options: HtmlOptions) -> None:
    """Make a self-contained page of reports: tables, ratios with intervals, and plots.

    The page is one file without scripts. It fetches nothing.
    """
    check_writable("--output", options.output)
    reports = [read_report(path) for path in find_reports(options.sources)]
    text = page(reports, options.title).encode(errors="replace")
    write_whole(options.output, lambda file: file.write(text))
    print(f"{printable(options.output)}: {counted(len(reports), 'report')}, {len(text):,} bytes")
