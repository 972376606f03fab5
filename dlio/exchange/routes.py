"""Routes: the order in which each rank sends, receives and adds until all have the sum. Pure.

Each rank follows its own list of operations. `add` receives from a peer and adds; `swap` sends to a
peer, receives from it and adds; `send` sends the local values; `take` replaces them by received
ones. The partners of a `swap` end with bit-identical sums, because float addition commutes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Op(NamedTuple):
    """One operation of a rank."""

    kind: str
    """`add`, `swap`, `send` or `take`."""
    peer: int


def star(rank: int, members: list[int]) -> list[Op]:
    """A parameter server: all send to the first of `members`, which sends the sum to all."""
    root, others = members[0], members[1:]
    if rank == root:
        return [*(Op("add", peer) for peer in others), *(Op("send", peer) for peer in others)]
    return [Op("send", root), Op("take", root)]


def tree(rank: int, members: list[int]) -> list[Op]:
    """A binomial tree over `members`, up and down: log2 p hops each way."""
    place, count = members.index(rank), len(members)
    children = []
    step = 1
    while step < count and not place & step:
        if place + step < count:
            children.append(members[place + step])
        step *= 2
    up = [Op("add", child) for child in children]
    down = [Op("send", child) for child in reversed(children)]
    if place == 0:
        return [*up, *down]
    parent = members[place & (place - 1)]
    return [*up, Op("send", parent), Op("take", parent), *down]


def doubling(rank: int, members: list[int]) -> list[Op]:
    """Recursive doubling: log2 p swaps.

    Unless p is a power of two, each surplus rank first sends its values to another rank, and
    finally receives the sum from it.
    """
    place, count = members.index(rank), len(members)
    whole = 1 << (count.bit_length() - 1)
    if place >= whole:
        other = members[place - whole]
        return [Op("send", other), Op("take", other)]
    extra = members[place + whole] if place + whole < count else None
    ops = [] if extra is None else [Op("add", extra)]
    step = 1
    while step < whole:
        ops.append(Op("swap", members[place ^ step]))
        step *= 2
    return ops if extra is None else [*ops, Op("send", extra)]


def hierarchical(
    rank: int, node_of: npt.NDArray[np.int32], across_as_tree: bool = False
) -> list[Op]:
    """Reduce to each node's first rank, by doubling among these, and back: `node_of` is by rank.
    `across_as_tree` has a tree between nodes, for messages that are encoded only once.
    """
    local = np.flatnonzero(node_of == node_of[rank]).tolist()
    leaders = sorted(np.flatnonzero(node_of == node)[0].item() for node in np.unique(node_of))
    if rank != local[0]:
        return [Op("send", local[0]), Op("take", local[0])]
    # With doubling each rank would decode other messages, and ranks would end with other sums.
    across = (tree if across_as_tree else doubling)(rank, leaders) if len(leaders) > 1 else []
    others = local[1:]
    return [*(Op("add", peer) for peer in others), *across, *(Op("send", peer) for peer in others)]


def route(
    topology: str, rank: int, node_of: npt.NDArray[np.int32], compressed: bool = False
) -> list[Op]:
    """Return this rank's operations for `hierarchical`, `tree` or `star`. If `compressed`, the
    message that travels down is encoded once, and all ranks decode it.
    """
    everybody = list(range(len(node_of)))
    if topology == "hierarchical":
        return hierarchical(rank, node_of, across_as_tree=compressed)
    return (tree if topology == "tree" else star)(rank, everybody)
