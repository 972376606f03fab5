"""The time that a rank computes in each step."""

import pytest
import torch

from dlio.train.step_clock import StepClock


def test_a_clock_excludes_waiting() -> None:
    waited = iter([10.0, 10.0 + 1e6])
    clock = StepClock(lambda: next(waited))
    assert clock.rate() is None
    with clock.step(4):
        pass
    # A million seconds of waiting do not count as computing.
    assert clock.steps[0][1] < 1
    clock.steps = [(4, 0.5), (8, 1.0), (1, 50.0)]
    assert clock.rate() == 8


def test_steps_on_a_gpu_are_timed_only_if_asked_for() -> None:
    clock = StepClock(lambda: pytest.fail("steps are timed"), torch.device("cuda", 0))
    with clock.step(32):
        pass
    assert clock.rate() is None
