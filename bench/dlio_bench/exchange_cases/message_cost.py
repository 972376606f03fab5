"""`--case messages`: messages of each exchange on 2 to 16 ranks, and its time on up to 4,096."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from dlio.plan import exchange_cost as model
from dlio.plan.exchange_cost import ExchangeLoad, LinkCost
from dlio.util.cores import available_cores
from dlio_bench.bench_ranks import LINK, run
from dlio_bench.exchange_cases.cost_fit import fit
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.monitor import ENVIRONMENT
from dlio_bench.exchange_cases.overlap_case import fabrics_of
from dlio_bench.results.report_values import PlotCurve
from dlio_bench.results.terminal import steps

_SIZES: Final = tuple(1 << power for power in range(10, 26))
"""1 KiB to 32 MiB."""
_STEPS: Final = 8
_CARRIED: Final = tuple(1 << power for power in range(1, 13))
_PARAMETERS: Final = 25_600_000
_PER_NODE: Final = 8
_BUCKETS: Final = 56
"""Bytes of ResNet-50's parameters."""


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Counted messages and bytes, the fitted model, its error, and its forecast."""
    from dlio.exchange import NAMES

    exchanges = options.exchanges or NAMES
    rows = [row for p in steps(options.counts, "{} ranks".format) for row in _counted(p, exchanges)]
    links = {fabric: _fitted(fabric, options.repeats) for fabric in fabrics_of(options)[0]}
    checks = [
        row
        for fabric, (link, _) in links.items()
        for p in steps([p for p in options.counts if p <= 4], "{} ranks, timed".format)
        for row in _checked(fabric, link, p, exchanges, options.repeats)
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
        from dlio_bench.exchange_cases.exchange_plots import draw

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


def _counted(p: int, exchanges: tuple[str, ...]) -> list[dict[str, Any]]:
    task = {
        "network": "perceptron",
        "batch_size": 2,
        "steps": _STEPS,
        "nodes": nodes_of(p),
        "exchanges": exchanges,
    }
    report: dict[str, Any] = run(
        "dlio_bench.exchange_cases.message_count_rank", task, p, environment=ENVIRONMENT
    )
    work = ExchangeLoad(report["parameter_bytes"], report["buckets"], p // nodes_of(p))
    rows = []
    for name, figures in report["exchanges"].items():
        row: dict[str, Any] = {"ranks": p, "exchange": name}
        for who in ("counted", "told"):
            if who not in figures["ranks"][0]:
                row["not_counted"] = report["not_counted"]
                continue
            messages, size = zip(*(rank[who] for rank in figures["ranks"]), strict=True)
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


def _fitted(fabric: str, repeats: int) -> tuple[LinkCost, float]:
    task = {"what": "messages", "sizes": _SIZES, "repeats": 4 * repeats}
    report: dict[str, Any] = run("dlio_bench.exchange_cases.timing_rank", task, 2, fabric)
    link, error = fit(_SIZES, report["crossing"])
    return replace(link, gamma_s=report["gamma_s"]), error


def _checked(
    fabric: str, link: LinkCost, p: int, exchanges: tuple[str, ...], repeats: int
) -> list[dict[str, Any]]:
    """Measured exchanges next to the model's, for ranks that share this machine's cores."""

    from dlio_bench.results.repeats import median, spread

    names = [name for name in exchanges if name in model.FORMULAE]
    nodes = nodes_of(p)
    asked = [_EVERY_STEP.get(name, name) for name in names]
    task = {
        "what": "exchanges",
        "network": "perceptron",
        "nodes": nodes,
        "repeats": repeats,
        "exchanges": asked,
    }
    report: dict[str, Any] = run("dlio_bench.exchange_cases.timing_rank", task, p, fabric)
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
                "model_over_measured": predicted_s / median(seconds),
            }
        )
    return rows


_EVERY_STEP: Final = {"local-sgd": "local-sgd(1)", "diloco": "diloco(1)", "noloco": "noloco(1)"}


def _carried(
    options: ExchangeBenchOptions, exchanges: tuple[str, ...], links: dict[str, LinkCost]
) -> dict[str, Any]:
    """The model's seconds for each preset on 2 to 4,096 ranks: within a node through memory,
    between nodes through TCP, or the substitute that was measured."""
    fitted = list(links.values())
    inside, link = links.get("memory", fitted[0]), links.get("tcp", fitted[-1])
    if options.alpha_us is not None:
        link = replace(link, alpha_s=options.alpha_us * 1e-6)
    if options.bandwidth_gbs is not None:
        link = replace(link, beta_s=1e-9 / options.bandwidth_gbs)
    work = ExchangeLoad(4 * _PARAMETERS, _BUCKETS, _PER_NODE)
    names = [name for name in exchanges if name in model.FORMULAE]
    seconds = {
        name: [model.seconds(name, p, work, link, inside) for p in _CARRIED] for name in names
    }
    rows = [
        {"exchange": name, **{f"{p:,}": report[_CARRIED.index(p)] for p in (2, 16, 64, 256, 4096)}}
        for name, report in seconds.items()
    ]
    said = (
        f"{link.alpha_s * 1e6:.3g} µs a message, {1e-9 / link.beta_s:.3g} GB/s, "
        f"{_BUCKETS} buckets, nodes of {_PER_NODE}"
    )
    return {"rows": rows, "seconds": seconds, "link": said, "parameters": asdict(link)}
