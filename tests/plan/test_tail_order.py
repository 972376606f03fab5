"""Orders in which samples come again at the end."""

import numpy as np
import pytest

from dlio.errors import UsageError
from dlio.plan.order import Cursor, Order, again_of
from dlio.plan.tail_order import TailOrder


@pytest.mark.parametrize("n", [7, 5000])
def test_the_order_goes_on_with_the_samples_that_come_again(n: int) -> None:
    whole = Order(n, 3, 1)
    order = TailOrder.of(whole, (4, 2))
    assert len(order) == n + 2
    positions = np.arange(n + 2)
    samples = order.samples(positions)
    assert samples[:n].tolist() == whole.samples(positions[:n]).tolist()
    assert samples[n:].tolist() == [4, 2]
    assert order.positions(np.array([4, 2])).tolist() == [n, n + 1]
    others = np.array([0, 1, 3])
    assert order.positions(others).tolist() == whole.positions(others).tolist()
    with pytest.raises(IndexError):
        order.samples(np.array([n + 2]))


def test_a_state_may_be_among_the_samples_that_come_again() -> None:
    state = {**Cursor(0, 1, 8, 7).as_dict(), "again": [3, 3]}
    assert Cursor.from_dict(state).position == 8
    assert again_of(state) == (3, 3)
    for wrong in ([-1], ["3"], 3, [True]):
        with pytest.raises(UsageError, match="again"):
            Cursor.from_dict({**state, "again": wrong})
    with pytest.raises(UsageError, match="position 8 of only 7"):
        Cursor.from_dict(Cursor(0, 1, 8, 7).as_dict())
