"""Mounting: a data set's blocks get homes on the job's nodes, and tiers to be pinned in."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.nodes import Nodes, find_nodes
from dlio.errors import TierFull, UsageError
from dlio.order import Order
from dlio.placement import Node, Placement, place
from dlio.reader import Reader
from dlio.schedule import Ranks
from dlio.storage.block import aligned, block_sizes
from dlio.storage.fill import Filler, blocks_in_order
from dlio.storage.hierarchy import Hierarchy, Pins
from dlio.storage.shared import user_folder
from dlio.storage.spec import TierSpec, choose_tiers
from dlio.storage.tier import Tier, tier_usage
from dlio.units import format_bytes


@dataclass(slots=True)
class Mount:
    """A data set mounted on the nodes of a job, as one rank sees it. Owns the hierarchy."""

    comm: Communicator
    nodes: Nodes
    ranks: Ranks
    tiers: tuple[TierSpec, ...]
    placement: Placement
    block_bytes: npt.NDArray[np.int64]
    """File bytes of each block in a tier; shape (blocks,)."""
    hierarchy: Hierarchy
    _filler: Filler | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, order: Order) -> Filler | None:
        """Start bringing this node's blocks in the background, those first that `order` needs
        first; None when all are there. Further calls return the same filler."""
        if self._filler is None and self.hierarchy.missing():
            reader = self.hierarchy.reader
            wanted = self.hierarchy.pins.tier >= 0
            self._filler = Filler(
                self.hierarchy, lambda: blocks_in_order(reader.layout, order, wanted)
            )
        return self._filler

    def spare_tiers(self) -> list[TierSpec]:
        """The tiers with the capacity that this data set leaves on every node: for another one."""
        spare = []
        for number, spec in enumerate(self.tiers):
            used = [
                int(self.block_bytes[self._pinned(node, number)].sum())
                for node in range(len(self.nodes.names))
            ]
            spare.append(replace(spec, capacity=max(0, spec.capacity - max(used))))
        return spare

    def close(self) -> None:
        """Stop filling, close the tiers; what was in shared memory is gone."""
        if self._filler is not None:
            self._filler.close()
        self.hierarchy.close()

    def _pinned(self, node: int, tier: int) -> npt.NDArray[np.bool_]:
        pinned: npt.NDArray[np.bool_] = (self.placement.home == node) & (
            self.placement.tier == tier
        )
        return pinned


def mount(
    reader: Reader,
    tiers: str | Sequence[TierSpec] | None,
    comm: Communicator,
    pretend_nodes: int | None = None,
) -> Mount:
    """Open this node's tiers and agree with all ranks on every block's home. Collective.

    Args:
        tiers: as on the command line; None takes DLIO_TIERS, or the default. Specifications,
            as `spare_tiers` gives them, may be of tiers too small for a block: they stay empty.

    Raises UsageError, TierError or TierFull when a tier cannot be what it is asked to be.
    """
    nodes = find_nodes(comm, pretend_nodes)
    ranks = Ranks(nodes.node_of)
    specs = choose_tiers(tiers, int(reader.sizes.sum()), nodes.per_machine)
    # The RAM tier of this job, and no other: a random name, the same on all ranks.
    job = comm.allgather(secrets.token_hex(8))[0]
    folder = nodes.names[nodes.here]
    opened: list[Tier] = []
    try:
        for spec in specs:
            where = [f"{job}.{folder}"] if spec.kind == "ram" else [reader.fingerprint, folder]
            opened.append(Tier(spec, *where, fingerprint=reader.fingerprint))
        block_bytes = _block_bytes(reader)
        mine = [_capacity(spec, reader.fingerprint) for spec in specs]
        everyone = comm.allgather(mine)
        placement = place(
            block_bytes,
            [
                Node(name, tuple(everyone[int(ranks.local(number)[0])]))
                for number, name in enumerate(nodes.names)
            ],
            reader.fingerprint,
        )
        if isinstance(tiers, str | None):
            _check_size(specs, block_bytes)
        _check_room(opened, placement, block_bytes, nodes.here)
        pins = Pins(np.where(placement.home == nodes.here, placement.tier, -1).astype(np.int8))
        hierarchy = Hierarchy(reader, opened, pins, ranks=comm.size)
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return Mount(comm, nodes, ranks, tuple(specs), placement, block_bytes, hierarchy)


def _block_bytes(reader: Reader) -> npt.NDArray[np.int64]:
    """File bytes of each block, uncompressed; shape (blocks,)."""
    layout = reader.layout
    payloads = layout.sums(lambda samples: aligned(reader.sizes[samples]))
    return block_sizes(np.diff(layout.starts), payloads, reader.schema)


def _capacity(spec: TierSpec, fingerprint: str) -> int:
    """What other data sets in the same disk tier leave of its capacity."""
    if spec.kind == "ram":
        return spec.capacity
    usage = tier_usage(spec.root)
    others = sum(count for key, count in usage.items() if key != fingerprint)
    if others and others >= spec.capacity:
        raise UsageError(
            f"tier {spec} is taken up by {format_bytes(others)} of other data sets: remove what "
            f"you no longer need below {spec.root}/{user_folder()}, or give it more capacity"
        )
    return spec.capacity - others


def _check_size(specs: Sequence[TierSpec], block_bytes: npt.NDArray[np.int64]) -> None:
    smallest = int(block_bytes.min(initial=1 << 62))
    for spec in specs:
        if spec.capacity < smallest:
            raise UsageError(
                f"tier {spec} is too small for a single block of {format_bytes(smallest)}: give "
                "it more capacity, or leave it out"
            )


def _check_room(
    tiers: Sequence[Tier], placement: Placement, block_bytes: npt.NDArray[np.int64], node: int
) -> None:
    """Find out now, not after an hour, that a tier cannot hold what it is to hold."""
    for number, tier in enumerate(tiers):
        pinned = np.flatnonzero((placement.home == node) & (placement.tier == number))
        here = tier.blocks()
        wanted = sum(int(block_bytes[block]) for block in pinned if int(block) not in here)
        if wanted > tier.free_bytes():
            what = "shared memory" if tier.kind == "ram" else tier.spec.root
            raise TierFull(
                f"tier {tier.spec} needs {format_bytes(wanted)} more, but {what} has only "
                f"{format_bytes(tier.free_bytes())} free: lower its capacity in --tiers, or "
                "free space"
            )
