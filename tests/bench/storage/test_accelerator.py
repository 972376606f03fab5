"""The emulated accelerator: how long it is busy, and how much the host's work adds."""

import time

from dlio_bench.storage_cases.utilisation import Accelerator


def test_a_step_is_at_least_as_long_as_asked_for() -> None:
    busy_s, over_s = Accelerator(0.02, 0.0, 0).compute()
    assert busy_s >= 0.02
    assert over_s == 0.0


def test_work_of_the_host_beyond_a_step_is_not_computing() -> None:
    busy_s, over_s = Accelerator(0.01, 0.0, 0).compute(lambda: time.sleep(0.05))
    assert busy_s == 0.01
    assert over_s >= 0.04


def test_steps_of_a_distribution_repeat_with_the_seed() -> None:
    def busy(seed: int) -> list[float]:
        accelerator = Accelerator(0.001, 0.0005, seed)
        return [accelerator.compute(lambda: time.sleep(0.01))[0] for _ in range(4)]

    assert busy(3) == busy(3)
    assert busy(3) != busy(4)
