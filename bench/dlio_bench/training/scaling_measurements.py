"""Rounds of measurements: every round measures all numbers of ranks, in turn."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from dlio.plan.exchange_cost import LinkCost
from dlio.util.cores import available_cores
from dlio_bench.bench_ranks import run
from dlio_bench.exchange_cases.message_cost import link_cost
from dlio_bench.results.repeats import turns
from dlio_bench.results.terminal import steps, working
from dlio_bench.training.bench_networks import NETWORKS
from dlio_bench.training.training_options import TrainingBenchOptions
from dlio_bench.training.training_rank import NONE, measure_steps

_SIZES: Final = tuple(1 << power for power in range(10, 25, 2))
"""1 KiB to 16 MiB."""
_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class StepConditions:
    """Conditions of steps."""

    network: str
    ranks: int
    batch_size: int
    """Of a rank."""
    exchange: str
    """NONE, or as for `--exchange`."""


@dataclass(slots=True)
class Times:
    """Steps at a point, one value per round."""

    step_s: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    added_s: list[float] = field(default_factory=list)
    """By which an exchange makes a step longer than those before and after it."""
    mean_s: list[float] = field(default_factory=list)
    """A step as the mean of the ranks."""
    parts_s: list[dict[str, float]] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.step_s)


@dataclass(slots=True)
class ScalingMeasurements:
    """All rounds."""

    times: dict[StepConditions, Times]
    links: dict[str, LinkCost]
    """By fabric: memory, tcp."""
    sizes: dict[str, tuple[int, int]]
    """By network, bytes of its parameters and the buckets they travel in."""
    crowding: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By network and samples of a rank, one value per pass of all rounds: how many times as long as
    in turns the steps of two ranks take that share a core."""
    crowded_s: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """By network, exchange and samples of a rank, one value per round: seconds that an exchange
    adds to a step of two ranks that share a core."""


def side_of(options: TrainingBenchOptions, network: str) -> int:
    """Return the side of a network's samples."""
    known = NETWORKS[network]
    return known.side if options.image_size is None or not known.resizable else options.image_size


def batch_of(options: TrainingBenchOptions, network: str, ranks: int, scaling: str) -> int | None:
    """Return the samples of a rank in a step; None with more ranks than samples."""
    whole = options.batch_size or NETWORKS[network].batch_size
    return whole if scaling == "weak" else whole // ranks or None


def measure(options: TrainingBenchOptions) -> ScalingMeasurements:
    """Measure links, and steps in rounds. Raises UsageError if ranks fail."""
    with working("links"):
        links = {
            fabric: link_cost(fabric, _SIZES, 4 * options.repeats)[0]
            for fabric in steps(("memory", "tcp"))
        }
    tasks = {p: _runs(options, p) for p in options.rank_counts}
    times: dict[StepConditions, Times] = defaultdict(Times)
    sizes: dict[str, tuple[int, int]] = {}
    crowding: dict[tuple[str, int], list[float]] = defaultdict(list)
    crowded: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    # There and back, so that a slow change of the machine's load meets all alike.
    order = list(turns(sorted(tasks), options.repeats))
    with working("rounds"):
        for number, p in steps(order, "round {0[0]}, {0[1]} ranks".format):
            task = {
                "runs": tasks[p],
                "steps": options.steps,
                "data": options.data,
                "round": number,
            }
            answer = run(measure_steps, task, p, timeout_s=_TIMEOUT_S)
            for each in answer["runs"]:
                network, size = each["network"], each["batch_size"]
                if "crowding" in each:
                    crowding[network, size] += each["crowding"]
                    for name, times_of in each["steps"].items():
                        crowded[network, name, size].append(times_of["added_s"])
                    continue
                for exchange, figures in each["steps"].items():
                    point = times[StepConditions(network, p, size, exchange)]
                    for name, figure in figures.items():
                        getattr(point, name).append(figure)
                sizes[network] = (each["bytes"], each["buckets"])
    return ScalingMeasurements(dict(times), links, sizes, dict(crowding), dict(crowded))


def _runs(options: TrainingBenchOptions, p: int) -> list[dict[str, object]]:
    """Return the runs of p ranks. One rank exchanges nothing, but has batches of all sizes. Two
    share a core with the batches of those numbers of ranks that have to."""
    counts = options.rank_counts if p == 1 else (p,)
    ahead = options.forecast_counts if p == 1 else ()
    runs: list[dict[str, object]] = []
    for network in options.network_names:
        sizes = {
            batch
            for scaling in options.scalings
            for each in counts
            if (batch := batch_of(options, network, each, scaling)) is not None
        }
        least = [batch_of(options, network, each, "strong") for each in ahead]
        known = [batch for batch in least if batch is not None]
        if known and "strong" in options.scalings:
            sizes.add(min(known))
        runs += [
            {
                "network": network,
                "side": side_of(options, network),
                "batch_size": size,
                "seed": options.seed,
                "exchanges": [NONE] if p == 1 else [NONE, *options.exchange_names],
            }
            for size in sorted(sizes)
        ]
    if p == 2:
        crowded = {
            (each["network"], each["batch_size"]): {**each, "one_core": True}
            for more in options.rank_counts
            if more > available_cores()
            for each in _runs(options, more)
        }
        runs += crowded.values()
    return runs
