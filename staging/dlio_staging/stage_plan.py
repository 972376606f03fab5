"""Plan of a staging: its options, and the blocks that each tier of a node is to hold."""

import fnmatch
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader
from dlio.errors import UsageError
from dlio.storage.mount import Layout, Mount
from dlio.util.options import Option, check
from dlio.util.units import exact_bytes, parse_bytes

Verify = Literal["none", "new", "all"]
"""Blocks to read back and compare: none, those that are written now, or also older ones."""


def _rate(text: str) -> float:
    rate = parse_bytes(text.removesuffix("/s"))
    if rate < 1:
        raise UsageError(f"--bwlimit {text}: give at least 1B")
    return float(rate)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How to stage; options of `dlio stage`."""

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
            unit="per second",
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

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Blocks that one tier of a node is to hold; written by `--report`."""

    tier: str
    blocks: int
    """Blocks that the tier is to hold."""
    bytes: int
    missing_blocks: int
    """Blocks of these that the tier does not have yet."""
    missing_bytes: int


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
    plans = []
    for number, tier in enumerate(mounted.hierarchy.tiers):
        blocks = wanted[mounted.hierarchy.pins.tier[wanted] == number]
        missing = np.setdiff1d(blocks, np.fromiter(tier.blocks(), np.int64))
        sizes = mounted.block_bytes
        plans.append(
            asdict(
                TierPlan(
                    tier=str(tier.spec),
                    blocks=len(blocks),
                    bytes=int(sizes[blocks].sum()),
                    missing_blocks=len(missing),
                    missing_bytes=int(sizes[missing].sum()),
                )
            )
        )
    everyone = mounted.comm.allgather((mounted.nodes.names[mounted.nodes.here], plans))
    return dict(everyone)


def bytes_to_read(mounted: Mount, own: npt.NDArray[np.int64]) -> int:
    """Return the bytes of the blocks in `own` that are not in their tiers yet."""
    here = [tier.blocks() for tier in mounted.hierarchy.tiers]
    tiers = mounted.hierarchy.pins.tier
    return sum(int(mounted.block_bytes[b]) for b in own.tolist() if b not in here[tiers[b]])


def is_present(mounted: Mount, block: int) -> bool:
    """True if a block that is pinned on this node is in its tier."""
    return mounted.hierarchy.tiers[int(mounted.hierarchy.pins.tier[block])].has(block)
