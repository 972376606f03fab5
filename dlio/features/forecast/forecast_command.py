"""`dlio plan` and `dlio simulate`: forecast jobs of any size with real jobs' planning code."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions
from dlio.data.replicas import measured
from dlio.errors import UsageError
from dlio.storage.tier_spec import TierSpec, parse_tiers
from dlio.util.options import CheckedOptions, Option, check
from dlio.util.units import counted, format_bytes, format_seconds, parse_bytes, parse_seconds
from dlio.util.whole_files import check_writable

if TYPE_CHECKING:
    from dlio.features.forecast.epoch_simulation import Machine
    from dlio.loader.planned_traffic import ForecastJob


# Jobs and machines: the options that both commands share
_TIER_RATES: Final = {"ram": "8GiB", "disk": "2GiB"}
"""Assumed bandwidth of a node's tier per second, unless it was measured."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """A job: its data, its ranks and its tiers."""

    source: Annotated[
        str | None,
        Option(
            "Data set; or describe one with --samples and --sample-size.",
            positional=True,
            metavar="SRC",
        ),
    ] = None
    samples: Annotated[
        int | None, Option("Number of samples of an imagined data set.", least=1)
    ] = None
    sample_size: Annotated[
        str, Option("Encoded size of each imagined sample, such as 110KiB.", metavar="SIZE")
    ] = "110KiB"
    nodes: Annotated[int, Option("Number of nodes.", least=1)] = 1
    ranks_per_node: Annotated[int, Option("Ranks on each node.", least=1)] = 8
    batch_size: Annotated[
        int, Option("Samples of each rank in one batch.", unit="samples", least=1)
    ] = 32
    tiers: Annotated[
        str,
        Option("Tiers of each node, such as ram:64GiB,/nvme:2TiB, or none.", metavar="TIERS"),
    ] = "ram:64GiB"
    mode: Annotated[
        str,
        Option(
            "Shuffle, as for `dlio train --shuffle`: batch, global, ring, local or partial(0.1).",
            metavar="MODE",
        ),
    ] = "batch"
    seed: Annotated[int, Option("Seed for sample order and jitter.", least=0)] = 0

    def __post_init__(self) -> None:
        from dlio.plan.epoch import check_mode

        check(self)
        check_mode(self.mode)
        if (self.source is None) == (self.samples is None):
            raise UsageError("give a data set, or --samples of an imagined one")

    def job(self) -> "ForecastJob":
        """Return the described job; opens the data set if one is given."""
        from dlio.data.reader import open_reader
        from dlio.loader.planned_traffic import job_of, job_over
        from dlio.plan.placement import HomeNode

        capacities = tuple(spec.capacity for spec in self.block_tiers())
        nodes = tuple(HomeNode(f"node{number}", capacities) for number in range(self.nodes))
        rest = (nodes, self.ranks_per_node, self.batch_size, self.mode)
        if self.samples is not None:
            size = parse_bytes(self.sample_size, "--sample-size")
            if size < 1:
                raise UsageError(f"--sample-size {self.sample_size}: give at least 1B")
            return job_of(self.samples, size, *rest, seed=self.seed)
        reader = open_reader(str(self.source))
        try:
            return job_over(reader, *rest, seed=self.seed)
        finally:
            reader.close()

    def block_tiers(self) -> list[TierSpec]:
        """Return the tiers of each node that hold blocks, fastest first."""
        return [spec for spec in parse_tiers(self.tiers) if not spec.decoded]


@dataclass(frozen=True, slots=True)
class MachineOptions(CheckedOptions):
    """A machine: how fast it computes, decodes, reads and sends."""

    model_time: Annotated[
        str, Option("Computing time of a step, such as 0.2s or 150ms.", metavar="TIME")
    ] = "200ms"
    decode_rate: Annotated[
        float,
        Option("Samples that the threads of a rank decode.", unit="samples per second", above=0),
    ] = 2000.0
    source_bandwidth: Annotated[
        str,
        Option(
            "Bandwidth of the source for all nodes together.",
            unit="bytes per second",
            metavar="SIZE",
        ),
    ] = "10GiB"
    source_latency: Annotated[
        str, Option("Latency of a request to the source.", metavar="TIME")
    ] = "5ms"
    link_bandwidth: Annotated[
        str,
        Option(
            "Bandwidth of a node's network in each direction.",
            unit="bytes per second",
            metavar="SIZE",
        ),
    ] = "12GiB"
    link_latency: Annotated[str, Option("Latency of a message between nodes.", metavar="TIME")] = (
        "20us"
    )
    tier_bandwidth: Annotated[
        str | None,
        Option(
            "Bandwidth of each tier of a node, such as 8GiB,2GiB.",
            unit="bytes per second",
            metavar="SIZES",
            default_text="as `dlio bench tiers` measured here, else 8GiB for RAM and 2GiB for disk",
        ),
    ] = None

    def machine(
        self, tiers: list[TierSpec], jitter: float = 0.0, slow: dict[int, float] | None = None
    ) -> "Machine":
        """Return the described machine, with the tiers of each node, fastest first.

        `jitter` and `slow` are those of `Machine`. Raises UsageError for an invalid bandwidth, or
        if their number is not that of the tiers.
        """
        from dlio.features.forecast.epoch_simulation import Machine

        texts = [_tier_rate(spec) for spec in tiers]
        if self.tier_bandwidth is not None:
            texts = self.tier_bandwidth.split(",")
            if len(texts) != len(tiers):
                raise UsageError(
                    f"--tier-bandwidth {self.tier_bandwidth}: give one for each tier in --tiers "
                    f"({len(tiers)})"
                )
        source_rate = parse_bytes(self.source_bandwidth, "--source-bandwidth")
        link_rate = parse_bytes(self.link_bandwidth, "--link-bandwidth")
        rates = tuple(parse_bytes(text, "--tier-bandwidth") for text in texts)
        if not all((*rates, source_rate, link_rate)):
            raise UsageError("a bandwidth is 0: give values above 0")
        return Machine(
            source_rate=source_rate,
            source_latency_s=parse_seconds(self.source_latency, "--source-latency"),
            link_rate=link_rate,
            link_latency_s=parse_seconds(self.link_latency, "--link-latency"),
            tier_rates=rates,
            decode_rate=self.decode_rate,
            model_s=parse_seconds(self.model_time, "--model-time"),
            jitter=jitter,
            slow=slow or {},
        )


def _tier_rate(spec: TierSpec) -> str:
    """Return the bandwidth that `dlio bench tiers` measured on this machine, else a typical one."""
    known = measured("ram" if spec.kind == "ram" else spec.root)
    return _TIER_RATES[spec.kind] if known is None else f"{int(known[1])}B"


# Commands
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options for forecasts of several numbers of nodes."""

    sweep: Annotated[
        str | None,
        Option(
            "Forecast several numbers of nodes, doubling from A to B, as nodes=1..1024.",
            metavar="NAME=A..B",
        ),
    ] = None
    plot: Annotated[
        str | None, Option("Draw the sweep into this PNG or SVG file.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        if self.plot is not None:
            if self.sweep is None or not self.plot.endswith((".png", ".svg")):
                raise UsageError(
                    f"--plot {self.plot}: give --sweep too, and a name that ends in .png or .svg"
                )
            check_writable("--plot", self.plot)

    def counts(self) -> list[int]:
        """Return the numbers of nodes; empty without a sweep."""
        if self.sweep is None:
            return []
        match = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", self.sweep)
        low, high = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= low <= high:
            raise UsageError(f"--sweep {self.sweep}: give a range such as nodes=1..1024")
        counts = []
        while low < high:
            counts.append(low)
            low *= 2
        return [*counts, high]


@dataclass(frozen=True, slots=True)
class SimulationOptions(CheckedOptions):
    """Options of a simulation: epochs, and disturbances of the machine."""

    epochs: Annotated[
        int, Option("Number of epochs; the first begins with empty tiers.", least=1)
    ] = 2
    jitter: Annotated[
        float,
        Option(
            "Standard deviation of decoding and computing times, relative to their mean.", least=0
        ),
    ] = 0.0
    slow: Annotated[
        tuple[str, ...],
        Option(
            "A slow rank, as RANK:FACTOR, which takes FACTOR times as long. Repeatable.",
            metavar="RANK:FACTOR",
        ),
    ] = ()
    fail: Annotated[
        tuple[str, ...],
        Option(
            "A rank that dies in the last epoch, as STEP:RANK. Repeatable.", metavar="STEP:RANK"
        ),
    ] = ()


_USUAL: Final = (
    *("source", "samples", "sample_size", "nodes", "ranks_per_node", "batch_size"),
    *("tiers", "model_time", "decode_rate", "source_bandwidth"),
)
"""Options of jobs and machines that `--help` shows."""


@with_help(usual=(*_USUAL, "sweep", "plot", "report"))
def plan(
    job: JobOptions, machine: MachineOptions, sweep: SweepOptions, output: OutputOptions
) -> None:
    """Forecast what a job will read and send, and how long it will wait.

    The traffic is counted by the code that plans real jobs; times follow from the options that
    describe the machine. Nothing is run.
    """
    from dlio.features.forecast.forecast_analysis import (
        draw_sweep,
        forecast,
        resized,
        show_forecast,
        show_sweep,
    )

    output.check_writable()
    counts = sweep.counts()
    planned = job.job()
    modelled = machine.machine(job.block_tiers())
    if counts:
        rows = [forecast(resized(planned, count), modelled, job.seed) for count in counts]
        if not output.as_json:
            show_sweep(rows)
        if sweep.plot is not None:
            draw_sweep(rows, sweep.plot)
        output.write([asdict(row) for row in rows])
        return
    figures = forecast(planned, modelled, job.seed)
    if not output.as_json:
        show_forecast(figures)
    output.write(asdict(figures))


@with_help(usual=(*_USUAL, "epochs", "slow", "fail", "report"))
def simulate(
    job: JobOptions, machine: MachineOptions, simulation: SimulationOptions, output: OutputOptions
) -> None:
    """Run a job's schedule, message by message, on a modelled machine."""
    from dlio.features.forecast.epoch_simulation import run

    output.check_writable()
    planned = job.job()
    slowed = dict(_pair(text, "--slow", float) for text in simulation.slow)
    failures = sorted(_pair(text, "--fail", int) for text in simulation.fail)
    for rank in [*slowed, *(rank for _, rank in failures)]:
        if not 0 <= rank < planned.ranks.size:
            raise UsageError(
                f"--slow or --fail: rank {rank} does not exist; the job has {planned.ranks.size}"
            )
    modelled = machine.machine(job.block_tiers(), simulation.jitter, slowed)
    epochs = []
    for epoch in range(simulation.epochs):
        dying = failures if epoch == simulation.epochs - 1 else []
        seed = job.seed + epoch
        line = run(planned, modelled, epoch=epoch, cold=epoch == 0, failures=dying, seed=seed)
        epochs.append({"epoch": epoch, **asdict(line), "bottleneck": line.bottleneck})
        if not output.as_json:
            print(
                f"epoch {epoch}: {format_seconds(line.seconds)}, first batch after "
                f"{format_seconds(line.first_batch_s)}, waiting {format_seconds(line.stall_s)}; "
                f"{counted(line.messages, 'message')} of {format_bytes(line.moved_bytes)}; most in "
                f"use: {line.bottleneck} ({line.busy[line.bottleneck]:.0%})"
            )
    output.write(epochs)


def _pair(text: str, option: str, second: Callable[[str], _Number]) -> tuple[int, _Number]:
    left, _, right = text.partition(":")
    try:
        return int(left), second(right)
    except ValueError:
        raise UsageError(f"{option} {text}: give two numbers separated by a colon") from None
