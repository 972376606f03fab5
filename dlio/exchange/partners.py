"""The rank that each rank exchanges with at a step. Pure."""

import math
from typing import Final

import numpy as np

from dlio.plan.order import Order

_ROTATIONS: Final = 64
"""Length of the cycle of permutations."""


def partners(
    step: int, rank: int, ranks: int, seed: int, topology: str = "dissemination"
) -> tuple[int, int]:
    """Return (rank to send to, rank to receive from) at a step; both `rank` if it has no partner.

    Dissemination with rotation, arXiv 1803.05880. In a `hypercube` both are the same rank; unless
    the number of ranks is a power of two, some ranks have no partner at some steps. `pairs` of a
    power of two are those of a hypercube without rotation, so that any log2(ranks) steps one after
    another mix the weights of all ranks; of other numbers, they are random ones at each step, as in
    arXiv 2506.10911, and of an odd number one rank has none. `fixed-pairs` are those of a hypercube
    without rotation for any number of ranks, so that a rank has few partners.
    """
    if ranks == 1:
        return rank, rank
    if topology == "fixed-pairs" or (topology == "pairs" and ranks & (ranks - 1) == 0):
        peer = rank ^ 1 << step % (ranks - 1).bit_length()
        return (peer, peer) if peer < ranks else (rank, rank)
    period = 1 if topology == "pairs" else max(1, math.ceil(math.log2(ranks)))
    rotation = step // period % _ROTATIONS
    permutation = Order(ranks, seed, rotation).samples(np.arange(ranks, dtype=np.int64))
    place = int(np.flatnonzero(permutation == rank)[0])
    distance = 2 ** (step % period)
    if topology in ("hypercube", "pairs"):
        other = place ^ distance
        peer = int(permutation[other]) if other < ranks else rank
        return peer, peer
    return (
        int(permutation[(place + distance) % ranks]),
        int(permutation[(place - distance) % ranks]),
    )
