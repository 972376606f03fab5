"""`dlio stage`: fill the node-local disk tiers ahead of a job."""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import ConfigFile, OutputOptions, RankOptions
from dlio.comm import world
from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.data.replicas import ReplicatedReader, replicated
from dlio.data.splits import reading_options
from dlio.errors import CorruptBlock, SourceError, TierError, TierFull, UsageError
from dlio.launch.command_ranks import on_ranks
from dlio.storage.block import NO_ROOM, check_block
from dlio.storage.block_fetcher import BlockFiller, filler_threads
from dlio.storage.inventory import evict, set_pinned, stored_data
from dlio.storage.manifest import Manifest, write_manifest
from dlio.storage.mount import Mount, MountOptions, mount
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import choose_tiers
from dlio.util.arguments import PathText, path_in
from dlio.util.child_processes import end_with_parent, process_state
from dlio.util.options import Option
from dlio.util.printable import print_line
from dlio.util.settings import settings
from dlio.util.units import counted, format_bytes
from dlio.util.whole_files import not_written
from dlio_staging.byte_progress import ByteProgress, show_progress
from dlio_staging.stage_plan import (
    StageOptions,
    StageResult,
    blocks_to_read,
    bytes_to_read,
    chosen_blocks,
    plan_tiers,
    print_plan,
    print_result,
    shortfall,
    start_report,
)

# Copies of blocks from node to node, so that each block is read from the source only once
#
# Nodes exchange in rounds: in round s, node i sends the blocks of which it is the home to node
# i + s and receives from node i - s, so that each link carries one stream at a time. All nodes
# first agree on the blocks that each one lacks; sender and receiver then know the transfers without
# requests.

_AT_A_TIME = 4
"""Blocks in flight from one node to another."""
_TAG = 3


def replicate(mounted: Mount, wanted: npt.NDArray[np.int64], deadline: float | None) -> int | None:
    """Copy the blocks that this node lacks from the nodes that have read them. Collective.

    This node is to hold the `wanted` blocks in the end. The deadline is a time of `time.monotonic`.

    Returns the bytes received; None when the deadline came first. A disk that has no room for more
    is noted in the fetcher's `short`. Raises TierError when a node cannot send one of its blocks.
    """
    comm, ranks, here = mounted.comm, mounted.ranks, mounted.nodes.here
    leaders = [int(ranks.local(node)[0]) for node in range(len(mounted.nodes.names))]
    leads = comm.rank == leaders[here]
    lacking = [b for b in wanted.tolist() if not _tier(mounted, b).has(b)] if leads else []
    lacking_of = comm.allgather(lacking)
    received = 0
    late = False
    if leads:
        for shift in range(1, len(leaders)):
            to, source = (here + shift) % len(leaders), (here - shift) % len(leaders)
            sends = [b for b in lacking_of[leaders[to]] if mounted.placement.home[b] == here]
            gets = [b for b in lacking if mounted.placement.home[b] == source]
            # Sender and receiver compute the same number of turns from the same lists.
            for turn in range(0, max(len(sends), len(gets)), _AT_A_TIME):
                received += _turn(
                    mounted,
                    (leaders[to], sends[turn : turn + _AT_A_TIME]),
                    (leaders[source], gets[turn : turn + _AT_A_TIME]),
                )
            late = deadline is not None and time.monotonic() > deadline
    comm.barrier()
    return None if late else received


def _turn(mounted: Mount, out: tuple[int, list[int]], into: tuple[int, list[int]]) -> int:
    """Send blocks to a rank and receive some from another at once; return the bytes received.

    Raises TierError when a block of this node is damaged or another block arrives.
    """
    comm, sizes = mounted.comm, mounted.block_bytes
    memory = [memoryview(bytearray(int(sizes[block]))) for block in into[1]]
    requests = [comm.irecv(each, into[0], _TAG) for each in memory]
    for block in out[1]:
        try:
            data = _tier(mounted, block).read_whole(block)
        except (CorruptBlock, OSError) as error:
            raise TierError(f"block {block} cannot be sent to other nodes: {error}") from error
        requests.append(comm.isend(data, out[0], _TAG))
    comm.wait(requests, f"{counted(len(into[1]), 'block')} from rank {into[0]}")
    for block, data in zip(into[1], memory, strict=True):
        info = check_block(data, f"block {block} from rank {into[0]}", 0)
        if info.block != block or info.fingerprint != mounted.hierarchy.reader.fingerprint:
            raise TierError(f"rank {into[0]} sent block {info.block} instead of {block}")
        try:
            _tier(mounted, block).publish(block, [data])
        except TierFull as error:
            fetcher = mounted.hierarchy.block_fetcher
            fetcher.fill_up(int(mounted.hierarchy.pinned[block]), error)
    return sum(len(each) for each in memory)


def _tier(mounted: Mount, block: int) -> Tier:
    """Return the tier of this node that a block is pinned in."""
    return mounted.hierarchy.tiers[int(mounted.hierarchy.pinned[block])]


# A way out of commands whose source hangs
#
# A thread in a system call on a hung file system keeps its process from ending, even by SIGKILL. So
# a command reads its source in a child process. The parent touches no source; it ends when the
# child's first thread has ended.

_PATIENCE_S: Final = 5.0
_CHILD_POLL_S: Final = 0.02
_HUNG: Final = 2


def abandonable() -> None:
    """Continue in a child process; the parent waits, forwards signals and exits as the child does.

    Call it before any thread is started. In a rank, whose launcher ends it, nothing happens.
    """
    if under_mpi() or under_torch() or settings().no_fork:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # A group of its own: a terminal's Ctrl-C comes once, through the parent.
        os.setpgid(0, 0)
        end_with_parent(parent)
        return
    os._exit(_wait(child))


def _wait(child: int) -> int:
    """Wait for the child and return the exit code; end by the same signal if it was killed."""

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    ended_at: float | None = None
    delay = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                with suppress(OSError):  # The handling of SIGKILL cannot be set.
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            return code
        if process_state(child) == "Z":  # Its first thread has ended; others may keep it alive.
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _PATIENCE_S:
                print_line(
                    f"dlio: process {child} is left behind: it waits for a file system that hangs",
                    sys.stderr,
                )
                return _HUNG
        time.sleep(delay)
        delay = min(_CHILD_POLL_S, delay * 1.5)


# Staging

STOPPED: Final = 3
"""Exit code when the deadline passes before all blocks are in place."""
PARTIAL: Final = 4
"""Exit code when the tiers have no room for all blocks."""
_POLL_S: Final = 0.1
_SPARE_FILES: Final = 8
_SPARE_BYTES: Final = 1 << 20
"""Room that is left on a disk that turned out too small: jobs write leases and the like there."""


@dataclass(frozen=True, slots=True)
class StageArguments:
    """The data to stage, and whether anything is moved; options of `dlio stage`."""

    source: Annotated[
        str, Option("Data set to stage: a path or a URL.", positional=True, metavar="SRC")
    ]
    dry_run: Annotated[bool, Option("Show what would be moved where, and move nothing.")] = False
    resume: Annotated[
        bool, Option("Keep blocks that earlier runs have staged; --no-resume evicts them first.")
    ] = True


def stage(
    path: PathText, options: StageOptions, *, dry: bool = False, quiet: bool = True
) -> StageResult:
    """Fill the disk tiers of the nodes that this process's ranks run on. Collective.

    A later job on the same nodes, with the same tiers, starts with the blocks in place.

    Args:
        dry: plan, and move nothing.
        quiet: show no progress.

    Raises UsageError without a disk tier, and TierError when some blocks cannot be fetched; those
    that were fetched stay.
    """
    path = path_in("path", path)
    started = time.monotonic()
    deadline = None if options.deadline_s is None else started + options.deadline_s
    source_options = reading_options(options.split, options.format, options.reader_option)
    reader = replicated(
        [
            open_reader(each, follow_links=None, trust=None, **source_options)
            for each in (path, *options.replicas)
        ]
    )
    disks = [spec for spec in choose_tiers(options.tiers, 0) if spec.kind == "disk"]
    if not disks:
        raise UsageError(
            "nothing to stage into: name a disk tier, as in --tiers /local/scratch:20GiB (a RAM "
            "tier lives no longer than its job, which fills it by itself)"
        )
    how = MountOptions(
        layout=options.layout,
        requests=options.workers,
        rate=options.bandwidth,
        timeout_s=settings().timeout_s,
        check=options.verify != "none",
        strict=True,
        dry=dry,
    )
    with mount(reader, disks, world(), options.pretend_nodes, options=how) as mounted:
        chosen = chosen_blocks(reader, options)
        tiers = mounted.hierarchy.pinned
        wanted = chosen[tiers[chosen] >= 0]
        unplaced = chosen[(tiers[chosen] < 0) & (mounted.placement.home[chosen] < 0)]
        done = start_report(reader, mounted, options.layout)
        if not done.kept_share:
            raise UsageError(
                f"--tiers {','.join(map(str, disks))}: too small for any block of {path} "
                f"({format_bytes(int(mounted.block_bytes.min()))} or more): give more capacity"
            )
        done.unplaced_blocks = len(unplaced)
        done.unplaced_bytes = int(mounted.block_bytes[unplaced].sum())
        done.planned = plan_tiers(mounted, wanted)
        if dry:
            reader.close()
            return done
        _bring(reader, mounted, wanted, options, done, deadline, quiet=quiet)
        if isinstance(reader, ReplicatedReader):
            done.copies = reader.summary()
        mounted.comm.barrier()
    reader.close()
    done.seconds = time.monotonic() - started
    return done


@with_help(
    "dlio stage packed --tiers /local/scratch:200GiB",
    "dlio stage /lustre/imagenet --tiers /local/scratch:200GB --dry-run",
    "dlio launch --ranks-per-node 1 stage packed --tiers /local/scratch:200GiB",
    usual=(
        *("source", "tiers"),
        (
            "layout",
            "partition: each block on one node. replicate: on all. auto: on all if there is room.",
        ),
        *("bandwidth", "deadline_s"),
        ("include", "Stage only blocks that hold a sample of such a name, as 'n01*/*'"),
        *("pin", "allow_partial", "ranks", "dry_run"),
    ),
)
def command(
    staging: StageArguments,
    options: StageOptions,
    ranks: RankOptions,
    output: OutputOptions,
    file: ConfigFile,  # noqa: ARG001 - read before
) -> None:
    """Fill this node's disk tiers with a data set, ahead of a job.

    Runs alone, in ranks of this machine (-n), or by dlio launch, mpirun or srun with at least one
    rank on each node; ranks share the work. Run again, it continues where it stopped. Exit codes:
    0 when all blocks are in place, 2 for an error, 3 when the deadline came first, 4 when the
    tiers have no room for all blocks (those that fit are in place; --allow-partial makes it 0),
    130 when interrupted.
    """
    output.check_writable()
    on_ranks(ranks.ranks, stage_rank, staging, options, output, backend=ranks.backend)


def stage_rank(staging: StageArguments, options: StageOptions, output: OutputOptions) -> None:
    """Stage as this rank; rank 0 prints the result.

    Raises SystemExit with one of the command's exit codes.
    """
    abandonable()
    if not staging.resume and not staging.dry_run:
        _evict_earlier(staging.source, options)
    done = stage(staging.source, options, dry=staging.dry_run, quiet=False)
    if world().rank:
        return
    if staging.dry_run:
        print_plan(done, options.bandwidth)
    else:
        print_result(done)
    output.write(asdict(done))
    if staging.dry_run:
        return
    if done.stopped:
        raise SystemExit(STOPPED)
    if done.unplaced_blocks and not options.allow_partial:
        print_line(f"dlio: {shortfall(done)}", stream=sys.stderr)
        raise SystemExit(PARTIAL)


def _bring(
    reader: Reader,
    mounted: Mount,
    wanted: npt.NDArray[np.int64],
    options: StageOptions,
    done: StageResult,
    deadline: float | None,
    *,
    quiet: bool,
) -> None:
    """Read and copy the missing blocks; add the results to `done`. Collective.

    Raises TierError when some blocks cannot be fetched.
    """
    comm = mounted.comm
    if options.verify == "all":
        done.healed_blocks = sum(comm.allgather(_discard_damaged(mounted, wanted)))
    comm.barrier()  # A rank that scans its tiers must not see blocks that another has just written.
    own = blocks_to_read(mounted, wanted)
    shown = comm.rank == 0 and not quiet
    with show_progress(bytes_to_read(mounted, own), shown) as progress:
        ended = _read_blocks(mounted, own, deadline, progress)
    complete = all(comm.allgather(ended))
    if complete:
        wanted = _taken(mounted, own, wanted, done)
    copies = any(comm.allgather(len(own) != len(wanted)))
    if complete and copies:
        copied = replicate(mounted, wanted, deadline)
        complete = all(comm.allgather(copied is not None))
        done.copied_bytes = sum(comm.allgather(copied or 0))
        if complete:
            _taken(mounted, wanted, wanted, done)
    done.read_bytes = sum(comm.allgather(mounted.hierarchy.counters.bytes["source"]))
    done.stopped = not complete
    done.complete = complete and not done.unplaced_blocks
    if complete:
        _write_manifests(reader, mounted, done, pin=options.pin)


def _taken(
    mounted: Mount, own: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64], done: StageResult
) -> npt.NDArray[np.int64]:
    """Return the `wanted` blocks without those that some disk had no room for, of which `own` are
    this node's to bring. Collective.

    Raises TierError if blocks are missing for other reasons.
    """
    comm, short = mounted.comm, mounted.hierarchy.block_fetcher.short
    missing = [block for block in own.tolist() if not _tier(mounted, block).has(block)]
    lacking = [block for each in comm.allgather(missing) for block in each]
    if not lacking:
        return wanted
    notes = "; ".join([*mounted.hierarchy.notes()[:3], *_read_only(mounted, missing)])
    reasons = next(filter(None, comm.allgather(notes)), "see the errors of other ranks")
    # Ranks of a node share its blocks: those that another had no room for are missing here, too.
    everywhere = [set(each) for each in comm.allgather(sorted(short))]
    nodes = mounted.ranks.node_of.tolist()
    of_node = set().union(
        *(each for rank, each in enumerate(everywhere) if nodes[rank] == mounted.nodes.here)
    )
    of_room = all(int(mounted.hierarchy.pinned[block]) in of_node for block in missing)
    if not all(comm.allgather(of_room)):
        raise TierError(
            f"{len(missing)} of {counted(len(own), 'block')} could not be staged: {reasons}"
        )
    _leave_out(mounted, lacking, reasons, done)
    return np.setdiff1d(wanted, lacking)


def _read_only(mounted: Mount, blocks: list[int]) -> list[str]:
    """Name the tiers of these blocks that nothing can be written to."""
    tiers = {tier.path for tier in (_tier(mounted, block) for block in blocks) if not tier.writable}
    return [f"{path} is on a read-only file system" for path in sorted(tiers)]


def _leave_out(mounted: Mount, blocks: list[int], reason: str, done: StageResult) -> None:
    """Count blocks that disks had no room for among those without a place."""
    blocks = sorted(set(blocks))
    done.shortage = done.shortage or reason
    done.unplaced_blocks += len(blocks)
    done.unplaced_bytes += int(mounted.block_bytes[blocks].sum())
    done.kept_share -= len(blocks) / done.blocks


def _read_blocks(
    mounted: Mount, own: npt.NDArray[np.int64], deadline: float | None, progress: ByteProgress
) -> bool:
    """Read this node's share of the blocks from the source; return False at the deadline.

    Raises SourceError when the source delivers nothing for the time of DLIO_TIMEOUT.
    """
    hierarchy = mounted.hierarchy
    threads = filler_threads(mounted.block_bytes, mounted.requests)
    moved, moved_at = -1, time.monotonic()
    with BlockFiller(hierarchy.block_fetcher, lambda: iter(own.tolist()), threads) as filler:
        while not filler.join(_POLL_S):
            now = time.monotonic()
            read = hierarchy.counters.bytes["source"]
            progress(read)
            if read != moved:
                moved, moved_at = read, now
            if deadline is not None and now > deadline:
                return False
            if now - moved_at > settings().timeout_s:
                places = ", ".join(tier.path for tier in hierarchy.tiers)
                raise SourceError(
                    f"{hierarchy.reader.path}: nothing was read for {now - moved_at:.0f} s: the "
                    f"source hangs, or a place that is written to ({places}); run again when it "
                    "answers (DLIO_TIMEOUT sets the patience)"
                )
    progress(hierarchy.counters.bytes["source"])
    return True


def _discard_damaged(mounted: Mount, wanted: npt.NDArray[np.int64]) -> int:
    """Verify blocks of earlier runs and discard damaged ones; return their number.

    Each rank of a node verifies a part of the node's blocks.
    """
    ranks = mounted.ranks.local(mounted.nodes.here).tolist()
    part = ranks.index(mounted.comm.rank)
    damaged = 0
    for block in wanted[part :: len(ranks)].tolist():
        tier = _tier(mounted, block)
        try:
            tier.check(block)
        except FileNotFoundError:
            continue
        except (CorruptBlock, OSError):
            tier.discard(block)
            damaged += 1
    return damaged


def _write_manifests(reader: Reader, mounted: Mount, done: StageResult, *, pin: bool) -> None:
    """Write each tier's manifest, and pin the data if asked to; done by one rank of each node.
    Collective.

    On a disk without room for that, and for the files of jobs, blocks make room, which are then
    left out.
    """
    given_up: list[int] = []
    short = mounted.hierarchy.block_fetcher.short
    if mounted.ranks.local(mounted.nodes.here)[0] == mounted.comm.rank:
        for number, tier in enumerate(mounted.hierarchy.tiers):
            blocks = sorted(tier.blocks())
            while blocks and number in short and not _has_spare_room(tier):
                given_up.append(blocks.pop())
                tier.discard(given_up[-1])
            given_up += _write_manifest(reader, tier, blocks, pin=pin)
    lacking = [block for each in mounted.comm.allgather(given_up) for block in each]
    if lacking:
        _leave_out(mounted, lacking, "a disk has no room for the list of its blocks", done)


def _has_spare_room(tier: Tier) -> bool:
    room = os.fstatvfs(tier.folder)
    files = room.f_favail if room.f_files else _SPARE_FILES  # Some file systems do not count them.
    return files >= _SPARE_FILES and room.f_bavail * room.f_frsize >= _SPARE_BYTES


def _write_manifest(reader: Reader, tier: Tier, blocks: list[int], *, pin: bool) -> list[int]:
    """Write the manifest of a tier's blocks, and pin its data if asked to; return those of the
    blocks that were removed to make room for it. Raises TierError."""
    about = {
        "source": os.path.abspath(reader.path) if os.path.exists(reader.path) else reader.path,
        "format": reader.format,
        "fingerprint": reader.fingerprint,
    }
    given_up: list[int] = []
    while True:
        digests = [tier.digest(block) for block in blocks]
        manifest = Manifest(about, np.array(blocks, np.uint64), np.array(digests, np.uint64))
        try:
            write_manifest(tier.folder, manifest)
            if pin:
                set_pinned(tier.spec.root, reader.fingerprint, True)
            return given_up
        except TierError:
            raise
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise TierError(not_written(tier.path, error)) from error
            if not blocks:
                return given_up  # There is nothing to list.
        given_up.append(blocks.pop())
        tier.discard(given_up[-1])


def _evict_earlier(source: str, options: StageOptions) -> None:
    """Evict the blocks of this data set that earlier runs have staged. Collective."""
    chosen = reading_options(options.split, options.format, options.reader_option)
    reader = open_reader(source, follow_links=None, trust=None, **chosen)
    if world().rank == 0:
        for spec in choose_tiers(options.tiers, 0):
            if spec.kind == "disk" and any(
                entry.fingerprint == reader.fingerprint for entry in stored_data(spec.root)
            ):
                evict(spec.root, reader.fingerprint)
    world().barrier()
    with suppress(OSError):
        reader.close()
