"""Tables and drawings made of the committed reports of `dlio bench`.

A file in docs/benchmarks/data holds {"title", "command", "data", "report"}: `report` is the file
written by --report. Older ones also hold {"date", "load_average", "machine"}, as their reports have
no envelope.
"""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from dlio_bench.peers.contender_table import CASES, CONTENDERS, RATIOS, cpu_ratio

__all__ = ["DATA", "loader_rows", "number", "page", "read", "readme_part", "spread"]

DATA: Final = Path(__file__).resolve().parents[1] / "benchmarks" / "data"
Json = dict[str, "Json"] | list["Json"] | str | float | int | bool | None

_CONTENDERS: Final = {
    "torch": "torch DataLoader, Pillow (2 processes)",
    "torch_floats": "the same with ToTensor",
    "torch_dlio_data": "torch DataLoader over `dlio.open` (2 processes)",
    "full_decode": "bare loop: decode all, resize (2 threads)",
    "ceiling": "bare loop: dlio's decoder alone (2 threads)",
    "dlio": "**dlio.DataLoader** (2 threads)",
    "dlio_rows": "**dlio.DataLoader**, packed with restart rows",
    "dlio_256": "**dlio.DataLoader**, packed at 256 pixels, quality 90",
}


def read(name: str) -> dict[str, Json]:
    """Return a committed report by its file's name without `.json`.

    `date`, `load_average` and `machine` are those of the report's envelope, where it has one.
    """
    loaded: dict[str, Json] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    report = _dict(loaded["report"])
    if "schema" in report:
        machine = _dict(report["environment"])
        loaded |= {
            "date": str(report["started"])[:10],
            "load_average": machine["load_average"],
            "machine": machine,
        }
    return loaded


def number(value: float) -> str:
    """Format with three significant digits, or whole with separators from 1,000 on."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def spread(value: Json) -> str:
    """Format a number, or {"median", "min", "max"} as `median (min to max)`."""
    if isinstance(value, dict):
        median, low, high = (_float(value[key]) for key in ("median", "min", "max"))
        return f"{number(median)} ({number(low)} to {number(high)})"
    return number(_float(value))


def loader_rows(name: str = "loader") -> list[tuple[str, str, str, str]]:
    """Return each contender's name, samples/s, seconds to a later epoch's first batch, and MiB."""
    report = _dict(read(name)["report"])
    first, footprint = _dict(report["first_batch_s"]), _dict(report["footprint"])
    rows = []
    for key, rate in _dict(report["samples_per_s"]).items():
        memory = _dict(footprint[key])["pss_MiB"] if key in footprint else None
        rows.append(
            (
                _CONTENDERS.get(key, key),
                spread(rate),
                f"{_float(_dict(first[key])['median']):.3f}" if key in first else "",
                "" if memory is None else number(_float(memory)),
            )
        )
    return rows


def page(name: str) -> str:
    """Return a section of the benchmarks' page: provenance, table and drawing of one report."""
    stored = read(name)
    report = _dict(stored["report"])
    parts = [f"## {stored['title']}", _provenance(stored), _RENDERERS[name](report)]
    return "\n\n".join(parts)


def readme_gain() -> str:
    """Return the first sentence of README.md: its table in one line."""
    report = _dict(read("loader")["report"])
    ratio = _dict(report["dlio_over_torch"])
    middle, low, high = (number(_float(ratio[key])) for key in ("median", "min", "max"))
    first = _dict(report["first_batch_s"])
    mine, theirs = (1e3 * _float(_dict(first[name])["median"]) for name in ("dlio", "torch"))
    return (
        f"**{middle} times the samples per second of torch's DataLoader** with as many workers "
        f"({low} to {high}), and {mine:.0f} ms to a later epoch's first batch in place of "
        f"{theirs:.0f}:"
    )


def readme_part() -> str:
    """Return the measured table of README.md, with its provenance."""
    stored = read("loader")
    machine = _dict(stored["machine"])
    assert isinstance(stored["load_average"], list)
    load = number(_float(stored["load_average"][0]))
    return (
        _table(
            ("loader", "samples/s", "first batch of a later epoch, s", "PSS, MiB"), loader_rows()
        )
        + f"\n\n`{stored['command']}`: {stored['data']}; medians (minimum to maximum), commit "
        f"`{machine['commit']}`, {machine['cores']} cores, load average {load}.\n"
    )


def _provenance(stored: Mapping[str, Json]) -> str:
    machine, load = _dict(stored["machine"]), stored["load_average"]
    assert isinstance(load, list)
    own = _dict(_dict(_dict(stored["report"]).get("machine", {})).get("versions", {}))
    named = {**_dict(machine["versions"]), **{key: value for key, value in own.items() if value}}
    versions = ", ".join(f"{key} {value}" for key, value in named.items())
    before, after = (number(_float(value)) for value in load)
    return "\n".join(
        [
            "```text",
            str(stored["command"]),
            "```",
            "",
            "| | |",
            "|---|---|",
            f"| commit | `{machine['commit']}` |",
            f"| date | {stored['date']} |",
            f"| data | {stored['data']} |",
            f"| machine | {machine['processor']}, {machine['cores']} cores, {machine['memory']} |",
            f"| load average before and after | {before}, {after} |",
            f"| versions | Python {machine['python']}, {versions} |",
        ]
    )


def _loader(report: Mapping[str, Json]) -> str:
    table = _table(
        ("loader", "samples/s", "first batch of a later epoch, s", "PSS, MiB"), loader_rows()
    )
    ratios = [
        f"- {key.replace('_over_', ' / ')}: {spread(value)}"
        for key, value in report.items()
        if "_over_" in key
    ]
    rates = {
        _CONTENDERS.get(key, key).replace("*", ""): _dict(value)
        for key, value in _dict(report["samples_per_s"]).items()
    }
    text = "Ratios of the same repeat, median (min to max):\n\n" + "\n".join(ratios)
    return "\n\n".join([table, _bars("samples/s", rates), text])


def _peers(report: Mapping[str, Json]) -> str:
    """Tables of `dlio bench loader --peers all`, one for each case, and ratios."""
    rates, cpu = _dict(report["samples_per_s"]), _dict(report["cpu_ms_per_sample"])
    parts = []
    for case, title in {**CASES, "": "limits of these files, as they are"}.items():
        names = [name for name in rates if CONTENDERS[name].case == case]
        rows = [
            (
                f"**{CONTENDERS[name].title}**"
                if name.startswith("dlio")
                else CONTENDERS[name].title,
                str(_dict(report["output"])[name] or ""),
                spread(rates[name]),
                number(_float(_dict(cpu[name])["median"])),
                number(_float(_dict(report["cold_first_batch_s"])[name])),
            )
            for name in names
        ]
        if rows:
            head = (title, "batches", "samples/s", "CPU, ms a sample", "first batch of all, s")
            parts.append(_table(head, rows))
    ratios = [
        (key.replace("_over_", " / "), spread(report[key]), _of_cpu(report, key))
        for key in RATIOS
        if key in report
    ]
    heads = ("ratio of the same repeat", "samples/s, median (min to max)", "CPU time, medians")
    parts.append(_table(heads, ratios))
    parts += [f"- Left out: {name}: {why}" for name, why in _dict(report["absent"]).items()]
    return "\n\n".join(parts)


def _of_cpu(report: Mapping[str, Json], key: str) -> str:
    value = cpu_ratio(report, key)
    return "" if value is None else number(value)


def _readers(report: Mapping[str, Json]) -> str:
    columns = {
        "library": "compared with",
        "pass_samples_per_s": "in order, samples/s",
        "pass_over_library": "over the library",
        "random_samples_per_s": "at random, samples/s",
        "random_over_library": "over the library",
        "pack_samples_per_s": "`dlio pack`, samples/s",
    }
    rows = [
        [key, *(_cell(_dict(value)[column]) for column in columns)]
        for key, value in _dict(report["formats"]).items()
    ]
    return _table(("format", *columns.values()), rows)


def _plan(report: Mapping[str, Json]) -> str:
    plan = _dict(report["plan"])
    rows = []
    for key, value in plan.items():
        if isinstance(value, dict):
            moved, messages = value.get("moved_share"), value.get("messages")
            rows.append(
                (
                    "10^9 samples, `global`" if key == "billion" else f"`{key}`",
                    "" if moved is None else f"{100 * _float(moved):.1f} %",
                    "" if messages is None else number(_float(messages)),
                    spread(value["seconds_a_rank"]),
                )
            )
    head = ("mode", "bytes between nodes", "messages", "CPU seconds to plan one rank's epoch")
    return _table(head, rows)


def _chaos(report: Mapping[str, Json]) -> str:
    tables = []
    for case in ("storm", "overhead", "suspicions"):
        figures = _dict(report.get(case, {}))
        rows = figures.get("rows", [])
        assert isinstance(rows, list)
        if rows:
            named = [_dict(row) for row in rows]
            head = [name for name in named[0] if name != "ratios"]
            cells = [[_cell(row[name]) for name in head] for row in named]
            tables.append(_table([name.replace("_", " ") for name in head], cells))
    return "\n\n".join(tables)


def _figures(report: Mapping[str, Json]) -> str:
    """Tables of all figures and ratios of a report, and what was skipped."""
    tables = []
    for key, head in (("figures", ("figure", "of", "value")), ("ratios", ("ratio", "value"))):
        rows = report.get(key, [])
        assert isinstance(rows, list)
        cells = []
        for row in map(_dict, rows):
            labels = ", ".join(str(value) for value in _dict(row.get("labels", {})).values())
            value = f"{spread({side: row[side] for side in ('median', 'min', 'max')})}"
            name = str(row["name"])
            unit = str(row.get("unit", ""))
            cells.append([name, labels, f"{value} {unit}"] if key == "figures" else [name, value])
        tables.append(_table(head, cells))
    skipped = [f"- {name}: {why}" for name, why in _dict(report.get("skipped", {})).items()]
    return "\n\n".join([*tables, *(["Skipped:\n\n" + "\n".join(skipped)] if skipped else [])])


_RENDERERS: Final[dict[str, Callable[[Mapping[str, Json]], str]]] = {
    "loader": _loader,
    "peers": _peers,
    "readers": _readers,
    "plan": _plan,
    "chaos": _chaos,
    "gpu": _figures,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Json) -> str:
    return value if isinstance(value, str) else spread(value)


def _bars(unit: str, values: Mapping[str, Mapping[str, Json]]) -> str:
    """Draw medians as bars with a line from the least to the largest value, as inline SVG."""
    most = max(_float(value["max"]) for value in values.values())
    height, parts = 44 * len(values) + 24, []
    for row, (name, value) in enumerate(values.items()):
        low, median, high = (620 * _float(value[key]) / most for key in ("min", "median", "max"))
        top = 44 * row
        label = html.escape(name.replace("`", ""))
        parts.append(
            f'<text x="0" y="{top + 14}">{label}: {number(_float(value["median"]))}</text>'
            f'<rect x="0" y="{top + 20}" width="{median:.1f}" height="14" class="bar"/>'
            f'<path d="M{low:.1f} {top + 27}H{high:.1f}" class="range"/>'
        )
    style = (
        "text{font:14px sans-serif;fill:currentColor}.bar{fill:#3f51b5}"
        ".range{stroke:#ff9800;stroke-width:3}"
    )
    caption = f"{unit}: median, and the range of all repeats"
    return (
        f'<svg viewBox="0 0 640 {height}" width="100%" role="img" '
        f'aria-label="{caption}"><style>{style}</style>{"".join(parts)}'
        f'<text x="0" y="{height - 6}">{caption}</text></svg>'
    )


def _dict(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value


def _float(value: Json) -> float:
    assert isinstance(value, int | float)
    return float(value)
