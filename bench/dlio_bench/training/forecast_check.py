"""Steps on more ranks, forecast from measured steps of one and two ranks and measured links."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dlio.plan.exchange_cost import ExchangeLoad, LinkCost
from dlio.util.cores import available_cores
from dlio_bench.exchange_cases.message_cost import given_link
from dlio_bench.training.scaling_measurements import ScalingMeasurements, StepConditions, batch_of
from dlio_bench.training.step_scaling import Cluster, StepTimings, compute_seconds, exchange_seconds
from dlio_bench.training.training_options import TrainingBenchOptions
from dlio_bench.training.training_rank import NONE


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of a table."""

    network: str
    scaling: str
    exchange: str
    ranks: int
    batch_size: float
    """Samples of a rank."""
    measured_s: tuple[float, ...] = ()
    """One value per round; empty where only the forecast exists."""
    forecast_s: float | None = None
    """None where the measurement is what forecasts are made from."""
    alone_s: float = 0.0
    """A step of one rank, with that rank's batch."""
    alone_batch: float = 1
    cores: int = 1
    """Cores of these ranks."""

    @property
    def step_s(self) -> float:
        """The measured time if there is one, else the forecast, in seconds."""
        if self.measured_s:
            return statistics.median(self.measured_s)
        assert self.forecast_s is not None
        return self.forecast_s

    @property
    def is_forecast(self) -> bool:
        """True if nothing was measured."""
        return not self.measured_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.ranks * self.batch_size / self.step_s

    @property
    def efficiency(self) -> float:
        """Throughput over that of as many cores that work alone."""
        return self.samples_per_s / (self.cores * self.alone_batch / self.alone_s)

    @property
    def error(self) -> float | None:
        """Relative error of the forecast, None unless both exist."""
        if self.forecast_s is None or not self.measured_s:
            return None
        return self.forecast_s / self.step_s - 1


def steps_of(
    options: TrainingBenchOptions, measured: ScalingMeasurements, network: str, scaling: str
) -> StepTimings:
    """Return what the measurements of one and two ranks say of a network's steps."""
    alone = {
        point.batch_size: times.median_s
        for point, times in measured.times.items()
        if point.network == network and point.ranks == 1
    }
    batch = batch_of(options, network, 2, scaling)
    assert batch is not None
    of_two = measured.times[StepConditions(network, 2, batch, NONE)]
    exchanged = {}
    for name in options.exchange_names:
        times = measured.times[StepConditions(network, 2, batch, name)]
        exchanged[name] = max(0.0, statistics.median(times.added_s))
    mean = statistics.median(of_two.mean_s)
    return StepTimings(
        alone,
        max(1.0, of_two.median_s / alone[batch]),
        exchanged,
        max(1.0, mean / alone[batch]),
        {
            size: max(1.0, statistics.median(ratios))
            for (name, size), ratios in measured.crowding.items()
            if name == network
        },
        {
            (exchange, size): max(0.0, statistics.median(added))
            for (name, exchange, size), added in measured.crowded_s.items()
            if name == network
        },
    )


def link_between_nodes(options: TrainingBenchOptions, measured: ScalingMeasurements) -> LinkCost:
    """Return the link between nodes of the forecast."""
    return given_link(measured.links["tcp"], options.alpha_us, options.bandwidth_gbs)


def cells(options: TrainingBenchOptions, measured: ScalingMeasurements) -> Iterator[Cell]:
    """Yield measured and forecast steps of all networks, scalings, exchanges and ranks."""
    for network in options.network_names:
        for scaling in options.scalings:
            steps = steps_of(options, measured, network, scaling)
            for exchange in (NONE, *options.exchange_names):
                for p in (*options.rank_counts, *options.forecast_counts):
                    batch = batch_of(options, network, p, scaling)
                    if batch is not None:
                        yield _cell(
                            options, measured, steps, (network, scaling, exchange), p, batch
                        )


def _cell(
    options: TrainingBenchOptions,
    measured: ScalingMeasurements,
    steps: StepTimings,
    names: tuple[str, str, str],
    p: int,
    batch: int,
) -> Cell:
    network, scaling, exchange = names
    cores = available_cores()
    whole = batch_of(options, network, 1, scaling) or 1
    cell = Cell(*names, p, batch, alone_s=steps.alone[whole], alone_batch=whole, cores=p)
    of_one = measured.times.get(StepConditions(network, p, batch, NONE if p == 1 else exchange))
    is_here = p in options.rank_counts
    if is_here and of_one is not None:
        cell = replace(cell, measured_s=tuple(of_one.step_s), cores=min(p, cores))
    if is_here and p <= 2:
        return cell
    inside = measured.links["memory"]
    here = Cluster(inside, per_node=p, cores=cores)
    elsewhere = Cluster(link_between_nodes(options, measured), inside, options.per_node)
    cluster = here if is_here else elsewhere
    seconds = compute_seconds(steps, batch, p, cluster)
    if exchange != NONE:
        size, buckets = measured.sizes[network]
        works = (
            ExchangeLoad(size, buckets, 2),
            ExchangeLoad(size, buckets, min(p, cluster.per_node)),
        )
        seconds += exchange_seconds(steps, exchange, p, batch, works, cluster)
    return replace(cell, forecast_s=seconds)
