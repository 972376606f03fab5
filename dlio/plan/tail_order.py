"""The order of an epoch that ends with requeued samples: those assigned to lost ranks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlio.plan.block_order import BlockOrder
from dlio.plan.order import Order

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TailOrder(Order):
    """An order, and more samples at its end: `n` is the number of positions of both.

    A requeued sample has two positions; `positions` returns the last one, as the first was
    dealt to a rank that did not train on it.
    """

    whole: Order | None = None
    """The order of the epoch."""
    again: tuple[int, ...] = ()
    """Samples at positions len(whole) to n - 1."""

    @classmethod
    def of(cls, whole: Order, again: tuple[int, ...]) -> "TailOrder":
        n = len(whole) + len(again)
        return cls(n, whole.seed, whole.epoch, whole.shuffled, whole, again)

    def _map(self, given: _I64, inverse: bool) -> _I64:
        assert self.whole is not None
        if not inverse:
            self._check(given)
            first = len(self.whole)
            tail = np.asarray((*self.again, 0), np.int64)
            inner = self.whole.samples(np.minimum(given, first - 1))
            return np.where(given < first, inner, tail[np.clip(given - first, 0, len(tail) - 1)])
        result = self.whole.positions(given)
        for place, sample in enumerate(self.again):
            result = np.where(given == sample, len(self.whole) + place, result)
        return result


def blocks_of(order: Order) -> BlockOrder | None:
    """Return the order of blocks that an epoch follows, also if it ends with requeued samples.

    None if it does not go block by block.
    """
    whole = order.whole if isinstance(order, TailOrder) else order
    return whole if isinstance(whole, BlockOrder) else None
