"""Partners of a mixture's samples are those of the step's global batch, on any rank."""

from functools import partial

import numpy as np
import pytest

from dlio.loader.planned_engine.mixup_partners import step_partners
from dlio.plan.order import Order
from dlio.plan.tail_order import TailOrder


def _fetch(sample: int) -> bytes:
    raise AssertionError(f"sample {sample} is not to be read")


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("position", "global_batch"), [(0, 10), (20, 10), (7, 6), (0, 200)])
def test_a_partner_is_the_one_before_in_the_step(
    tail: bool, position: int, global_batch: int
) -> None:
    order, end = Order(103, 5, 2, shuffled=True), 103
    if tail:
        order, end = TailOrder.of(order, (3, 90)), 105
    partners_of = partial(step_partners, order, position, end, global_batch, _fetch, False)
    everyone = order.samples(np.arange(end)).tolist()
    for step, first in enumerate(range(position, end, global_batch)):
        batch = everyone[first : first + global_batch]
        wanted = {sample: batch[k - 1] for k, sample in enumerate(batch)}
        parts: list[list[int]] = [batch[::2], batch[1::2], batch[:1], []]
        for part in parts:
            if len(set(batch)) == len(batch):
                pairs = partners_of(step, np.array(part, np.int64))
                assert pairs.partners.tolist() == [wanted[sample] for sample in part]
