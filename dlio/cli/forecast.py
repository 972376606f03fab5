"""`dlio plan` and `dlio simulate`: jobs of any size, from the code that plans real ones."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from dlio.data.speeds import measured
from dlio.errors import UsageError
from dlio.storage.spec import TierSpec
from dlio.util.figures import picture
from dlio.util.files import check_writable, write_json
from dlio.util.units import format_bytes, format_seconds, parse_bytes, parse_seconds

_TIER_RATES = {"ram": "8GiB", "disk": "2GiB"}
"""Bytes a second of a node's tier, where nothing else is said."""

Source = Annotated[
    str | None, typer.Argument(metavar="SRC", help="A data set; or --samples and --sample-size.")
]
Samples = Annotated[int | None, typer.Option(help="Of an imagined data set.", min=1)]
SampleSize = Annotated[str, typer.Option(help="Of each of them, encoded.")]
Nodes = Annotated[int, typer.Option(help="Nodes of the job.", min=1)]
RanksPerNode = Annotated[int, typer.Option(help="Ranks on each.", min=1)]
BatchSize = Annotated[int, typer.Option(help="Samples of a step, per rank.", min=1)]
Tiers = Annotated[str, typer.Option(help="Of each node: ram:64GiB,/nvme:2TiB, or none.")]
Mode = Annotated[str, typer.Option(help="batch, global, ring, local or partial(q).")]
Seed = Annotated[int, typer.Option(help="Of the order, and of jitter.", min=0)]
ModelTime = Annotated[str, typer.Option(help="Computing of a step: 0.2s, 150ms.")]
DecodeRate = Annotated[float, typer.Option(help="Samples/s that a rank's threads decode.")]
SourceBandwidth = Annotated[str, typer.Option(help="Bytes/s of the source, for all nodes.")]
SourceLatency = Annotated[str, typer.Option(help="Of a request to the source.")]
LinkBandwidth = Annotated[str, typer.Option(help="Bytes/s of a node's network, each way.")]
LinkLatency = Annotated[str, typer.Option(help="Of a message.")]
TierBandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bytes/s of each tier of a node: 8GiB,2GiB. By default as `dlio bench tiers` measured "
        "them here, or these, for RAM and disk."
    ),
]
Report = Annotated[str | None, typer.Option(help="Write JSON to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    source: Source = None,
    samples: Samples = None,
    sample_size: SampleSize = "110KiB",
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 8,
    batch_size: BatchSize = 32,
    tiers: Tiers = "ram:64GiB",
    mode: Mode = "batch",
    seed: Seed = 0,
    model_time: ModelTime = "200ms",
    decode_rate: DecodeRate = 2000.0,
    source_bandwidth: SourceBandwidth = "10GiB",
    source_latency: SourceLatency = "5ms",
    link_bandwidth: LinkBandwidth = "12GiB",
    link_latency: LinkLatency = "20us",
    tier_bandwidth: TierBandwidth = None,
    sweep: Annotated[
        str | None, typer.Option(help="nodes=1..1024: doubling, a row each.", metavar="NAME=A..B")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw the sweep into this PNG or SVG file.")
    ] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Say what a job will read, send and wait for, before it is run; from the code that plans real
    jobs, and what is said of the machine."""
    from dlio.forecast.analysis import forecast, resized

    for option, path in (("--report", report), ("--plot", plot)):
        if path is not None:
            check_writable(option, path)
    if plot is not None and (sweep is None or not plot.endswith((".png", ".svg"))):
        raise UsageError(f"--plot {plot}: give --sweep too, and a name that ends in .png or .svg")
    counts = None if sweep is None else _swept(sweep)
    job = _job(source, samples, sample_size, nodes, ranks_per_node, batch_size, tiers, mode, seed)
    machine = _machine(
        tiers,
        model_time,
        decode_rate,
        source_bandwidth,
        source_latency,
        link_bandwidth,
        link_latency,
        tier_bandwidth,
    )
    if counts is None:
        found = forecast(job, machine, seed)
        told: Any = found.as_dict()
        if not as_json:
            _show(told)
    else:
        told = [forecast(resized(job, count), machine, seed).as_dict() for count in counts]
        if not as_json:
            _show_sweep(told)
        if plot is not None:
            _draw(told, plot)
    if report is not None:
        write_json(report, told)
    if as_json:
        typer.echo(json.dumps(told, indent=2))


def simulate(
    source: Source = None,
    samples: Samples = None,
    sample_size: SampleSize = "110KiB",
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 8,
    batch_size: BatchSize = 32,
    tiers: Tiers = "ram:64GiB",
    mode: Mode = "batch",
    seed: Seed = 0,
    epochs: Annotated[int, typer.Option(help="Passes, the first with empty tiers.", min=1)] = 2,
    model_time: ModelTime = "200ms",
    decode_rate: DecodeRate = 2000.0,
    source_bandwidth: SourceBandwidth = "10GiB",
    source_latency: SourceLatency = "5ms",
    link_bandwidth: LinkBandwidth = "12GiB",
    link_latency: LinkLatency = "20us",
    tier_bandwidth: TierBandwidth = None,
    jitter: Annotated[
        float, typer.Option(help="Relative deviation of decoding and computing.", min=0)
    ] = 0.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="RANK:TIMES, a rank that takes as many times as long. Repeatable."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(help="STEP:RANK, a rank that dies in the last epoch. Repeatable."),
    ] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Run a job's schedule, message by message, on a modelled machine."""
    from dlio.forecast.events import run

    if report is not None:
        check_writable("--report", report)
    job = _job(source, samples, sample_size, nodes, ranks_per_node, batch_size, tiers, mode, seed)
    slowed = dict(_pair(text, "--slow", int, float) for text in slow or [])
    failures = sorted(_pair(text, "--fail", int, int) for text in fail or [])
    for rank in [*slowed, *(rank for _, rank in failures)]:
        if not 0 <= rank < job.ranks.size:
            raise UsageError(f"no rank {rank} among {job.ranks.size}: see --slow and --fail")
    machine = _machine(
        tiers,
        model_time,
        decode_rate,
        source_bandwidth,
        source_latency,
        link_bandwidth,
        link_latency,
        tier_bandwidth,
        jitter=jitter,
        slow=slowed,
    )
    told = []
    for epoch in range(epochs):
        dying = failures if epoch == epochs - 1 else []
        line = run(job, machine, epoch=epoch, cold=epoch == 0, failures=dying, seed=seed + epoch)
        told.append(
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
        if not as_json:
            typer.echo(
                f"epoch {epoch}: {format_seconds(line.seconds)}, first batch after "
                f"{format_seconds(line.first_batch_s)}, waiting {format_seconds(line.stall_s)}; "
                f"{line.messages:,} messages of {format_bytes(line.moved)}; most in use: "
                f"{line.bottleneck} ({line.busy[line.bottleneck]:.0%})"
            )
    if report is not None:
        write_json(report, told)
    if as_json:
        typer.echo(json.dumps(told, indent=2))


def _job(
    source: str | None,
    samples: int | None,
    sample_size: str,
    nodes: int,
    ranks_per_node: int,
    batch_size: int,
    tiers: str,
    mode: str,
    seed: int,
) -> Any:
    from dlio.data.reader import open_reader
    from dlio.forecast.traffic import job_of, job_over
    from dlio.plan.epoch import check_mode
    from dlio.plan.placement import Node
    from dlio.storage.spec import parse_tiers

    check_mode(mode)
    if (source is None) == (samples is None):
        raise UsageError("give a data set, or --samples of an imagined one")
    capacities = tuple(spec.capacity for spec in parse_tiers(tiers) if not spec.decoded)
    named = tuple(Node(f"node{number}", capacities) for number in range(nodes))
    rest = (named, ranks_per_node, batch_size, mode, seed)
    if samples is not None:
        size = parse_bytes(sample_size)
        if size < 1:
            raise UsageError(f"--sample-size {sample_size}: give at least 1B")
        return job_of(samples, size, *rest)
    reader = open_reader(str(source))
    try:
        return job_over(reader, *rest)
    finally:
        reader.close()


def _tier_rate(spec: TierSpec) -> str:
    """As `dlio bench tiers` measured it on this machine, or what is usual."""
    known = measured("ram" if spec.kind == "ram" else spec.root)
    return _TIER_RATES[spec.kind] if known is None else f"{int(known[1])}B"


def _machine(
    tiers: str,
    model_time: str,
    decode_rate: float,
    source_bandwidth: str,
    source_latency: str,
    link_bandwidth: str,
    link_latency: str,
    tier_bandwidth: str | None,
    **more: Any,
) -> Any:
    from dlio.forecast.events import Machine
    from dlio.storage.spec import parse_tiers

    specs = [spec for spec in parse_tiers(tiers) if not spec.decoded]
    texts = [_tier_rate(spec) for spec in specs]
    if tier_bandwidth is not None:
        texts = tier_bandwidth.split(",")
        if len(texts) != len(specs):
            raise UsageError(
                f"--tier-bandwidth {tier_bandwidth}: give as many as --tiers has, {len(specs)}"
            )
    rates = [*map(parse_bytes, texts), parse_bytes(source_bandwidth), parse_bytes(link_bandwidth)]
    if not all(rates) or not decode_rate > 0:
        raise UsageError("bandwidths and --decode-rate must be above 0")
    return Machine(
        source_rate=rates[-2],
        source_latency_s=parse_seconds(source_latency),
        link_rate=rates[-1],
        link_latency_s=parse_seconds(link_latency),
        tier_rates=tuple(rates[:-2]),
        decode_rate=decode_rate,
        model_s=parse_seconds(model_time),
        **more,
    )


def _swept(text: str) -> list[int]:
    match = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--sweep {text}: write nodes=1..1024")
    counts = []
    while low < high:
        counts.append(low)
        low *= 2
    return [*counts, high]


def _pair(
    text: str, option: str, first: Callable[[str], Any], second: Callable[[str], Any]
) -> tuple[Any, Any]:
    left, colon, right = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return first(left), second(right)
    except ValueError:
        raise UsageError(f"{option} {text}: write two numbers with a colon between") from None


def _show(told: dict[str, Any]) -> None:
    echo = typer.echo
    whole = told["samples"], format_bytes(told["bytes"])
    echo(
        f"{whole[0]:,} samples, {whole[1]}; {told['nodes']:,} nodes, {told['ranks']:,} ranks of "
        f"{told['batch_size']}: {told['steps']:,} steps an epoch, mode {told['mode']}"
    )
    held = told["held_bytes"] / max(1, told["bytes"])
    rows = [
        ("in tiers", f"{format_bytes(told['held_bytes'])} of the data, {held:.0%}"),
        (
            "between nodes",
            f"{format_bytes(told['moved_bytes'])} an epoch, {told['moved_share']:.2%} of the bytes",
        ),
        (
            "a node's link",
            f"{format_bytes(told['link_bytes_out_max'])} out, "
            f"{format_bytes(told['link_bytes_in_max'])} in, at most",
        ),
        (
            "messages",
            f"{told['messages']:,} in {told['windows']:,} windows; a rank has at most "
            f"{told['peers']:,} peers",
        ),
        ("memory", f"{format_bytes(told['window_bytes'])} of messages a rank and window, at most"),
        ("from the source", f"{format_bytes(told['source_bytes'])} in each later epoch"),
    ]
    for name, key in (("first epoch", "first_epoch"), ("later epochs", "later_epoch")):
        line = told[key]
        rows.append(
            (
                name,
                f"{format_seconds(line['seconds'])}, first batch after "
                f"{format_seconds(line['first_batch_s'])}, waiting {line['stall_share']:.1%}; "
                f"most in use: {line['bottleneck']} ({line['busy'][line['bottleneck']]:.0%})",
            )
        )
    for name, text in rows:
        echo(f"  {name:<16} {text}")
    for remedy in told["remedies"]:
        echo(remedy)


def _show_sweep(told: Sequence[dict[str, Any]]) -> None:
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
    for row in told:
        later = row["later_epoch"]
        table.add_row(
            f"{row['nodes']:,}",
            f"{row['steps']:,}",
            f"{row['held_bytes'] / max(1, row['bytes']):.0%}",
            f"{row['moved_share']:.2%}",
            format_bytes(row["source_bytes"]),
            format_seconds(row["first_epoch"]["seconds"]),
            format_seconds(later["seconds"]),
            f"{later['stall_share']:.1%}",
            later["bottleneck"],
        )
    Console(width=max(110, Console().width)).print(table)


def _draw(told: Sequence[dict[str, Any]], path: str) -> None:
    with picture(path) as pyplot:
        nodes = [row["nodes"] for row in told]
        figure, (times, shares) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 7))
        for key, name in (("first_epoch", "first epoch"), ("later_epoch", "later epochs")):
            times.plot(nodes, [row[key]["seconds"] for row in told], marker="o", label=name)
        times.set_ylabel("seconds an epoch")
        times.set_yscale("log")
        shares.plot(nodes, [row["moved_share"] for row in told], marker="o", label="moved")
        shares.plot(
            nodes,
            [row["source_bytes"] / max(1, row["bytes"]) for row in told],
            marker="o",
            label="from the source",
        )
        shares.plot(
            nodes, [row["later_epoch"]["stall_share"] for row in told], marker="o", label="waiting"
        )
        shares.set_ylabel("share of the bytes, or of the time")
        shares.set_xlabel("nodes")
        shares.set_xscale("log", base=2)
        for axes in (times, shares):
            axes.legend()
            axes.grid(True, alpha=0.3)
        job = told[0]
        figure.suptitle(
            f"{job['samples']:,} samples, {format_bytes(job['bytes'])}, mode {job['mode']}"
        )
