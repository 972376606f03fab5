"""Placement: which node is the home of each block, and which of its tiers pins it.

Rendezvous hashing with bounded load: every node scores every block with a hash of both, weighted
by the node's capacity, and the block goes to the highest score among the nodes that still have
room under the bound. The bound keeps shares in proportion to capacity, even to about one block,
because an uneven split is paid for at every step in `batch` mode; the hash keeps most blocks
where they are when a node joins or leaves. Nothing is ever evicted: what no node has room for
stays in the source, and pinning the rest for ever is the best that any cache can do under an
order that visits each sample once an epoch (design: "pin, never evict").

Independent of seeds and epochs, so that a tier that was staged serves every later run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

_CHUNK = 1 << 13


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can be home to blocks."""

    name: str
    """What it is hashed by."""
    capacities: tuple[int, ...]
    """Bytes of each tier, fastest first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each block lives."""

    home: npt.NDArray[np.int32]
    """Node number, -1 for the source alone; shape (blocks,)."""
    tier: npt.NDArray[np.int8]
    """Number of the tier that pins it on that node, -1 for none; shape (blocks,)."""


def place(block_bytes: npt.NDArray[np.int64], nodes: Sequence[Node], key: str) -> Placement:
    """Give blocks homes on nodes and tiers, within every tier's capacity. Pure.

    Args:
        block_bytes: what each block takes in a tier; shape (blocks,).
        key: of the data set; two data sets are placed independently.

    Cost: blocks x nodes hashes (13 ns each), and one step of Python per block.
    """
    blocks = len(block_bytes)
    home = np.full(blocks, -1, np.int32)
    tier = np.full(blocks, -1, np.int8)
    weights = np.array([sum(node.capacities) for node in nodes], np.float64)
    if not blocks or not weights.sum():
        return Placement(home, tier)
    total = int(block_bytes.sum())
    bounds = total * weights / weights.sum()
    rooms = [list(node.capacities) for node in nodes]
    loads = np.zeros(len(nodes))
    for start in range(0, blocks, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, blocks))
        ranking = np.argsort(-_scores(numbers, nodes, weights, key), axis=1, kind="stable")
        for block, preferred in zip(numbers.tolist(), ranking.tolist(), strict=True):
            size = int(block_bytes[block])
            # A block may stand half over the bound: shares end within half a block of it.
            for node in preferred:
                if loads[node] + size / 2 <= bounds[node] and _pin(
                    block, node, size, rooms, home, tier
                ):
                    loads[node] += size
                    break
            else:
                _place_anywhere(block, size, loads / np.maximum(weights, 1), rooms, home, tier)
                if home[block] >= 0:
                    loads[home[block]] += size
    return Placement(home, tier)


def _place_anywhere(
    block: int,
    size: int,
    fullness: npt.NDArray[np.float64],
    rooms: list[list[int]],
    home: npt.NDArray[np.int32],
    tier: npt.NDArray[np.int8],
) -> None:
    """Every node is at its bound or has no tier with room: the emptiest that has room takes it."""
    for node in np.argsort(fullness, kind="stable").tolist():
        if _pin(block, node, size, rooms, home, tier):
            return


def _pin(
    block: int,
    node: int,
    size: int,
    rooms: list[list[int]],
    home: npt.NDArray[np.int32],
    tier: npt.NDArray[np.int8],
) -> bool:
    """Put the block into the fastest tier of the node that has room. False when none has."""
    for number, room in enumerate(rooms[node]):
        if size <= room:
            rooms[node][number] -= size
            home[block], tier[block] = node, number
            return True
    return False


def _scores(
    blocks: npt.NDArray[np.int64],
    nodes: Sequence[Node],
    weights: npt.NDArray[np.float64],
    key: str,
) -> npt.NDArray[np.float64]:
    """Weighted rendezvous scores, -w / ln(u); shape (blocks, nodes)."""
    seeds = np.array(
        [xxhash.xxh3_64_intdigest(f"{key}/{node.name}".encode()) for node in nodes], np.uint64
    )
    with np.errstate(over="ignore"):
        x = (blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))[:, None] ^ seeds[None, :]
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    scores: npt.NDArray[np.float64] = -weights / np.log(uniform)
    return scores
