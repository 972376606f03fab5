"""The case small of `dlio bench loader`: pictures that take less time to decode than to handle."""

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from dlio.util.units import counted
from dlio_bench.bench_data import draw_small_pictures
from dlio_bench.bench_processes import cores_for, spinning_processes
from dlio_bench.peers.contender_table import CONTENDERS
from dlio_bench.peers.environments import missing
from dlio_bench.peers.process import ContenderProcess, race, start_contender
from dlio_bench.peers.standalone.runners.protocol import Task
from dlio_bench.race_report import (
    race_figures,
    race_ratios,
    show_absent,
    show_race,
    show_ratios,
)
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.terminal import advance, expect, table

_SIDE: Final = 64
_SIZE: Final = 32
_OTHERS: Final = 2
"""Threads or processes of other loaders."""
_FLOATS: Final = ("dlio_floats",)
"""dlio with ToTensor, for peers that make floats."""
_PEERS: Final = ("torch", "turboloader", "turboloader_uint8", "dali")


def small(
    repeats: int,
    batch_size: int,
    most: int,
    samples: int,
    patience_s: float,
    beside: int,
    peers: Iterable[str] = _PEERS,
    look_s: float = 3.0,
) -> dict[str, object]:
    """Passes over drawn JPEGs of 64 pixels, as random resized crops of 32, with labels that are
    compared: dlio from its RAM tier with 1, 2 and `most` threads, the others with 2 threads or
    processes, in turn, as `loader_bench.measure` has them: `alone`.

    With processes to spin the same again next to them, `loaded`, and `shares` by contender:
    `cores` that a process of as many threads gets there that only spins, measured in `look_s`
    seconds before the passes and after them; samples for each second of processor time alone
    (`cpu_samples_per_s`) and there; `own_cores`, its seconds on processors for each second there;
    and `kept_share`, samples/s there over `cores` times the samples for each such second alone.
    """
    threads = tuple(dict.fromkeys((1, 2, most)))
    entries = {f"dlio_{count}": ("dlio", count) for count in threads}
    entries |= {name: (name, _OTHERS) for name in (*_FLOATS, *peers)}
    absent = {
        name: why
        for name, (program, _) in entries.items()
        if (kept := CONTENDERS[program].environment) and (why := missing(kept)) is not None
    }
    entries = {name: each for name, each in entries.items() if name not in absent}
    pairs = _pairs(threads, entries)
    counts = {count for _, count in entries.values()}
    report: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "repeats": repeats}
    machine = describe_machine(("dlio", "torch", "numpy", "pillow", "simplejpeg"))
    assert isinstance(machine["versions"], dict)
    expect(len(entries) * (1 + repeats) * (2 if beside else 1))
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        folder = draw_small_pictures(scratch, samples, _SIDE)
        classes = sorted(os.listdir(folder))
        files = [
            os.path.join(folder, name, file)
            for name in classes
            for file in sorted(os.listdir(os.path.join(folder, name)))
        ]
        labels = [classes.index(file.split(os.sep)[-2]) for file in files]
        for place, spinning in (("alone", 0), ("loaded", beside)):
            if place == "loaded" and not spinning:
                continue
            starts: dict[str, Callable[[], ContenderProcess]] = {}
            for name, (program, count) in entries.items():
                own = os.path.join(scratch, f"{name}-{place}")
                task = Task(files, labels, _SIZE, batch_size, count, own)
                starts[name] = partial(
                    start_contender, program, task, patience_s, CONTENDERS[program].environment
                )
            with spinning_processes(spinning):
                looks = [_fair_cores(counts if spinning else (), look_s)]
                outcome = race(starts, labels, repeats, advance)
                looks.append(_fair_cores(counts if spinning else (), look_s))
            figures = race_figures(outcome)
            machine["versions"].update(outcome.versions)
            report[place] = {
                "absent": {**absent, **outcome.absent},
                **figures,
                **race_ratios(figures, pairs),
            }
    if beside:
        report["spinning_processes"] = beside
        report["shares"] = _shares(
            report["alone"],
            report["loaded"],
            {
                name: statistics.mean(look[count] for look in looks)
                for name, (_, count) in entries.items()
            },
        )
    report["pairs"] = pairs
    report["machine"] = machine
    return report


def show_small(report: Mapping[str, object]) -> None:
    """Print the tables of a report of `small`."""
    known: Any = report
    load = f"next to {counted(known.get('spinning_processes', 0), 'spinning process')}"
    for place in ("alone", "loaded"):
        if place not in known:
            continue
        title = (
            f"JPEGs of {_SIDE} pixels to {_SIZE}, {load if place == 'loaded' else place}: "
            f"{known['samples']:,}, batches of {known['batch_size']}, median of "
            f"{known['repeats']} (min to max)"
        )
        figures = known[place]
        show_race(title, figures, {name: _title(name) for name in figures["samples_per_s"]})
        show_absent(figures)
        show_ratios(figures, known["pairs"])
    if "shares" in known:
        headings = (
            *("loader", "fair cores", "its cores", "samples a CPU s, alone", "then"),
            "share kept",
        )
        rows = [
            (
                _title(name),
                f"{share['cores']:.2f}",
                f"{share['own_cores']:.2f}",
                f"{share['cpu_samples_per_s']:,.0f}",
                f"{share['cpu_samples_per_s_loaded']:,.0f}",
                f"{share['kept_share']:.2f}",
            )
            for name, share in known["shares"].items()
        ]
        table(f"shares {load}", headings, rows)


def _title(name: str) -> str:
    if name not in CONTENDERS:
        return f"dlio, RAM tier, threads: {name[5:]}"
    return CONTENDERS[name].title.replace("(", f"({_OTHERS} ")


def _pairs(threads: tuple[int, ...], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    pairs = [(f"dlio_{more}", f"dlio_{fewer}") for fewer, more in itertools.pairwise(threads)]
    pairs += [("dlio_2", name) for name in names if not name.startswith("dlio_")]
    pairs += [(each, "turboloader") for each in _FLOATS if "turboloader" in names]
    return {f"{one}_over_{other}": (one, other) for one, other in pairs}


def _fair_cores(counts: Iterable[int], look_s: float) -> dict[int, float]:
    """Cores that processes get now, by their numbers of threads."""
    return {count: cores_for(count, look_s) for count in counts}


def _shares(
    alone: Mapping[str, Any], loaded: Mapping[str, Any], fair: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    shares = {}
    for name in alone["samples_per_s"]:
        places = [each for each in (alone, loaded) if name in each["samples_per_s"]]
        cpu_ms = [each["cpu_ms_per_sample"][name]["median"] for each in places]
        if len(places) < 2 or not all(cpu_ms):  # Too few samples for the clock of processes.
            continue
        rate = loaded["samples_per_s"][name]["median"]
        for_each = [1000 / each for each in cpu_ms]
        shares[name] = {
            "cores": fair[name],
            "own_cores": rate / for_each[1],
            "cpu_samples_per_s": for_each[0],
            "cpu_samples_per_s_loaded": for_each[1],
            "kept_share": rate / (fair[name] * for_each[0]),
        }
    return shares
