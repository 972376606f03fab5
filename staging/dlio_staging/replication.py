"""Copies of blocks from node to node, so that each block is read from the source only once.

Nodes exchange in rounds: in round s, node i sends the blocks of which it is the home to node i + s
and receives from node i - s, so that each link carries one stream at a time. All nodes first agree
on the blocks that each one lacks; sender and receiver then know the transfers without requests.
"""

import time

import numpy as np
import numpy.typing as npt

from dlio.errors import CorruptBlock, TierError
from dlio.storage.block import check_block
from dlio.storage.mount import Mount
from dlio.storage.tier import Tier

_AT_A_TIME = 4
"""Blocks in flight from one node to another."""
_TAG = 3


def replicate(mounted: Mount, wanted: npt.NDArray[np.int64], deadline: float | None) -> int | None:
    """Copy the blocks that this node lacks from the nodes that have read them. Collective.

    Args:
        wanted: the blocks that this node is to hold in the end.
        deadline: time of `time.monotonic` at which to stop; None for no limit.

    Returns the bytes received; None when the deadline came first. Raises TierError when a node
    cannot send one of its blocks.
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
    """Send and receive a few blocks at once; return the bytes received.

    Args:
        out: (rank to send to, blocks to send).
        into: (rank to receive from, blocks to receive).

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
    comm.wait(requests, f"{len(into[1])} blocks from rank {into[0]}")
    for block, data in zip(into[1], memory, strict=True):
        info = check_block(data, f"block {block} from rank {into[0]}", 0)
        if info.block != block or info.fingerprint != mounted.hierarchy.reader.fingerprint:
            raise TierError(f"rank {into[0]} sent block {info.block} instead of {block}")
        _tier(mounted, block).publish(block, [data])
    return sum(len(each) for each in memory)


def _tier(mounted: Mount, block: int) -> Tier:
    """Return the tier of this node that a block is pinned in."""
    return mounted.hierarchy.tiers[int(mounted.hierarchy.pinned[block])]
