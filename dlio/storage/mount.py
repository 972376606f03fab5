"""Mounting a data set: its blocks get homes on the job's nodes, and tiers that keep them."""

import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.job_nodes import JobNodes, find_nodes
from dlio.comm.survival.recovery import number_in_job, uniform
from dlio.data.agreement import check_same_data
from dlio.data.flow import Flow
from dlio.data.reader_contract import (
    Reader,
    StoredBlocks,
    abilities_of,
    data_bytes,
    reads_alone,
)
from dlio.data.source import split_fields
from dlio.errors import TierFull, UsageError
from dlio.plan.block_order import BlockOrder
from dlio.plan.order import Order
from dlio.plan.placement import HomeNode, Placement, place
from dlio.plan.schedule import RankNodes
from dlio.storage.block import aligned, block_sizes
from dlio.storage.block_fetcher import (
    IN_FLIGHT_BYTES,
    BlockFiller,
    Filler,
    blocks_in_order,
    filler_threads,
)
from dlio.storage.block_stream import StreamProgress
from dlio.storage.counters import is_fault
from dlio.storage.decoded_tier import DecodedTier
from dlio.storage.file_system_kind import FileSystemKind, file_system_of
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.inventory import DatasetUse, StoredDataset, make_room, remember_root, stored_data
from dlio.storage.sample_fetcher import SampleFiller
from dlio.storage.source_requests import SourceRequests
from dlio.storage.tier import LostTier, Tier, TierView
from dlio.storage.tier_spec import (
    Tiers,
    TierSpec,
    choose_tiers,
    decoded_spec,
    is_parsed,
)
from dlio.util.closable import Closable
from dlio.util.live_figures import PublishedFigures, publish
from dlio.util.shared_folders import SHARED_MEMORY, user_folder
from dlio.util.units import format_bytes

if TYPE_CHECKING:  # `dlio stage` mounts data sets, too: torch would take most of its start.
    import torch

    from dlio.storage.device_tier import DeviceTier

Layout = Literal["partition", "replicate", "auto"]
"""Each block on one node; every block on each node; or the latter if each node has room for all."""
_ALONE_BYTES: Final = 64 << 10
"""Mean size of a container's samples from which on each is worth a request."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Options for bringing a data set into its tiers."""

    layout: Layout = "partition"
    requests: int | None = None
    """Requests in flight from one rank to the source; None for a number that suits its place."""
    rate: float | None = None
    """Bytes per second that the whole job may read from the source; None for no limit."""
    timeout_s: float | None = None
    """Seconds for one block until the source is taken to hang; None for no limit."""
    check: bool = False
    """Read blocks back from the tier after they are written, and compare."""
    by_sample: bool = False
    """Read the samples that are needed ahead of the rest of their blocks, where the source is
    reached over a network and each can be read on its own."""
    strict: bool = False
    """Raise an error for a tier whose disk fails or is read-only, instead of going on without."""
    dry: bool = False
    """Plan alone: disk tiers are looked at, and nothing is written or evicted there."""


class Mount(Closable):
    """A data set mounted on the nodes of a job, as one rank sees it. Owns the hierarchy.

    `uses` are this process's leases on each disk tier, None on one that cannot be written; owned.
    `notes` are the data sets that were evicted, in sentences.
    """

    def __init__(
        self,
        comm: Communicator,
        nodes: JobNodes,
        ranks: RankNodes,
        tiers: tuple[TierSpec, ...],
        placement: Placement,
        block_bytes: npt.NDArray[np.int64],
        hierarchy: Hierarchy,
        *,
        requests: int,
        uses: Sequence[DatasetUse | None],
        notes: Sequence[str],
        decoded_spec: TierSpec | None,
        device_spec: TierSpec | None,
        on_devices: bool,
        members: Sequence[int],
    ) -> None:
        self.comm, self.nodes, self.ranks = comm, nodes, ranks
        self.tiers, self.placement, self.hierarchy = tiers, placement, hierarchy
        self.block_bytes = block_bytes
        """File bytes of each block in a tier; shape (blocks,)."""
        self.requests = requests
        """Requests that this rank may have in flight to the source."""
        self.notes = list(notes)
        self._uses = uses
        self._filler: Filler | None = None
        self.progress: StreamProgress | None = None
        """Positions of this node's ranks in streamed blocks, once there are any."""
        self._mounted_on = dict(zip(members, ranks.node_of.tolist(), strict=True))
        """Node number of each rank that mounted the data set, by its number in the job."""
        self._members = tuple(members)
        """Numbers of the present ranks in the job."""
        self.decoded_spec, self.device_spec, self.on_devices = decoded_spec, device_spec, on_devices
        self._decoded: DecodedTier | None = None
        self._device_tier: DeviceTier | None = None
        self._process = os.getpid()
        self._live: PublishedFigures | None = publish("data", self._figures)

    # Blocks

    def fill(self, order: Order) -> Filler | None:
        """Start to bring this node's blocks in the background, in the order of their first use.

        Returns None when all are there; further calls return the same filler.
        """
        if self._filler is None and self.hierarchy.missing():
            reader = self.hierarchy.reader
            wanted = self.hierarchy.pinned >= 0
            if self.hierarchy.sample_fetcher is not None:
                self._filler = SampleFiller(self.hierarchy.sample_fetcher, reader, order, wanted)
            else:
                self._filler = BlockFiller(
                    self.hierarchy.block_fetcher,
                    lambda: blocks_in_order(reader.layout, order, wanted),
                    filler_threads(self.block_bytes, self.requests),
                )
        return self._filler

    def open_stream(self) -> None:
        """Make the tier for streamed blocks in this node's memory, unless there is one.

        It belongs to this job alone. Collective.
        """
        if self.hierarchy.targets.can_stream:
            return
        # A token of rank 0: a folder of an earlier job with the same data set, left by a kill, must
        # not be taken for this one's.
        (token, *_) = uniform(self.comm, lambda: self.comm.allgather(secrets.token_hex(4)))
        reader, node = self.hierarchy.reader, self.nodes.names[self.nodes.here]
        spec = TierSpec("ram", SHARED_MEMORY, int(self.block_bytes.sum()))
        name = f"{reader.fingerprint}.{node}.{token}"
        tier = Tier(spec, name, fingerprint=reader.fingerprint)
        self.hierarchy.targets.add_stream_tier(tier)
        local, me = self._mounted_here(), self._members[self.comm.rank]
        self.progress = StreamProgress(tier.folder, len(local), local.index(me))
        self._keep_progress()

    def streamed_home(self, order: BlockOrder) -> npt.NDArray[np.int32]:
        """Return the home node of each block for an epoch; shape (blocks,).

        Blocks that are pinned nowhere are dealt to the ranks in turn, and so to their nodes.
        """
        home = self.placement.home.copy()
        blocks = order.blocks[home[order.blocks] < 0]
        home[blocks] = self.ranks.node_of[np.arange(len(blocks)) % self.ranks.size]
        return home

    # Decoded images

    def decoded(self, recipe: str) -> DecodedTier | None:
        """Return the node's tier of decoded images, opened once; None if none is specified.
        `recipe` names the transformation that its images have undergone; one per mount."""
        if self._decoded is None and self.decoded_spec is not None:
            reader, node = self.hierarchy.reader, self.nodes.names[self.nodes.here]
            name = f"{reader.fingerprint}.{node}.{recipe}"
            capacity = self.decoded_spec.capacity
            self._decoded = DecodedTier(name, len(reader), capacity, self.hierarchy.run_notes.add)
        return self._decoded

    @property
    def all_tiers(self) -> list[TierSpec]:
        """The tiers of blocks, and those of decoded images."""
        decoded = self.device_spec, self.decoded_spec
        return [*self.tiers, *(spec for spec in decoded if spec is not None)]

    def on_device(self, device: "torch.device") -> "DeviceTier | None":
        """Return this rank's tier on its device, opened once; None if none is specified."""
        if self._device_tier is None and self.device_spec is not None:
            from dlio.storage.device_tier import DeviceTier

            count, capacity = len(self.hierarchy.reader), self.device_spec.capacity
            self._device_tier = DeviceTier(count, capacity, device, self.hierarchy.run_notes.add)
        return self._device_tier

    # The ranks of the job

    def regroup(self, members: Sequence[int]) -> None:
        """Continue with the survivors of lost ranks; nodes keep their numbers. `members` are the
        survivors' numbers in the job."""
        self.ranks = self.ranks_of(members)
        self.nodes = replace(self.nodes, node_of=self.ranks.node_of)
        self._members = tuple(members)
        self._keep_progress()

    def ranks_of(self, members: Sequence[int]) -> RankNodes:
        """Return some of the ranks that mounted the data set, by their numbers in the job."""
        # By number, not by place: ranks may have been lost before the data set was mounted.
        return RankNodes(np.array([self._mounted_on[each] for each in members], np.int32))

    def spare_tiers(self) -> list[TierSpec]:
        """Return the tiers with the capacity that this data set leaves on every node."""
        spare = []
        for number, spec in enumerate(self.tiers):
            home = self.placement.home[self.placement.tier == number]
            bytes_ = self.block_bytes[self.placement.tier == number]
            used = np.bincount(home, bytes_, len(self.nodes.names)).astype(np.int64).tolist()
            spare.append(replace(spec, capacity=max(0, spec.capacity - max(used))))
        return spare

    def count_with(self, chunks: "Mount") -> None:
        """Count reads and batches in the mount of the chunks that samples are cut from."""
        self.hierarchy.counters = chunks.hierarchy.counters
        self._publish_no_more()  # The figures are those of the other mount.

    # The end

    def close(self) -> None:
        """Stop filling and close the tiers; those in shared memory are removed.

        In a forked child nothing is closed: tiers and leases are its parent's, which still uses
        them.
        """
        if os.getpid() != self._process:
            return
        self._publish_no_more()
        self.hierarchy.fetcher.settle()
        if self._filler is not None:
            self._filler.close()
        disks = [tier for tier in self.hierarchy.tiers if tier.kind == "disk"]
        for tier, use in zip(disks, self._uses, strict=True):
            if use is not None:
                use.add_hits(tier.hits)
        self.hierarchy.close()
        if self._decoded is not None:
            self._decoded.close()
        if self._device_tier is not None:
            self._device_tier.close()
        for use in self._uses:
            if use is not None:
                use.close()

    def _mounted_here(self) -> list[int]:
        """Numbers of the ranks that mounted the data set on this node."""
        here = self.nodes.here
        return [member for member, node in self._mounted_on.items() if node == here]

    def _keep_progress(self) -> None:
        """Keep streamed blocks for the survivors only, and no longer for lost ranks."""
        if self.progress is not None:
            here = enumerate(self._mounted_here())
            self.progress.keep([row for row, member in here if member in self._members])

    def _figures(self) -> dict[str, object]:
        """Return the figures that `dlio top` shows: tiers of the node; bytes of this rank."""
        counters = self.hierarchy.counters
        return {
            "path": self.hierarchy.reader.path,
            "rank": self.comm.rank,
            "ranks": self.comm.size,
            "tiers": [
                {
                    "kind": spec.kind,
                    "root": spec.root,
                    "capacity": spec.capacity,
                    "used": int(self.block_bytes[list(tier.blocks())].sum()),
                    "wanted": int(self.block_bytes[self.hierarchy.pinned == number].sum()),
                }
                for number, (spec, tier) in enumerate(
                    zip(self.tiers, self.hierarchy.tiers, strict=False)
                )
            ],
            "bytes": dict(counters.bytes),
            "samples": counters.samples,
            "waited_s": counters.waited_s,
        }

    def _publish_no_more(self) -> None:
        published, self._live = self._live, None
        if published is not None:
            published.close()


# Mounting


def mount(
    reader: Reader,
    tiers: Tiers | None,
    comm: Communicator,
    pretend_nodes: int | None = None,
    *,
    options: MountOptions | None = None,
) -> Mount:
    """Open this node's tiers and agree with all ranks on every block's home. Collective.

    `tiers` are as on the command line; None takes DLIO_TIERS, or the default. Given as
    specifications (see `spare_tiers`), they may be too small for a block: they stay empty.
    `pretend_nodes` is for tests.

    Raises UsageError, TierError or TierFull when a tier cannot be made as specified, and UsageError
    if the data sets of the ranks differ.
    """
    made: list[Mount] = []

    def make() -> Mount:
        # If a loss interrupts it, some ranks have mounted the data set, and do so once more.
        while made:
            made.pop().close()
        made.append(_mount(reader, tiers, comm, pretend_nodes, options or MountOptions()))
        return made[0]

    return uniform(comm, make)


def _mount(
    reader: Reader,
    tiers: Tiers | None,
    comm: Communicator,
    pretend_nodes: int | None,
    options: MountOptions,
) -> Mount:
    """See `mount`. Raises PeerLost on some ranks, or on all, if a rank is lost meanwhile."""
    agree = abilities_of(reader).agree
    if agree is not None and comm.size > 1:
        agree(comm)
    check_same_data(reader, comm)
    nodes = find_nodes(comm, pretend_nodes)
    ranks = RankNodes(nodes.node_of)
    block_bytes = block_bytes_of(reader)
    specs = choose_tiers(tiers, int(block_bytes.sum()), nodes.per_machine)
    folder, on_device = nodes.names[nodes.here], decoded_spec(tiers, "gpu")
    source = file_system_of(reader.path)
    requests = options.requests or source.requests(reader.objects)
    about = {"source": _absolute(reader.path), "format": reader.format, "created": time.time()}
    with ExitStack() as undo:
        faults: list[tuple[TierSpec, OSError]] = []
        uses: list[DatasetUse | None] = []
        for spec in specs:
            if spec.kind == "disk":
                fingerprint = reader.fingerprint
                use = None if options.dry else _lease(spec, fingerprint, about, faults)
                uses.append(use)
                if use is not None:
                    undo.enter_context(closing(use))
        gone: list[StoredDataset] = []
        # One rank of a node evicts: several would each make room for the whole data set.
        if ranks.local(nodes.here)[0] == comm.rank:
            gone = _make_room(specs, int(block_bytes.sum()), reader.fingerprint, options.dry)
        # Leases are taken before anything is evicted, by all ranks: a job never evicts what it
        # uses.
        comm.barrier()
        opened = [
            TierView(spec, reader.fingerprint, folder)
            if options.dry and spec.kind == "disk"
            else undo.enter_context(closing(_open_tier(spec, reader.fingerprint, folder, faults)))
            for spec in specs
        ]
        if faults and options.strict:
            raise faults[0][1]
        for spec in specs:
            if spec.kind == "disk" and not options.dry:
                remember_root(spec.root)
        spared = {each.fingerprint for each in gone} | {reader.fingerprint}
        placed = _gather_capacities(comm, nodes, ranks, opened, spared)
        placement = place(block_bytes, placed, reader.fingerprint)
        if not is_parsed(tiers):
            _check_size(specs, block_bytes)
        pinned = _pinned_tiers(placement, placed, block_bytes, nodes.here, options.layout)
        _check_room(opened, pinned, block_bytes)
        small = [] if is_parsed(tiers) else [*_smaller_disks(opened)]
        # Ranks do not report their reads to each other: each gets an equal share of the rate.
        rate = None if options.rate is None else options.rate / comm.size
        source_requests = undo.enter_context(
            closing(SourceRequests(reader, requests, rate, options.timeout_s))
        )
        hierarchy = Hierarchy(
            reader,
            opened,
            pinned,
            ranks=comm.size,
            requests=source_requests,
            check=options.check,
            flow=_flow(reader, source, requests) if options.by_sample else None,
        )
        on_devices = None not in comm.allgather(on_device and on_device.capacity)
        members = comm.allgather(number_in_job(comm))
        for note in small:
            hierarchy.run_notes.add(note)
        for spec, fault in faults:
            then = "what it holds is used, and nothing is added"
            hierarchy.run_notes.tier_failed(str(spec), "opened", fault, then)
        undo.pop_all()  # From here on, the mount closes them.
    return Mount(
        comm,
        nodes,
        ranks,
        tuple(specs),
        placement,
        block_bytes,
        hierarchy,
        requests=requests,
        uses=uses,
        notes=[
            f"{'would evict' if options.dry else 'evicted'} {each.source or each.fingerprint} "
            f"({format_bytes(each.bytes)}) from {each.root}, to make room"
            for each in gone
        ],
        decoded_spec=decoded_spec(tiers),
        device_spec=on_device,
        on_devices=on_devices,
        members=members,
    )


def _check_size(specs: Sequence[TierSpec], block_bytes: npt.NDArray[np.int64]) -> None:
    """Raise UsageError for a tier that has no room for a single block."""
    smallest = int(block_bytes.min(initial=1 << 62))
    for spec in specs:
        if spec.capacity < smallest:
            raise UsageError(
                f"tier {spec} is too small for a single block of {format_bytes(smallest)}: give "
                "it more capacity, or leave it out"
            )


def _check_room(
    tiers: Sequence[Tier], pinned_in: npt.NDArray[np.int8], block_bytes: npt.NDArray[np.int64]
) -> None:
    """Raise TierFull now, not after an hour of filling, if a tier has too little room."""
    for number, tier in enumerate(tiers):
        if not tier.writable:
            continue
        pinned = np.flatnonzero(pinned_in == number)
        here = np.fromiter(tier.blocks(), np.int64)
        wanted = int(block_bytes[np.setdiff1d(pinned, here)].sum())
        if wanted > tier.free_bytes():
            place = "shared memory" if tier.kind == "ram" else tier.spec.root
            raise TierFull(
                f"tier {tier.spec} needs {format_bytes(wanted)} more, but {place} has only "
                f"{format_bytes(tier.free_bytes())} free: lower its capacity in --tiers, or "
                "free space"
            )


def _smaller_disks(tiers: Sequence[Tier]) -> Iterator[str]:
    """Yield a sentence for each tier that its disk has no room for, though the data set fits."""
    for tier in tiers:
        root, free = tier.spec.root, tier.free_bytes() if tier.writable else tier.spec.capacity
        if tier.kind != "disk" or tier.spec.capacity <= free:
            continue
        room = free + sum(entry.bytes for entry in stored_data(root))
        if tier.spec.capacity > room:
            yield (
                f"tier {tier.spec}: {root} has room for {format_bytes(room)} alone: this data set "
                "fits, larger ones do not"
            )


def _flow(reader: Reader, source: FileSystemKind, requests: int) -> Flow | None:
    """Return the limit of samples that are read at a time, of a source behind a network.

    In an epoch's random order a first batch touches about as many blocks as it has samples. Where
    the bandwidth is the limit, training waits for all of these while samples alone would do.
    """
    if not source.network or not reads_alone(reader) or not len(reader):
        return None
    # Small records of a container come with their block: a request for 1 KiB over a network costs
    # as much as one for 64.
    mean = data_bytes(reader) / len(reader)
    if mean < _ALONE_BYTES and not reader.objects:
        return None
    return Flow(max(2, min(requests, int(IN_FLIGHT_BYTES // max(1.0, mean)))))


def _lease(
    spec: TierSpec,
    fingerprint: str,
    about: Mapping[str, object],
    faults: list[tuple[TierSpec, OSError]],
) -> DatasetUse | None:
    """Take a lease on a disk tier; None, and one more fault, if its disk fails or is read-only.

    Raises TierError for other reasons.
    """
    try:
        return DatasetUse(spec.root, fingerprint, about)
    except OSError as error:
        if not is_fault(error):
            raise
        faults.append((spec, error))
        return None


def _open_tier(
    spec: TierSpec, fingerprint: str, node: str, faults: list[tuple[TierSpec, OSError]]
) -> Tier:
    """Open a tier; jobs of a node that want the same data share one copy, in memory too.

    Returns a LostTier, and one more fault, if its disk fails. Raises TierError for other reasons.
    """
    names = [f"{fingerprint}.{node}"] if spec.kind == "ram" else [fingerprint, node]
    try:
        tier = Tier(spec, *names, fingerprint=fingerprint)
    except OSError as error:
        if not is_fault(error):
            raise
        faults.append((spec, error))
        return LostTier(spec, os.path.join(spec.root, user_folder(), *names))
    tier.keep()
    return tier


def _gather_capacities(
    comm: Communicator,
    nodes: JobNodes,
    ranks: RankNodes,
    tiers: Sequence[Tier],
    spared: Collection[str],
) -> list[HomeNode]:
    """Return all nodes with the capacities that their tiers have without the data sets in `spared`,
    fingerprints of this one and of those that make room for it. Collective."""
    everyone = comm.allgather([_capacity(tier, spared) for tier in tiers])
    return [
        HomeNode(name, tuple(everyone[int(ranks.local(number)[0])]))
        for number, name in enumerate(nodes.names)
    ]


def _pinned_tiers(
    placement: Placement,
    nodes: Sequence[HomeNode],
    block_bytes: npt.NDArray[np.int64],
    here: int,
    layout: Layout,
) -> npt.NDArray[np.int8]:
    """Return the tier of this node that keeps each block.

    Raises UsageError when a replica has no room.
    """
    room = min(sum(node.capacities) for node in nodes) >= int(block_bytes.sum())
    if layout == "partition" or (layout == "auto" and not room):
        return np.where(placement.home == here, placement.tier, -1).astype(np.int8)
    alone = place(block_bytes, [nodes[here]], "copy")
    if (alone.tier < 0).any():
        raise UsageError(
            f"--layout replicate: the tiers of {nodes[here].name} have "
            f"{format_bytes(sum(nodes[here].capacities))}, a copy of the data set needs "
            f"{format_bytes(int(block_bytes.sum()))}: give them more, or choose partition"
        )
    return alone.tier


def block_bytes_of(reader: Reader) -> npt.NDArray[np.int64]:
    """Return the file bytes of each block in a tier; shape (blocks,)."""
    if isinstance(reader, StoredBlocks):
        return np.asarray(reader.block_bytes, np.int64)
    layout = reader.layout
    payloads = layout.sums(lambda samples: aligned(reader.sizes[samples]))
    return block_sizes(np.diff(layout.starts), payloads, reader.schema)


def _make_room(
    specs: Sequence[TierSpec], wanted: int, fingerprint: str, dry: bool
) -> list[StoredDataset]:
    """Evict unused data sets where this one would not fit otherwise, and return them."""
    gone: list[StoredDataset] = []
    for spec in specs:
        if spec.kind != "disk":
            continue
        here = min(wanted, spec.capacity)
        gone += make_room(spec.root, here, spec.capacity, fingerprint, dry=dry)
        wanted = max(0, wanted - spec.capacity)
    return gone


def _capacity(tier: Tier, spared: Collection[str]) -> int:
    """Return the capacity that other data sets in the same disk tier leave."""
    spec = tier.spec
    if isinstance(tier, LostTier):
        return 0
    if spec.kind == "ram":
        return spec.capacity
    others = sum(entry.bytes for entry in stored_data(spec.root) if entry.fingerprint not in spared)
    if others and others >= spec.capacity:
        raise UsageError(
            f"tier {spec} is taken up by {format_bytes(others)} of other data sets that are in "
            f"use or pinned: see `dlio status --tiers {spec.root}`, or give it more capacity"
        )
    return spec.capacity - others


def _absolute(path: str) -> str:
    """Return a path that a later `dlio verify --heal` can open from any folder."""
    if "://" in path:
        return path
    file = split_fields(path)[0]
    return os.path.abspath(file) + path[len(file) :] if os.path.exists(file) else path
