"""A rank that waits in vain tells how far it has come, and where."""

import pytest
import torch

from dlio.comm.deadlines import tell_position, wait_all
from dlio.comm.single import SingleCommunicator
from dlio.errors import CommTimeout
from dlio.exchange.step_watch import StepWatch


class _NeverDone:
    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        return True


def test_a_deadline_names_the_steps_and_the_line_of_the_script() -> None:
    watch = StepWatch(SingleCommunicator(), list)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(3):
        watch.stepped(optimizer)
    tell_position(watch.position)
    try:
        with pytest.raises(
            CommTimeout, match=r"has made 3 steps .* waits at test_step_watch.py:\d+"
        ):
            wait_all([_NeverDone()], "gradients", 0.01, "rank 0")
    finally:
        tell_position(None)
    with pytest.raises(CommTimeout) as error:
        wait_all([_NeverDone()], "gradients", 0.01, "rank 0")
    assert "has made" not in str(error.value)
