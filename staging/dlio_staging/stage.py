"""`dlio stage`: fill the node-local disk tiers ahead of a job."""

import fnmatch
import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from dlio.cli.records import ConfigFile, Output
from dlio.data.reader import Reader, data_bytes
from dlio.errors import SourceError, TierError, UsageError
from dlio.storage.mount import Layout, Mount, MountOptions, mount
from dlio.util.files import write_json
from dlio.util.options import Option, check
from dlio.util.settings import settings
from dlio.util.units import exact_bytes, format_bytes, parse_bytes

__all__ = ["STOPPED", "Plan", "StageOptions", "Staged", "Staging", "Verify", "command", "stage"]

Verify = Literal["none", "new", "all"]
STOPPED = 3
"""Exit code when the deadline came first."""
_NEWS_EVERY_S = 10.0
_POLL_S = 0.1
_ASSUMED_RATE = 200 << 20


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
class Staging:
    """The data to stage, and whether anything is moved; options of `dlio stage`."""

    source: Annotated[
        str, Option("Data set to stage: a path or a URL.", positional=True, metavar="SRC")
    ]
    dry_run: Annotated[bool, Option("Show what would be moved where, and move nothing.")] = False
    resume: Annotated[
        bool, Option("Keep blocks that earlier runs have staged; --no-resume evicts them first.")
    ] = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks that one node would stage."""

    tier: str
    blocks: int
    """That the tier is to hold."""
    bytes: int
    missing_blocks: int
    missing_bytes: int


@dataclass(slots=True)
class Staged:
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
    """Requests in flight of each rank."""
    read_bytes: int = 0
    """Bytes read from the source just now."""
    copied_bytes: int = 0
    """Bytes that went from node to node."""
    healed_blocks: int = 0
    """Blocks that were there, failed verification, and were brought again."""
    evicted: list[str] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    copies: str = ""
    """What each copy of the source gave to rank 0, where there are several."""
    planned: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By node, what each tier was to hold and had to bring."""


def stage(path: str, options: StageOptions, *, dry: bool = False, quiet: bool = True) -> Staged:
    """Fill the disk tiers of the nodes that this process's ranks run on. Collective.

    A later job on the same nodes, with the same tiers, starts with the blocks in place.

    Args:
        dry: plan, and move nothing.
        quiet: no progress.

    Raises UsageError without a disk tier, and TierError when blocks could not be brought: what
    was brought stays.
    """
    from dlio.comm import world
    from dlio.data.reader import open_reader
    from dlio.data.replicas import Replicated, replicated
    from dlio.storage.spec import choose_tiers
    from dlio_staging.progress import show_progress

    started = time.monotonic()
    deadline = None if options.deadline_s is None else started + options.deadline_s
    reader = replicated([open_reader(each) for each in (path, *options.replicas)])
    disks = [
        spec for spec in choose_tiers(options.tiers, data_bytes(reader)) if spec.kind == "disk"
    ]
    if not disks:
        raise UsageError(
            "nothing to stage into: name a disk tier, as in --tiers /local/scratch:20GiB (a RAM "
            "tier lives no longer than its job, which fills it by itself)"
        )
    comm = world()
    how = MountOptions(
        layout=options.layout,
        requests=options.workers,
        rate=options.bandwidth,
        timeout_s=_source_timeout_s(),
        check=options.verify != "none",
    )
    with mount(reader, disks, comm, options.pretend_nodes, options=how) as mounted:
        wanted = _wanted(reader, mounted, options)
        done = _describe(reader, mounted, options)
        if not done.kept_share:
            raise UsageError(
                f"--tiers {','.join(map(str, disks))}: too small for any block of {path} "
                f"({format_bytes(int(mounted.block_bytes.min()))} or more): give more capacity"
            )
        done.planned = _plans(mounted, wanted)
        if dry:
            reader.close()
            return done
        if options.verify == "all":
            done.healed_blocks = sum(comm.allgather(_discard_damaged(mounted, wanted)))
        comm.barrier()  # A rank that scans must not see what another one has brought meanwhile.
        own = _own(mounted, wanted)
        with show_progress(_left_bytes(mounted, own), comm.rank == 0 and not quiet) as progress:
            ended = _fill(mounted, own, deadline, progress)
        complete = all(comm.allgather(ended))
        missing = [int(block) for block in own if not _has(mounted, int(block))]
        if complete and any(comm.allgather(len(missing))):
            reasons = "; ".join(mounted.hierarchy.notes()[:3]) or "other ranks say why"
            raise TierError(f"{len(missing)} of {len(own)} blocks could not be staged: {reasons}")
        copies = any(comm.allgather(len(own) != len(wanted)))
        if complete and copies:
            from dlio_staging.replicate import replicate

            copied = replicate(mounted, wanted, deadline)
            complete = all(comm.allgather(copied is not None))
            done.copied_bytes = sum(comm.allgather(copied or 0))
        done.read_bytes = sum(comm.allgather(mounted.hierarchy.counters.bytes["source"]))
        done.complete = complete
        if isinstance(reader, Replicated):
            done.copies = reader.summary()
        if complete:
            _finish(mounted, options)
        comm.barrier()
    reader.close()
    done.seconds = time.monotonic() - started
    return done


def command(
    staging: Staging,
    options: StageOptions,
    output: Output,
    file: ConfigFile,  # noqa: ARG001 - read before
) -> None:
    """Fill this node's disk tiers with a data set, ahead of a job.

    Runs alone, or under mpirun or srun with at least one rank on each node. Run again, it
    continues where it stopped. Exit codes: 0 when all blocks are in place, 2 for an error, 3 when
    the deadline came first, 130 when interrupted.
    """
    from dlio_staging.abandon import abandonable

    abandonable()
    from dlio.comm import world

    output.check_writable()
    if not staging.resume and not staging.dry_run:
        _start_afresh(staging.source, options.tiers)
    done = stage(staging.source, options, dry=staging.dry_run, quiet=False)
    if world().rank:
        return
    if staging.dry_run:
        _tell_plan(done, options.bandwidth)
    else:
        _tell(done)
    about = asdict(done)
    if output.report is not None:
        write_json(output.report, about)
    if output.as_json:
        print(json.dumps(about))
    if not done.complete and not staging.dry_run:
        raise SystemExit(STOPPED)


def _wanted(reader: Reader, mounted: Mount, options: StageOptions) -> npt.NDArray[np.int64]:
    """The blocks that this node is to hold in the end, as far as samples are chosen."""
    pinned = np.flatnonzero(mounted.hierarchy.pins.tier >= 0)
    if not options.include and not options.exclude:
        return pinned

    def chosen(sample: int) -> bool:
        name = reader.name(sample)
        into = not options.include or any(fnmatch.fnmatch(name, p) for p in options.include)
        return into and not any(fnmatch.fnmatch(name, p) for p in options.exclude)

    layout = reader.layout
    kept = [b for b in pinned.tolist() if any(chosen(int(s)) for s in layout.samples_of(b))]
    if not any(mounted.comm.allgather(len(kept))):
        raise UsageError("--include and --exclude leave no sample: `dlio ls` shows their names")
    return np.array(kept, np.int64)


def _own(mounted: Mount, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those that this node reads from the source; the others come from nodes."""
    own: npt.NDArray[np.int64] = wanted[mounted.placement.home[wanted] == mounted.nodes.here]
    return own


def _describe(reader: Reader, mounted: Mount, options: StageOptions) -> Staged:
    return Staged(
        source=reader.path,
        format=reader.format,
        fingerprint=reader.fingerprint,
        samples=len(reader),
        data_bytes=data_bytes(reader),
        blocks=reader.layout.blocks,
        kept_share=float((mounted.placement.home >= 0).mean()),
        nodes=len(mounted.nodes.names),
        layout=options.layout,
        workers=mounted.requests,
        evicted=[note for notes in mounted.comm.allgather(mounted.notes) for note in notes],
    )


def _plans(mounted: Mount, wanted: npt.NDArray[np.int64]) -> dict[str, list[dict[str, Any]]]:
    plans = []
    for number, tier in enumerate(mounted.hierarchy.tiers):
        blocks = wanted[mounted.hierarchy.pins.tier[wanted] == number]
        missing = np.setdiff1d(blocks, np.fromiter(tier.blocks(), np.int64))
        sizes = mounted.block_bytes
        plans.append(
            asdict(
                Plan(
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


def _left_bytes(mounted: Mount, own: npt.NDArray[np.int64]) -> int:
    here = [tier.blocks() for tier in mounted.hierarchy.tiers]
    tiers = mounted.hierarchy.pins.tier
    return sum(int(mounted.block_bytes[b]) for b in own.tolist() if b not in here[tiers[b]])


def _has(mounted: Mount, block: int) -> bool:
    return mounted.hierarchy.tiers[int(mounted.hierarchy.pins.tier[block])].has(block)


def _fill(
    mounted: Mount, own: npt.NDArray[np.int64], deadline: float | None, progress: Any
) -> bool:
    """Bring this node's share from the source. False when the deadline came first.

    Raises SourceError when nothing arrives any more.
    """
    from dlio.storage.fill import Filler, filler_threads

    hierarchy = mounted.hierarchy
    threads = filler_threads(mounted.block_bytes, mounted.requests)
    moved, moved_at = -1, time.monotonic()
    with Filler(hierarchy, lambda: iter(own.tolist()), threads) as filler:
        while not filler.join(_POLL_S):
            now = time.monotonic()
            read = hierarchy.counters.bytes["source"]
            progress(read)
            if read != moved:
                moved, moved_at = read, now
            if deadline is not None and now > deadline:
                return False
            if now - moved_at > _source_timeout_s():
                raise SourceError(
                    f"{hierarchy.reader.path}: nothing was read for {now - moved_at:.0f} s: the "
                    "source hangs; run again when it answers (DLIO_TIMEOUT sets the patience)"
                )
    progress(hierarchy.counters.bytes["source"])
    return True


def _discard_damaged(mounted: Mount, wanted: npt.NDArray[np.int64]) -> int:
    """Check what earlier runs have brought; the ranks of a node share that out."""
    from dlio.errors import CorruptBlock

    ranks = mounted.ranks.local(mounted.nodes.here).tolist()
    part = ranks.index(mounted.comm.rank)
    found = 0
    for block in wanted[part :: len(ranks)].tolist():
        tier = mounted.hierarchy.tiers[int(mounted.hierarchy.pins.tier[block])]
        try:
            tier.check(block)
        except FileNotFoundError:
            continue
        except (CorruptBlock, OSError):
            tier.discard(block)
            found += 1
    return found


def _finish(mounted: Mount, options: StageOptions) -> None:
    """Write each tier's manifest, and pin; one rank of each node."""
    from dlio.storage.inventory import set_pinned
    from dlio.storage.manifest import Manifest, write_manifest

    if mounted.ranks.local(mounted.nodes.here)[0] != mounted.comm.rank:
        return
    reader = mounted.hierarchy.reader
    about = {
        "source": os.path.abspath(reader.path) if os.path.exists(reader.path) else reader.path,
        "format": reader.format,
        "fingerprint": reader.fingerprint,
    }
    for tier in mounted.hierarchy.tiers:
        blocks = sorted(tier.blocks())
        digests = [tier.digest(block) for block in blocks]
        manifest = Manifest(about, np.array(blocks, np.uint64), np.array(digests, np.uint64))
        try:
            write_manifest(tier.path, manifest)
        except OSError as error:
            raise TierError(f"{tier.path} cannot be written: {error.strerror}") from error
        if options.pin:
            set_pinned(tier.spec.root, reader.fingerprint, True)


def _start_afresh(source: str, tiers: str | None) -> None:
    """Evict what earlier runs have brought of this data set."""
    from contextlib import suppress

    from dlio.comm import world
    from dlio.data.reader import open_reader
    from dlio.storage.inventory import evict, stored_data
    from dlio.storage.spec import choose_tiers

    reader = open_reader(source)
    if world().rank == 0:
        for spec in choose_tiers(tiers, data_bytes(reader)):
            if spec.kind == "disk" and any(
                entry.fingerprint == reader.fingerprint for entry in stored_data(spec.root)
            ):
                evict(spec.root, reader.fingerprint)
    world().barrier()
    with suppress(OSError):
        reader.close()


def _tell(done: Staged) -> None:
    for note in (*done.evicted, done.copies):
        if note:
            print(note)
    rate = done.read_bytes / max(done.seconds, 1e-9)
    end = "" if done.complete else "; stopped at the deadline: run again to go on"
    copied = f", {format_bytes(done.copied_bytes)} copied from node to node"
    healed = f", {done.healed_blocks} damaged blocks brought again"
    print(
        f"{done.source}: {done.samples:,} samples, {format_bytes(done.data_bytes)}; "
        f"{done.kept_share:.0%} of the blocks have a place in tiers on {done.nodes} node(s); "
        f"{format_bytes(done.read_bytes)} read in {done.seconds:.1f} s ({format_bytes(rate)}/s)"
        f"{copied if done.copied_bytes else ''}{healed if done.healed_blocks else ''}{end}"
    )


def _tell_plan(done: Staged, bandwidth: float | None) -> None:
    # Of the whole job; without a limit, what a node is likely to get.
    rate = bandwidth / done.nodes if bandwidth is not None else _ASSUMED_RATE
    print(f"{done.source}: {done.format}, {done.samples:,} samples in {done.blocks:,} blocks")
    longest = 0.0
    for node, plans in done.planned.items():
        moved = sum(plan["missing_bytes"] for plan in plans)
        longest = max(longest, moved / rate)
        for plan in plans:
            print(
                f"  {node}: {plan['tier']} is to hold {plan['blocks']:,} blocks "
                f"({format_bytes(plan['bytes'])}), of which {plan['missing_blocks']:,} "
                f"({format_bytes(plan['missing_bytes'])}) would be brought"
            )
    print(f"  about {longest:,.0f} s at {format_bytes(rate)}/s a node; nothing was moved")


def _source_timeout_s() -> float:
    return settings().timeout_s
