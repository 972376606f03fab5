"""Hops of a sum on any number of ranks: which rank adds which parts, and sends them on.

A region is cut into as many parts as there are ranks. In one hop every rank sends its share of each
part to the part's owner: p - 1 messages, and as many for the sums on their way back. In several
hops the ranks stand in a grid. A rank sends, to one rank of each other column, its share of all
parts that this column owns; it adds the shares of its own column. Then the column does the same
among its own ranks, and so on, until each rank has the sum of its own part. The sums travel the
same ways back, in the reverse order.

A rank sends as many bytes as in one hop, (p - 1) / p of the region each way, in 2 (r + c - 2)
messages for r rows and c columns. The number of dimensions grows with log p, so does the number of
messages: 2 (p - 1) up to 4 ranks, 12 for 16, 20 for 32, 40 for 1,024, 55 for 10,000.

If a column is too long by a row for the others (p is a prime, for instance), its last rank sends
to another row, whose rank gets one message more and sends one sum more. Neighbours exchange the
longest messages: they are likely to be on one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final

_ONE_HOP: Final = 4
"""Largest number of ranks that sum in one hop: each further hop rounds once more."""
_SIDE: Final = 8
"""A further dimension is added when a side of the grid would be longer."""
_LEAST_ENTRIES: Final = 4096
"""Entries of a part in a grid. Each rank decodes all parts, which takes some 10 us besides the
work per entry: with fewer entries that would be most of its time. Some ranks then own no part."""


@dataclass(frozen=True, slots=True)
class SumHop:
    """One rank's messages in one dimension of the grid."""

    shares: Sequence[tuple[int, range]]
    """(rank, parts): who gets this rank's share of these parts, and later sends their sums."""
    sources: Sequence[int]
    """Ranks whose shares of `parts` this rank adds, and which get the sums from it; ascending."""
    parts: range
    """The parts whose shares this rank adds."""


def dimensions(ranks: int) -> int:
    """Return the number of hops of a sum each way."""
    if ranks <= _ONE_HOP:
        return 1
    count = 2
    while _SIDE**count < ranks:
        count += 1
    return count


def hops(ranks: int, rank: int) -> list[SumHop]:
    """Return the hops of one rank: all shares of a hop are added before the next one begins.

    Every pair of ranks meets in one hop at most. Cost O(log p * sides of the grid).
    """
    members, parts = range(ranks), range(ranks)
    plan = []
    for left in range(dimensions(ranks), 0, -1):
        if len(members) == 1:
            break
        width = _columns(len(members), left)[1]
        columns = [members[column::width] for column in range(width)]
        row, mine = divmod(members.index(rank), width)
        ends = accumulate(map(len, columns), initial=0)
        blocks = [parts[first:last] for first, last in pairwise(ends)]
        others = [(mine + step) % width for step in range(1, width)]
        shares = [
            (columns[other][_row(row, mine, len(columns[other]))], blocks[other])
            for other in others
        ]
        own = columns[mine]
        sources = sorted(
            columns[other][theirs]
            for other in others
            for theirs in {row, len(own)}
            if theirs < len(columns[other]) and _row(theirs, other, len(own)) == row
        )
        members, parts = own, blocks[mine]
        plan.append(SumHop(shares, sources, parts))
    return plan


def most_messages(ranks: int) -> int:
    """Return how many messages a rank sends at most for a sum, shares and sums together."""
    return _columns(ranks, dimensions(ranks))[0]


def owners(ranks: int, entries: int) -> int:
    """Return how many ranks own a part of a region of so many entries."""
    if dimensions(ranks) == 1:
        return ranks
    return min(ranks, max(1, entries // _LEAST_ENTRIES))


def _row(row: int, column: int, rows: int) -> int:
    """Return the row in a column of `rows` ranks that a rank of another column sends to."""
    return row if row < rows else column % rows


@lru_cache(maxsize=1024)
def _columns(ranks: int, dims: int) -> tuple[int, int]:
    """Return the fewest messages of a rank, and the columns of the grid that has them."""
    if dims == 1 or ranks == 1:
        return 2 * (ranks - 1), ranks
    widest = min(ranks, int(2 * ranks ** (1 / dims)) + 1)
    return min(
        (
            # The ranks of a last row that is not full are dealt to the rows of shorter columns.
            2 * (width - 1) - (-(ranks % width) // (ranks // width)) + rest,
            width,
        )
        for width in range(2, widest + 1)
        for rest in [_columns(-(-ranks // width), dims - 1)[0]]
    )
