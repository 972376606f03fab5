"""Find a job's bottleneck, suggest remedies, and show forecasts as text, table and plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dlio.features.forecast.epoch_simulation import Machine, Timeline, run
from dlio.loader.planned_traffic import ForecastJob, traffic
from dlio.plan.placement import HomeNode
from dlio.util.plot_files import picture
from dlio.util.units import counted, format_bytes, format_seconds

# Analysis
_NEGLIGIBLE: Final = 0.02
"""Share of an epoch up to which waiting is not worth a remedy."""


@dataclass(frozen=True, slots=True)
class EpochTimes:
    """Times of one epoch, in reports."""

    seconds: float
    first_batch_s: float
    stall_s: float
    stall_share: float
    bottleneck: str
    busy: dict[str, float]
    """Share of the epoch in which each resource is in use."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Traffic and times of a job, as in reports: its first epoch, and the later ones."""

    nodes: int
    ranks: int
    batch_size: int
    mode: str
    samples: int
    bytes: int
    steps: int
    windows: int
    held_bytes: int
    """Bytes of the data set that tiers hold."""
    moved_bytes: int
    moved_share: float
    wire_bytes: int
    messages: int
    peers: int
    source_bytes: int
    tier_bytes: list[int]
    link_bytes_out_max: int
    link_bytes_in_max: int
    window_bytes: int
    first_epoch: EpochTimes
    later_epoch: EpochTimes
    remedies: list[str]


def forecast(job: ForecastJob, machine: Machine, seed: int = 0) -> Forecast:
    """Plan and simulate a job's first epoch, and its second as an example of all later ones."""
    held = min(int(job.block_bytes[job.placement.home >= 0].sum()), job.data_bytes)
    counts = traffic(job, 1)
    first = run(job, machine, epoch=0, cold=True, seed=seed)
    later = run(job, machine, epoch=1, seed=seed)
    return Forecast(
        nodes=len(job.nodes),
        ranks=job.ranks.size,
        batch_size=job.batch_size,
        mode=job.mode,
        samples=job.samples,
        bytes=job.data_bytes,
        steps=counts.steps,
        windows=counts.windows,
        held_bytes=held,
        moved_bytes=counts.moved,
        moved_share=counts.moved / max(1, counts.payload),
        wire_bytes=counts.wire,
        messages=counts.messages,
        peers=counts.peers,
        source_bytes=counts.source,
        tier_bytes=list(counts.tiers),
        link_bytes_out_max=int(counts.link_out.max(initial=0)),
        link_bytes_in_max=int(counts.link_in.max(initial=0)),
        window_bytes=counts.window_bytes,
        first_epoch=_times(first),
        later_epoch=_times(later),
        remedies=_remedies(job, held, counts.source, first, later),
    )


def _times(line: Timeline) -> EpochTimes:
    share = line.stall_s / max(line.seconds, 1e-9)
    return EpochTimes(
        line.seconds, line.first_batch_s, line.stall_s, share, line.bottleneck, line.busy
    )


def resized(job: ForecastJob, nodes: int) -> ForecastJob:
    """Return the same job on another number of nodes, all like its first one."""
    first = job.nodes[0]
    named = tuple(HomeNode(f"node{number}", first.capacities) for number in range(nodes))
    return replace(job, nodes=named, gone=())


def _remedies(
    job: ForecastJob, held: int, source: int, first: Timeline, later: Timeline
) -> list[str]:
    """Return sentences that name the bottleneck and the nodes or bytes that would remove it.

    `held` and `source` are the bytes in tiers, and those that an epoch reads from the source.
    """
    said = []
    whole = int(job.block_bytes.sum())
    capacity = sum(sum(node.capacities) for node in job.nodes)
    if source:
        # A tier keeps whole blocks: space for less than a block stays empty.
        largest = int(job.block_bytes.max())
        each = capacity // len(job.nodes) // largest * largest
        lacking = whole - held
        line = (
            f"The tiers hold {held / max(1, job.data_bytes):.0%} of the data; each epoch "
            f"reads {format_bytes(source)} from the source."
        )
        if each:
            line += f" To hold it all, use {math.ceil(whole / each)} such nodes, or add"
        else:
            line += " To hold it all, add"
        line += f" {format_bytes(-(-lacking // len(job.nodes)))} of tiers to each node."
        said.append(line)
    if later.stall_s <= _NEGLIGIBLE * later.seconds:
        said.append("From the second epoch on, computing limits the speed, not data.")
    elif later.bottleneck == "source":
        said.append("Later epochs wait for the source: enlarge the tiers (see above).")
    elif later.bottleneck == "link":
        said.append(
            "Later epochs wait for the network between nodes: "
            + ("mode batch sends far less" if job.mode == "global" else "a larger batch sends less")
            + "."
        )
    elif later.bottleneck == "decode":
        said.append(
            "Later epochs wait for decoding: use more threads per rank, or `dlio pack --resize`."
        )
    else:
        said.append(
            f"Later epochs wait {later.stall_s:.2g} s for data, because of the tiers' bandwidth "
            "or the first batch of each epoch."
        )
    if first.stall_s > first.seconds / 2:
        said.append(
            f"The first epoch waits {first.stall_s:.3g} s for the source: to avoid that, "
            "run `dlio stage` before the job."
        )
    return said


# Output


def show_forecast(figures: Forecast) -> None:
    """Print the forecast of one job, one line per figure."""
    print(
        f"{counted(figures.samples, 'sample')}, {format_bytes(figures.bytes)}; "
        f"{counted(figures.nodes, 'node')}, {counted(figures.ranks, 'rank')} of "
        f"{figures.batch_size}: "
        f"{counted(figures.steps, 'step')} an epoch, mode {figures.mode}"
    )
    held = figures.held_bytes / max(1, figures.bytes)
    rows = [
        ("in tiers", f"{format_bytes(figures.held_bytes)} of the data, {held:.0%}"),
        (
            "between nodes",
            f"{format_bytes(figures.moved_bytes)} an epoch, {figures.moved_share:.2%} of the bytes",
        ),
        (
            "a node's link",
            f"{format_bytes(figures.link_bytes_out_max)} out, "
            f"{format_bytes(figures.link_bytes_in_max)} in, at most",
        ),
        (
            "messages",
            f"{figures.messages:,} in {counted(figures.windows, 'window')}; a rank has at most "
            f"{figures.peers:,} peers",
        ),
        (
            "memory",
            f"{format_bytes(figures.window_bytes)} of messages a rank and window, at most",
        ),
        ("from the source", f"{format_bytes(figures.source_bytes)} in each later epoch"),
    ]
    for name, line in (
        ("first epoch", figures.first_epoch),
        ("later epochs", figures.later_epoch),
    ):
        rows.append(
            (
                name,
                f"{format_seconds(line.seconds)}, first batch after "
                f"{format_seconds(line.first_batch_s)}, waiting {line.stall_share:.1%}; "
                f"most in use: {line.bottleneck} ({line.busy[line.bottleneck]:.0%})",
            )
        )
    for name, text in rows:
        print(f"  {name:<16} {text}")
    for remedy in figures.remedies:
        print(remedy)


def show_sweep(rows: Sequence[Forecast]) -> None:
    """Print forecasts for several numbers of nodes as a table, one row each."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in (
        "nodes",
        "steps",
        "in tiers",
        "moved",
        "source",
        "first epoch",
        "later",
        "waits",
    ):
        table.add_column(column, justify="right")
    table.add_column("most in use")
    for row in rows:
        later = row.later_epoch
        table.add_row(
            f"{row.nodes:,}",
            f"{row.steps:,}",
            f"{row.held_bytes / max(1, row.bytes):.0%}",
            f"{row.moved_share:.2%}",
            format_bytes(row.source_bytes),
            format_seconds(row.first_epoch.seconds),
            format_seconds(later.seconds),
            f"{later.stall_share:.1%}",
            later.bottleneck,
        )
    Console(width=max(110, Console().width)).print(table)


def draw_sweep(rows: Sequence[Forecast], path: str) -> None:
    """Plot times and shares against the number of nodes, into a PNG or SVG file."""
    with picture(path) as pyplot:
        nodes = [row.nodes for row in rows]
        figure, (times, shares) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7))
        for name, epochs in (
            ("first epoch", [row.first_epoch for row in rows]),
            ("later epochs", [row.later_epoch for row in rows]),
        ):
            times.plot(nodes, [epoch.seconds for epoch in epochs], marker="o", label=name)
        times.set_ylabel("seconds an epoch")
        times.set_yscale("log")
        for name, values in (
            ("moved", [row.moved_share for row in rows]),
            ("from the source", [row.source_bytes / max(1, row.bytes) for row in rows]),
            ("waiting", [row.later_epoch.stall_share for row in rows]),
        ):
            shares.plot(nodes, values, marker="o", label=name)
        shares.set_ylabel("share of the bytes, or of the time")
        shares.set_xlabel("nodes")
        shares.set_xscale("log", base=2)
        for axes in (times, shares):
            axes.legend()
            axes.grid(True, alpha=0.3)
        job = rows[0]
        figure.suptitle(
            f"{counted(job.samples, 'sample')}, {format_bytes(job.bytes)}, mode {job.mode}"
        )
