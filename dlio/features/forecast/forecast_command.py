"""`dlio plan` and `dlio simulate`: forecast jobs of any size with real jobs' planning code."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.features.forecast.job_options import JobOptions, MachineOptions
from dlio.util.options import CheckedOptions, Option
from dlio.util.units import format_bytes, format_seconds
from dlio.util.whole_files import check_writable, write_json

_Left = TypeVar("_Left")
_Right = TypeVar("_Right")


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


def plan(
    job: JobOptions, machine: MachineOptions, sweep: SweepOptions, output: OutputOptions
) -> None:
    """Forecast how much data a job will read and send, and how long it will wait.

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
        _write([asdict(row) for row in rows], output)
        return
    figures = forecast(planned, modelled, job.seed)
    if not output.as_json:
        show_forecast(figures)
    _write(asdict(figures), output)


def simulate(
    job: JobOptions, machine: MachineOptions, simulation: SimulationOptions, output: OutputOptions
) -> None:
    """Run a job's schedule, message by message, on a modelled machine."""
    from dlio.features.forecast.epoch_simulation import run

    output.check_writable()
    planned = job.job()
    slowed = dict(_pair(text, "--slow", int, float) for text in simulation.slow)
    failures = sorted(_pair(text, "--fail", int, int) for text in simulation.fail)
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
        epochs.append(
            {
                "epoch": epoch,
                "seconds": line.seconds,
                "first_batch_s": line.first_batch_s,
                "stall_s": line.stall_s,
                "moved_bytes": line.moved,
                "messages": line.messages,
                "bottleneck": line.bottleneck,
                "busy": dict(line.busy),
            }
        )
        if not output.as_json:
            print(
                f"epoch {epoch}: {format_seconds(line.seconds)}, first batch after "
                f"{format_seconds(line.first_batch_s)}, waiting {format_seconds(line.stall_s)}; "
                f"{line.messages:,} messages of {format_bytes(line.moved)}; most in use: "
                f"{line.bottleneck} ({line.busy[line.bottleneck]:.0%})"
            )
    _write(epochs, output)


def _write(figures: object, output: OutputOptions) -> None:
    if output.report is not None:
        write_json(output.report, figures)
    if output.as_json:
        print(json.dumps(figures, indent=2))


def _pair(
    text: str, option: str, first: Callable[[str], _Left], second: Callable[[str], _Right]
) -> tuple[_Left, _Right]:
    left, colon, right = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return first(left), second(right)
    except ValueError:
        raise UsageError(f"{option} {text}: give two numbers separated by a colon") from None
