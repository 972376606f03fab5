"""`--case messages`: messages of each exchange on 2 to 16 ranks, and its time on up to 10,000."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from dlio.comm import Communicator
from dlio.exchange.buckets import in_buckets, trainable
from dlio.exchange.exchange_spec import parse_exchange
from dlio.plan import exchange_cost as model
from dlio.plan.exchange_cost import ExchangeLoad, LinkCost
from dlio.util.cores import available_cores
from dlio.util.plot_files import picture
from dlio_bench.bench_ranks import LINK, TaskValue, WarmRanks, run, timed
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.monitor import ENVIRONMENT, Monitor
from dlio_bench.exchange_cases.overlap_case import fabrics_of
from dlio_bench.exchange_cases.variants import OneBatchTraining, nodes_for
from dlio_bench.results.repeats import spread
from dlio_bench.results.report_values import PlotCurve
from dlio_bench.results.terminal import steps
from dlio_bench.warm_ranks import warm_ranks

_SIZES: Final = tuple(1 << power for power in range(10, 25, 2))
"""1 KiB to 16 MiB."""
_STEPS: Final = 2
"""Steps whose messages are counted, or whole periods; each step of one has the same."""
_CARRIED: Final = (*(1 << power for power in range(1, 13)), 10_000)
_SHOWN: Final = (2, 16, 64, 256, 1024, 4096, 10_000)
"""The columns of the table."""
_PARAMETERS: Final = 25_600_000
_ADDED: Final = 1 << 22
"""Numbers of a timed addition."""
_PER_NODE: Final = 8
_FEW: Final = 8
"""So many ranks import torch side by side as fast as one process does."""
_BUCKETS: Final = 56
"""Buckets of ResNet-50's parameters."""


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Counted messages and bytes, the fitted model, its error, and its forecast."""
    from dlio.exchange import NAMES

    exchanges = options.exchanges or NAMES
    with ExitStack() as stack:
        many = sum(options.counts) > _FEW
        warm = stack.enter_context(warm_ranks([__name__])) if many else None
        rows = [
            row
            for p in steps(options.counts, "{} ranks".format)
            for row in _counted(p, exchanges, warm)
        ]
        starts = dict.fromkeys(fabrics_of(options)[0], warm)
        if many and LINK in starts:
            starts[LINK] = stack.enter_context(warm_ranks([__name__], LINK))
        links = {
            fabric: link_cost(fabric, _SIZES, 4 * options.repeats, its)
            for fabric, its in starts.items()
        }
        checks = [
            row
            for fabric, (link, _) in links.items()
            for p in steps([p for p in options.counts if p <= 4], "{} ranks, timed".format)
            for row in _checked(fabric, link, p, exchanges, options.repeats, starts[fabric])
        ]
    carried = _carried(options, exchanges, {name: link for name, (link, _) in links.items()})
    results: dict[str, Any] = {
        "rows": rows,
        "links": [
            {
                "fabric": name,
                "alpha_us": link.alpha_s * 1e6,
                "GB_per_s": 1e-9 / link.beta_s,
                "adding_GB_per_s": 1e-9 / link.gamma_s,
                "fit_error": error,
            }
            for name, (link, error) in links.items()
        ],
        "model_and_measured": checks,
        "carried": carried["rows"],
        "raw": carried["seconds"],
        "said": [
            "Messages and bytes of a rank and step, bytes in parts of the parameters'; counted by "
            "Open MPI's monitoring, a message as the point-to-point layer has it. An allreduce is "
            "inside MPI: it tells a ring's messages, the library chooses its own.",
            "Model and measured: the model is of messages. What ranks copy on their own, into "
            "buckets and out of them, is not in it, and counts where messages go through memory; "
            "nor is that ranks wait for their turn on shared cores.",
            f"Carried: seconds of a step's exchange of {_PARAMETERS:,} parameters, nothing hidden; "
            + carried["link"],
        ],
    }
    if options.plot is not None:
        draw(carried["seconds"], _CARRIED, carried["link"], options.plot)
        results["plot"] = options.plot
    return results


def forecasts(carried: Mapping[str, Sequence[float]]) -> list[PlotCurve]:
    """Return a curve for each exchange: the model's seconds against ranks, from `raw`."""
    return [
        PlotCurve(
            "seconds of a step's exchange",
            "scaling",
            "ranks",
            "s",
            tuple(float(p) for p in _CARRIED),
            tuple(seconds),
            {"exchange": name},
            forecast=True,
        )
        for name, seconds in carried.items()
    ]


def nodes_of(p: int) -> int:
    """Nodes that the ranks pretend to be on: at least 2, of 4 ranks where there are as many."""
    return max(2, p // 4)


def link_cost(
    fabric: str, sizes: Sequence[int], repeats: int, warm: WarmRanks | None = None
) -> tuple[LinkCost, float]:
    """Return the cost of messages and of additions on this machine, and the fit's error; `repeats`
    messages of each size in bytes are timed. `warm` starts ranks, as in `run`."""
    task = {"sizes": sizes, "repeats": repeats}
    report = run(message_times, task, 2, fabric, warm=warm)
    link, error = fit(sizes, report["crossing"])
    return replace(link, gamma_s=report["gamma_s"]), error


def _counted(p: int, exchanges: tuple[str, ...], warm: WarmRanks | None) -> list[dict[str, Any]]:
    task = {"nodes": nodes_of(p), "exchanges": exchanges}
    report = run(message_counts, task, p, environment=ENVIRONMENT, warm=warm)
    work = ExchangeLoad(report["parameter_bytes"], report["buckets"], p // nodes_of(p))
    rows = []
    for name, ranks in report["exchanges"].items():
        row: dict[str, Any] = {"ranks": p, "exchange": name}
        for who in ("counted", "told"):
            if who not in ranks[0]:
                row["not_counted"] = report["not_counted"]
                continue
            messages, size = zip(*(rank[who] for rank in ranks), strict=True)
            row[f"messages_{who}"] = sum(messages) / p
            row[f"bytes_{who}"] = sum(size) / p / work.size
            if who == "counted":
                row["most_messages"], row["most_bytes"] = max(messages), max(size) / work.size
        if name in model.FORMULAE:
            theory = model.counts(name, p, work)
            row["messages_in_theory"] = theory.messages
            row["bytes_in_theory"] = theory.size / work.size
            row["most_bytes_in_theory"] = theory.most_size / work.size
        rows.append(row)
    return rows


def _checked(
    fabric: str,
    link: LinkCost,
    p: int,
    exchanges: tuple[str, ...],
    repeats: int,
    warm: WarmRanks | None,
) -> list[dict[str, Any]]:
    """Measured exchanges next to the model's, for ranks that share this machine's cores."""
    names = [name for name in exchanges if name in model.FORMULAE]
    nodes = nodes_of(p)
    asked = [_EVERY_STEP.get(name, name) for name in names]
    task = {"nodes": nodes, "repeats": repeats, "exchanges": asked}
    report = run(exchange_times, task, p, fabric, warm=warm)
    # Bytes cost the cores that ranks share; the link was measured between two, and all share it.
    cores = 2 if fabric == LINK else available_cores()
    here = model.shared(link, p, cores)
    work = ExchangeLoad(report["parameter_bytes"], report["buckets"], p // nodes)
    rows = []
    for name, ask in zip(names, asked, strict=True):
        preset = "allreduce" if ask in _EVERY_STEP.values() else name
        predicted_s = model.seconds(preset, p, work, here)
        seconds = report["seconds"][ask]
        rows.append(
            {
                "fabric": fabric,
                "ranks": p,
                "exchange": ask,
                "measured_ms": spread([1e3 * each for each in seconds]),
                "model_ms": 1e3 * predicted_s,
                "model_over_measured": predicted_s / statistics.median(seconds),
            }
        )
    return rows


_EVERY_STEP: Final = {"local-sgd": "local-sgd(1)", "diloco": "diloco(1)", "noloco": "noloco(1)"}


def _carried(
    options: ExchangeBenchOptions, exchanges: tuple[str, ...], links: dict[str, LinkCost]
) -> dict[str, Any]:
    """The model's seconds for each preset on 2 to 10,000 ranks: within a node through memory,
    between nodes through TCP, or the substitute that was measured."""
    fitted = list(links.values())
    inside, link = links.get("memory", fitted[0]), links.get("tcp", fitted[-1])
    link = given_link(link, options.alpha_us, options.bandwidth_gbs)
    work = ExchangeLoad(4 * _PARAMETERS, _BUCKETS, _PER_NODE)
    names = [name for name in exchanges if name in model.FORMULAE]
    seconds = {
        name: [model.seconds(name, p, work, link, inside) for p in _CARRIED] for name in names
    }
    rows = [
        {"exchange": name, **{f"{p:,}": report[_CARRIED.index(p)] for p in _SHOWN}}
        for name, report in seconds.items()
    ]
    said = (
        f"{link.alpha_s * 1e6:.3g} µs a message, {1e-9 / link.beta_s:.3g} GB/s, "
        f"{_BUCKETS} buckets, nodes of {_PER_NODE}"
    )
    return {"rows": rows, "seconds": seconds, "link": said}


def given_link(link: LinkCost, alpha_us: float | None, bandwidth_gbs: float | None) -> LinkCost:
    """Return a link with the time of a message and the bandwidth that options give, if any."""
    if alpha_us is not None:
        link = replace(link, alpha_s=alpha_us * 1e-6)
    return link if bandwidth_gbs is None else replace(link, beta_s=1e-9 / bandwidth_gbs)


# The picture of `--case messages`: seconds of a step's exchange against ranks


def draw(
    seconds: Mapping[str, Sequence[float]], ranks: Sequence[int], title: str, path: str
) -> None:
    """A line an exchange, both axes logarithmic; PNG or SVG by the name's ending.

    Raises UsageError without matplotlib.
    """
    with picture(path) as pyplot:
        _, axes = pyplot.subplots(figsize=(8, 5.5))
        for (name, times), marker in zip(seconds.items(), "os^vDPX*<>", strict=False):
            axes.plot(ranks, times, marker=marker, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [f"{p:,}" for p in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("seconds of a step's exchange, none hidden")
        axes.grid(True, alpha=0.3)
        axes.legend()
        axes.set_title(title, fontsize=9)


# Fit the cost model of a message to measured messages


_LEAST_BETA_S: Final = 1e-13
"""Seconds per byte at 10 TB/s, which no memory reaches: bandwidths that are told stay finite."""


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[LinkCost, float]:
    """Return the link that fits measured messages best, and its root mean square relative error.

    Least squares of relative errors, because sizes in bytes and times span five decades.
    """
    weights = 1 / np.asarray(seconds)
    columns = np.stack([weights, np.asarray(sizes) * weights], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones(len(weights)), rcond=None)
    # On a busy machine small messages can take longer than large ones: the slope is then noise.
    link = LinkCost(max(0.0, float(alpha)), max(_LEAST_BETA_S, float(beta)))
    errors = [link.message(n) / s - 1 for n, s in zip(sizes, seconds, strict=True)]
    return link, math.sqrt(sum(error * error for error in errors) / len(errors))


# Ranks that count messages, and ranks that time them


def message_counts(comm: Communicator, nodes: int, exchanges: list[str]) -> dict[str, TaskValue]:
    """Messages and bytes a step of each rank, by exchange: `told` by the exchange, and `counted`
    by the MPI library if it counts."""
    try:
        monitor, why = Monitor(), None
    except OSError as error:
        monitor, why = None, str(error)
    training = OneBatchTraining("perceptron", 2, comm.rank)
    by_exchange = {}
    for name in exchanges:
        steps = max(parse_exchange(name).period, _STEPS)
        exchange = training.distribute(name, nodes_for(name, nodes, comm.size))
        comm.barrier()
        before = (0, 0) if monitor is None else monitor.read()
        for _ in range(steps):
            training.step(exchange)
        exchange.finish()
        # Counted messages have been handed to MPI: none of a later step is among them.
        after = (0, 0) if monitor is None else monitor.read()
        totals = exchange.statistics()
        comm.barrier()
        exchange.close()
        mine = {"told": [totals["messages"] / steps, totals["bytes"] / steps]}
        if monitor is not None:
            mine["counted"] = [(b - a) / steps for a, b in zip(before, after, strict=True)]
        by_exchange[name] = comm.allgather(mine)
    return {**_sizes(training), "not_counted": why, "exchanges": by_exchange}


def _sizes(training: OneBatchTraining) -> dict[str, int]:
    buckets = len(in_buckets(trainable(training.model)))
    return {"parameter_bytes": training.bytes, "buckets": buckets}


def message_times(comm: Communicator, sizes: list[int], repeats: int) -> dict[str, TaskValue]:
    """Median seconds of a message by size, where both of two ranks send at once, as exchanges do;
    and seconds to add a byte."""
    other = 1 - comm.rank
    crossing = []
    for size in sizes:
        out, into = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def cross(out: Any = out, into: Any = into) -> None:
            comm.wait([comm.irecv(into, other, 1), comm.isend(out, other, 1)], "a message")

        crossing.append(_median_s(cross, repeats, comm.barrier))
    there, came = np.ones(_ADDED, np.float32), np.ones(_ADDED, np.float32)
    adding_s = _median_s(lambda: np.add(there, came, out=there), repeats)
    return {"crossing": crossing, "gamma_s": adding_s / (4 * _ADDED)}


def _median_s(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of `work`; the first time, which is one more, does not count."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def exchange_times(
    comm: Communicator, nodes: int, repeats: int, exchanges: list[str]
) -> dict[str, TaskValue]:
    """Seconds of each exchange by step, without computing."""
    training = OneBatchTraining("perceptron", 2, comm.rank)
    results: dict[str, list[float]] = {name: [] for name in exchanges}
    for _ in range(repeats):
        for name in exchanges:
            bare = timed(lambda: training.alone(None), 4, comm)
            exchange = training.distribute(name, nodes_for(name, nodes, comm.size))
            alone = partial(training.alone, exchange)
            timed(alone, 2, comm)
            whole = timed(alone, 4, comm)
            results[name].append(whole - bare)
            exchange.close()
    return {"seconds": results, **_sizes(training)}
