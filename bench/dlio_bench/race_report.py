"""Figures of a race of contenders for a report, and their tables."""

from collections.abc import Mapping
from typing import Any

from dlio_bench.peers.contender_table import cpu_ratio
from dlio_bench.peers.process import RaceOutcome
from dlio_bench.results.repeats import Summary, ratio, spread
from dlio_bench.results.terminal import show_notes, table

_HEADINGS = (
    *("loader", "output", "samples/s", "CPU, ms", "cold, s", "first batch, s"),
    *("PSS, MiB", "proc.", "threads"),
)


def race_figures(outcome: RaceOutcome) -> dict[str, object]:
    """Return the figures of a race by contender: samples/s of each repeat, milliseconds on
    processors for each sample, types of batches, seconds to a pass's first batch, and memory,
    processes and threads."""
    races = outcome.races
    return {
        "samples_per_s": {
            name: {**spread(each.rates), "all": each.rates} for name, each in races.items()
        },
        "cpu_ms_per_sample": {
            name: spread([1000 * seconds for seconds in each.cpu]) for name, each in races.items()
        },
        "output": {name: each.output for name, each in races.items()},
        "cold_first_batch_s": {name: each.cold for name, each in races.items()},
        "first_batch_s": {name: spread(each.first) for name, each in races.items()},
        "footprint": {name: each.footprint for name, each in races.items()},
    }


def race_ratios(
    figures: Mapping[str, object], pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Summary]:
    """Return ratios of samples/s of the same repeat, by name: those of `pairs`, which has (one, the
    other) by the ratio's name, whose contenders both took part until the end."""
    rates: Any = figures["samples_per_s"]
    return {
        key: ratio(rates[one]["all"], rates[other]["all"])
        for key, (one, other) in pairs.items()
        if one in rates and other in rates
    }


def show_race(title: str, figures: Mapping[str, object], titles: Mapping[str, str]) -> None:
    """Print the contenders of a race that are in `titles`, under those, as a table."""
    rows = []
    known: Any = figures
    for name, rate in known["samples_per_s"].items():
        if name not in titles:
            continue
        space = known["footprint"][name]
        rows.append(
            (
                titles[name],
                known["output"][name] or "",
                _median(rate, ",.0f"),
                f"{known['cpu_ms_per_sample'][name]['median']:.3g}",
                f"{known['cold_first_batch_s'][name]:.2f}",
                f"{known['first_batch_s'][name]['median']:.3f}",
                f"{space['pss_MiB']:,.0f}",
                *(f"{space[key]}" for key in ("processes", "threads")),
            )
        )
    if rows:
        table(title, _HEADINGS, rows, left=2)


def show_ratios(figures: Mapping[str, object], pairs: Mapping[str, tuple[str, str]]) -> None:
    """Print the ratios of a race, next to those of processor time: the other's over the one's."""
    rows = [
        (
            key.replace("_over_", " / "),
            _median(figures[key], ".2f"),
            "-" if (cpu := cpu_ratio(figures, key, pairs)) is None else f"{cpu:.2f}",
        )
        for key in pairs
        if key in figures
    ]
    if rows:
        table("ratios", ("ratio", "samples/s, median (min to max)", "by CPU time"), rows)


def show_absent(figures: Mapping[str, object]) -> None:
    """Print who did not take part until the end, and why."""
    absent: Any = figures["absent"]
    show_notes([f"left out: {name} ({why})" for name, why in absent.items()])


def _median(value: Any, form: str) -> str:
    median, least, most = (format(value[key], form) for key in ("median", "min", "max"))
    return median if len(value["all"]) == 1 else f"{median} ({least} to {most})"
