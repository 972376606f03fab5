"""Plan of a staging: its options, and the blocks that each tier of a node is to hold."""

import fnmatch
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader, data_bytes
from dlio.data.splits import FormatChoice, ReaderChoices, SplitChoice
from dlio.errors import UsageError
from dlio.storage.file_system_kind import file_system_of
from dlio.storage.mount import Layout, Mount
from dlio.storage.source_requests import piece_bytes
from dlio.util.options import CheckedOptions, Option
from dlio.util.printable import print_line
from dlio.util.units import counted, exact_bytes, format_bytes, parse_bytes

Verify = Literal["none", "new", "all"]
"""Blocks to read back and compare: none, those that are written now, or also older ones."""


def _rate(text: str) -> float:
    rate = parse_bytes(text.removesuffix("/s"), "--bwlimit")
    if rate < 1:
        raise UsageError(f"--bwlimit {text}: give at least 1B")
    return float(rate)


@dataclass(frozen=True, slots=True)
class StageOptions(CheckedOptions):
    """How to stage; options of `dlio stage`."""

    split: SplitChoice = None
    format: FormatChoice = None
    reader_option: ReaderChoices = ()
    tiers: Annotated[
        str | None,
        Option(
            "Disk tiers to fill, fastest first, such as /local/scratch:20GiB.",
            metavar="TIERS",
            default_text="DLIO_TIERS",
        ),
    ] = None
    layout: Annotated[
        Layout,
        Option(
            "partition: put each block on one node. replicate: put all blocks on each node. auto: "
            "replicate if there is room."
        ),
    ] = "partition"
    verify: Annotated[
        Verify,
        Option(
            "new: read back and verify each block that is written. all: verify blocks of earlier "
            "runs, too. none: verify nothing."
        ),
    ] = "new"
    bandwidth: Annotated[
        float | None,
        Option(
            "Limit of the bandwidth from the source, over all ranks, such as 500MiB.",
            name="bwlimit",
            unit="bytes per second",
            metavar="SIZE",
            parse=_rate,
            show=exact_bytes,
        ),
    ] = None
    workers: Annotated[
        int | None,
        Option(
            "Requests to the source that each rank has in flight.",
            least=1,
            most=1024,
            default_text="chosen by the kind of source",
        ),
    ] = None
    deadline_s: Annotated[
        float | None,
        Option(
            "Stop after this time, with exit code 3; run again to continue.",
            name="deadline",
            unit="seconds",
            least=0,
        ),
    ] = None
    include: Annotated[
        tuple[str, ...],
        Option(
            "Stage only blocks with a sample whose name matches this pattern, such as 'n01*/*'. "
            "Repeatable.",
            metavar="PATTERN",
        ),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        Option(
            "Ignore samples whose name matches this pattern when blocks are chosen. Repeatable.",
            metavar="PATTERN",
        ),
    ] = ()
    pin: Annotated[bool, Option("Protect the staged data from being evicted to make room.")] = False
    pretend_nodes: Annotated[
        int | None,
        Option("Number of nodes to pretend: the ranks are divided into this many groups.", least=1),
    ] = None
    allow_partial: Annotated[
        bool, Option("End with exit code 0, not 4, where the tiers have no room for all blocks.")
    ] = False
    replicas: Annotated[
        tuple[str, ...],
        Option(
            "Another place that holds SRC; reads go to the fastest. Repeatable.",
            name="replica",
            metavar="PATH",
        ),
    ] = ()


def chosen_blocks(reader: Reader, options: StageOptions) -> npt.NDArray[np.int64]:
    """Return the blocks that are to be staged, on whichever node.

    With `--include` or `--exclude`, these are the blocks with at least one chosen sample.

    Raises UsageError when no sample is chosen.
    """
    layout = reader.layout
    if not options.include and not options.exclude:
        return np.arange(layout.blocks)

    def is_chosen(sample: int) -> bool:
        name = reader.name(sample)
        included = not options.include or any(fnmatch.fnmatch(name, p) for p in options.include)
        return included and not any(fnmatch.fnmatch(name, p) for p in options.exclude)

    chosen = [b for b in range(layout.blocks) if any(map(is_chosen, layout.samples_of(b).tolist()))]
    if not chosen:
        raise UsageError("--include and --exclude leave no sample: `dlio ls` shows their names")
    return np.array(chosen, np.int64)


def blocks_to_read(mounted: Mount, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the blocks that this node reads from the source; other nodes send it the rest."""
    own: npt.NDArray[np.int64] = wanted[mounted.placement.home[wanted] == mounted.nodes.here]
    return own


def plan_tiers(mounted: Mount, wanted: npt.NDArray[np.int64]) -> dict[str, list[dict[str, object]]]:
    """Return the plans of all nodes' tiers as JSON objects, by node name. Collective."""
    plans: list[dict[str, object]] = []
    for number, tier in enumerate(mounted.hierarchy.tiers):
        blocks = wanted[mounted.hierarchy.pinned[wanted] == number]
        missing = np.setdiff1d(blocks, np.fromiter(tier.blocks(), np.int64))
        sizes = mounted.block_bytes
        plans.append(
            {
                "tier": str(tier.spec),
                "blocks": len(blocks),
                "bytes": int(sizes[blocks].sum()),
                "missing_blocks": len(missing),
                "missing_bytes": int(sizes[missing].sum()),
            }
        )
    everyone = mounted.comm.allgather((mounted.nodes.names[mounted.nodes.here], plans))
    return dict(everyone)


def bytes_to_read(mounted: Mount, own: npt.NDArray[np.int64]) -> int:
    """Return the bytes of the blocks in `own` that are not in their tiers yet."""
    here = [tier.blocks() for tier in mounted.hierarchy.tiers]
    tiers = mounted.hierarchy.pinned
    return sum(int(mounted.block_bytes[b]) for b in own.tolist() if b not in here[tiers[b]])


# Results
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
    shortage: str = ""
    """Reason why a disk took fewer blocks than its tier's capacity; empty if it took all."""
    copies: str = ""
    """Reads from each replica of the source by rank 0; empty without replicas."""
    planned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By node name, the blocks that each tier is to hold, and those of them that it lacks."""


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
    for note in (*done.evicted, done.copies, done.shortage):
        if note:
            print_line(note)
    rate = done.read_bytes / max(done.seconds, 1e-9)
    end = "; stopped at the deadline: run again to continue" if done.stopped else ""
    copied = f", {format_bytes(done.copied_bytes)} copied from node to node"
    healed = f", {counted(done.healed_blocks, 'damaged block')} fetched again"
    print_line(
        f"{done.source}: {counted(done.samples, 'sample')}, {format_bytes(done.data_bytes)}; "
        f"{done.kept_share:.0%} of the blocks have a place in tiers on "
        f"{counted(done.nodes, 'node')}; "
        f"{format_bytes(done.read_bytes)} read in {done.seconds:.1f} s ({format_bytes(rate)}/s)"
        f"{copied if done.copied_bytes else ''}{healed if done.healed_blocks else ''}{end}"
    )


def shortfall(done: StageResult) -> str:
    """Return a sentence about the blocks that no tier has room for."""
    missing, samples = format_bytes(done.unplaced_bytes), format_bytes(done.data_bytes)
    if done.shortage:
        return (
            f"{done.unplaced_blocks:,} of {counted(done.blocks, 'block')} ({missing}) of "
            f"{done.source} ({samples}) have no room, and jobs will read them from the source: "
            "make room there (`df` shows bytes of a disk, `df -i` inodes, `ulimit -f` the limit "
            "of file sizes), or allow that by "
            "--allow-partial"
        )
    return (
        f"{done.unplaced_blocks:,} of {counted(done.blocks, 'block')} ({missing}) of {done.source} "
        f"({samples}) do not fit into the tiers, and jobs will read them from the source: give "
        f"--tiers {missing} more, or allow that by --allow-partial"
    )


def print_plan(done: StageResult, bandwidth: float | None) -> None:
    """Print the plan of a staging, with an estimate of its time at a bandwidth of the whole job in
    bytes per second; None assumes a usual rate per node.
    """
    rate = bandwidth / done.nodes if bandwidth is not None else _ASSUMED_RATE
    print_line(
        f"{done.source}: {done.format}, {counted(done.samples, 'sample')} in "
        f"{counted(done.blocks, 'block')}"
    )
    size = f" of {format_bytes(done.request_bytes)} at most" if done.request_bytes else ""
    print_line(
        f"  source on {done.storage}: {counted(done.workers, 'request')}{size} in flight from "
        "each rank"
    )
    for note in done.evicted:
        print_line(f"  {note}")
    longest = 0.0
    if done.unplaced_blocks:
        print_line(f"  {shortfall(done)}")
    for node, plans in done.planned.items():
        moved = sum(plan["missing_bytes"] for plan in plans)
        longest = max(longest, moved / rate)
        for plan in plans:
            print_line(
                f"  {node}: {plan['tier']} is to hold {counted(plan['blocks'], 'block')} "
                f"({format_bytes(plan['bytes'])}), of which {plan['missing_blocks']:,} "
                f"({format_bytes(plan['missing_bytes'])}) would be brought"
            )
    print_line(
        f"  about {longest:,.0f} s at {format_bytes(rate)}/s for each node; nothing was moved"
    )
