"""Placement: which node is the home of each block, and which of its tiers pins it.

Rendezvous hashing with bounded load: every node scores every block with a hash of both, weighted
by the node's capacity, and the block goes to the highest score among the nodes that still have
room under the bound. The bound keeps shares in proportion to capacity, even to about one block,
because an uneven split is paid for at every step in `batch` mode; the hash keeps most blocks
where they are when a node joins or leaves. Nothing is ever evicted: blocks that no node has room
for stay in the source, and pinning the others for ever is the best that any cache can do under an
order that visits each sample once an epoch (design: "pin, never evict").

How few blocks change home when one of n + 1 equal nodes joins or leaves, of 8,000 blocks:

    n          1      2      4      8      16     32     64
    moved      0.500  0.335  0.205  0.116  0.064  0.038  0.025
    1/(n + 1)  0.500  0.333  0.200  0.111  0.059  0.030  0.015

No even placement moves fewer than the lower line says. The excess is due to the bound: the number
of a node's blocks by hash alone varies by its square root, and the surplus goes elsewhere.

Independent of seeds and epochs, so that a tier that was staged serves every later run.

Source: Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996; bounded loads:
Mirrokni, Thorup and Zadimoghaddam, 2016.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.plan.order import GOLDEN, mix

_SCORES = 1 << 16
"""Scores computed at a time: their temporaries fit in the second-level cache."""

_TWO_OVER_LN_2 = 2.8853900817779268

_F64 = npt.NDArray[np.float64]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HomeNode:
    """A node that can be home to blocks."""

    name: str
    """Input of the hash."""
    capacities: tuple[int, ...]
    """Bytes of each tier, fastest first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The home of each block."""

    home: npt.NDArray[np.int32]
    """Node number, -1 for the source alone; shape (blocks,)."""
    tier: npt.NDArray[np.int8]
    """Number of the tier that pins it on that node, -1 for none; shape (blocks,)."""


def place(block_bytes: npt.NDArray[np.int64], nodes: Sequence[HomeNode], key: str) -> Placement:
    """Give blocks homes on nodes and tiers, within every tier's capacity. Pure.

    A node's bound is its share of all bytes, in proportion to capacity. A block goes to the
    highest score among the nodes that are below their bound, as long as enough is left to bring
    every other node to within a block of its own; then, to the highest score among those that
    are still further below. So shares are even to one block if blocks are of one size, and to
    about two if they differ widely. A block that does not fit into its node's tiers goes to the
    least full node with room: it stays in the source only if no tier anywhere has room for it. On
    its node, a block is pinned by the fastest tier that has room.

    The nodes' names differ, and so do keys: each data set is placed independently by its own.

    Cost: blocks x nodes hashes, 5 ns each (40 ns where capacities differ), and 2 µs a block.
    """
    blocks = len(block_bytes)
    home = np.full(blocks, -1, np.int32)
    tier = np.full(blocks, -1, np.int8)
    capacities = [sum(node.capacities) for node in nodes]
    if not blocks or not any(capacities):
        return Placement(home, tier)
    weights = np.array(capacities, np.float64)
    total, capacity = int(block_bytes.sum()), sum(capacities)
    # Bytes below each node's bound. Rounded up: the bounds together hold all that capacity does.
    gaps = np.array([min(own, -(-total * own // capacity)) for own in capacities], np.int64)
    rooms = [list(node.capacities) for node in nodes]
    # The largest block that still finds a tier, per node.
    largest = np.array([max(room, default=0) for room in rooms], np.int64)
    unit = max(1, -(-total // blocks))
    # Bytes still to place beyond the whole blocks that nodes are owed below their bounds.
    slack = total - unit * int((gaps // unit).sum())
    chunk = max(1, _SCORES // len(nodes))
    for start in range(0, blocks, chunk):
        numbers = np.arange(start, min(start + chunk, blocks))
        scores = _scores(numbers, nodes, weights, key)
        favourites = scores.argmax(axis=1).tolist()
        sizes = block_bytes[numbers].tolist()
        for block, node, size, row in zip(numbers, favourites, sizes, scores, strict=True):
            gap = int(gaps[node])
            owed = gap >= unit and (gap - size) // unit < gap // unit
            if size > largest[node] or not (owed or (gap > 0 and slack >= size)):
                node = _elsewhere(size, unit, slack, row, gaps, largest, weights)
            slack -= size
            if node < 0:
                continue
            gap = int(gaps[node])
            slack += unit * (max(0, gap // unit) - max(0, (gap - size) // unit))
            gaps[node] = gap - size
            home[block], tier[block] = node, _pin(size, rooms[node])
            largest[node] = max(rooms[node])
    return Placement(home, tier)


def _elsewhere(
    size: int, unit: int, slack: int, scores: _F64, gaps: _I64, largest: _I64, weights: _F64
) -> int:
    """Choose a node for a block that must not go to its first choice; -1 if no tier has room."""
    roomy = np.flatnonzero(largest >= size)
    if not len(roomy):
        return -1
    gap = gaps[roomy]
    owed = (gap >= unit) & ((gap - size) // unit < gap // unit)
    fitting = roomy[gap > 0] if slack >= size else roomy[owed]
    if len(fitting):
        return int(fitting[scores[fitting].argmax()])
    return int(roomy[(gap / weights[roomy]).argmax()])


def _pin(size: int, rooms: list[int]) -> int:
    """Take room in the fastest tier that has enough; return its number. One tier has enough."""
    number = next(number for number, room in enumerate(rooms) if room >= size)
    rooms[number] -= size
    return number


def _scores(blocks: _I64, nodes: Sequence[HomeNode], weights: _F64, key: str) -> _F64:
    """Weighted rendezvous scores, w / -log2(u) for a hash u in (0, 1); shape (blocks, nodes)."""
    seeds = np.array(
        [xxhash.xxh3_64_intdigest(f"{key}/{node.name}".encode()) for node in nodes], np.uint64
    )
    x = mix((blocks.astype(np.uint64) * np.uint64(GOLDEN))[:, None] ^ seeds, np.uint64(0))
    # 52 bits and a half: exact in a float, and never 0 or 1.
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    if (weights == weights[0]).all():
        return uniform  # The same ranking at an eighth of the cost.
    scores: _F64 = weights / -_log2(uniform)
    return scores


def _log2(values: _F64) -> _F64:
    """log2, the same to the last bit on every processor, which numpy's is not: nodes of
    different kinds must agree on every home. Uses only operations that IEEE 754 rounds exactly;
    the result is within 1e-13.
    """
    fraction, exponent = np.frexp(values)
    low = fraction < np.sqrt(0.5)
    # In [sqrt(1/2), sqrt(2)), where 2·atanh((f - 1) / (f + 1)) = ln f converges fast.
    fraction = np.where(low, fraction * 2, fraction)
    z = (fraction - 1) / (fraction + 1)
    square = z * z
    series = np.full_like(z, 1 / 15)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series *= square
        series += 1 / odd
    logarithm: _F64 = (exponent - low) + series * z * _TWO_OVER_LN_2
    return logarithm
