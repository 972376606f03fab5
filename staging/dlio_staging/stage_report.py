"""Results of `dlio stage`: the report, and the lines that it prints."""

from dataclasses import dataclass, field
from typing import Any, Final

from dlio.data.reader_contract import Reader, data_bytes
from dlio.storage.block_fetcher import piece_bytes
from dlio.storage.file_system_kind import file_system_of
from dlio.storage.mount import Layout, Mount
from dlio.util.printable import print_line
from dlio.util.units import format_bytes

_ASSUMED_RATE: Final = 200 << 20
"""Bytes per second that a node is assumed to get from the source when no limit is given."""


@dataclass(slots=True)
class StageResult:
    """Result of staging over all ranks; written by `--report`."""

    source: str
    format: str
    fingerprint: str
    samples: int
    data_bytes: int
    """Payload bytes of the data set."""
    blocks: int
    kept_share: float
    """Share of the blocks that the tiers of the job hold together."""
    nodes: int
    layout: str
    workers: int
    """Requests to the source that each rank has in flight."""
    request_bytes: int = 0
    """Most bytes of a request; 0 where blocks are read whole, or samples one by one."""
    storage: str = ""
    """File system of the source, and how it spreads a file over its servers."""
    read_bytes: int = 0
    """Bytes read from the source by this run."""
    copied_bytes: int = 0
    """Bytes sent from node to node."""
    healed_blocks: int = 0
    """Blocks of earlier runs that failed verification and were fetched again."""
    evicted: list[str] = field(default_factory=list)
    """One sentence for each data set that was evicted to make room."""
    seconds: float = 0.0
    complete: bool = False
    """True if all blocks are in place."""
    stopped: bool = False
    """True if the deadline came before all blocks that have a place were in it."""
    unplaced_blocks: int = 0
    """Blocks that are to be staged, and for which no tier has room."""
    unplaced_bytes: int = 0
    copies: str = ""
    """Reads from each replica of the source by rank 0; empty without replicas."""
    planned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Plan of each tier (see TierPlan) as a JSON object, by node name."""


def start_report(reader: Reader, mounted: Mount, layout: Layout) -> StageResult:
    """Return a report with the facts that are known before anything is moved. Collective."""
    place = file_system_of(reader.path)
    return StageResult(
        source=reader.path,
        format=reader.format,
        fingerprint=reader.fingerprint,
        samples=len(reader),
        data_bytes=data_bytes(reader),
        blocks=reader.layout.blocks,
        kept_share=float((mounted.placement.home >= 0).mean()),
        nodes=len(mounted.nodes.names),
        layout=layout,
        workers=mounted.requests,
        request_bytes=piece_bytes(place.stripe_bytes)
        if place.network and not reader.objects
        else 0,
        storage=", ".join(filter(None, (place.filesystem, place.stripes))),
        evicted=[note for notes in mounted.comm.allgather(mounted.notes) for note in notes],
    )


def print_result(done: StageResult) -> None:
    """Print a summary of a staging."""
    for note in (*done.evicted, done.copies):
        if note:
            print_line(note)
    rate = done.read_bytes / max(done.seconds, 1e-9)
    end = "; stopped at the deadline: run again to continue" if done.stopped else ""
    copied = f", {format_bytes(done.copied_bytes)} copied from node to node"
    healed = f", {done.healed_blocks} damaged blocks fetched again"
    print_line(
        f"{done.source}: {done.samples:,} samples, {format_bytes(done.data_bytes)}; "
        f"{done.kept_share:.0%} of the blocks have a place in tiers on {done.nodes} node(s); "
        f"{format_bytes(done.read_bytes)} read in {done.seconds:.1f} s ({format_bytes(rate)}/s)"
        f"{copied if done.copied_bytes else ''}{healed if done.healed_blocks else ''}{end}"
    )


def shortfall(done: StageResult) -> str:
    """Return a sentence about the blocks that no tier has room for."""
    missing, samples = format_bytes(done.unplaced_bytes), format_bytes(done.data_bytes)
    return (
        f"{done.unplaced_blocks:,} of {done.blocks:,} blocks ({missing}) of {done.source} "
        f"({samples}) do not fit into the tiers, and jobs will read them from the source: give "
        f"--tiers {missing} more, or allow that by --allow-partial"
    )


def print_plan(done: StageResult, bandwidth: float | None) -> None:
    """Print the plan of a staging, with an estimate of its time.

    Args:
        bandwidth: limit of the whole job in bytes per second; None assumes a usual rate per node.
    """
    rate = bandwidth / done.nodes if bandwidth is not None else _ASSUMED_RATE
    print_line(f"{done.source}: {done.format}, {done.samples:,} samples in {done.blocks:,} blocks")
    size = f" of {format_bytes(done.request_bytes)} at most" if done.request_bytes else ""
    print_line(
        f"  source on {done.storage}: {done.workers} request(s){size} in flight from each rank"
    )
    longest = 0.0
    if done.unplaced_blocks:
        print_line(f"  {shortfall(done)}")
    for node, plans in done.planned.items():
        moved = sum(plan["missing_bytes"] for plan in plans)
        longest = max(longest, moved / rate)
        for plan in plans:
            print_line(
                f"  {node}: {plan['tier']} is to hold {plan['blocks']:,} blocks "
                f"({format_bytes(plan['bytes'])}), of which {plan['missing_blocks']:,} "
                f"({format_bytes(plan['missing_bytes'])}) would be brought"
            )
    print_line(
        f"  about {longest:,.0f} s at {format_bytes(rate)}/s for each node; nothing was moved"
    )
