"""Schedules of a seed: a job, and its losses at any message."""

import random
from dataclasses import dataclass
from typing import Final

from dlio_bench.chaos.simulated_jobs.memory_network import PlannedLoss
from dlio_bench.chaos.simulated_jobs.simulated_ranks import SimulatedJob

COHORTS: Final = 8
"""Largest number of cohorts."""
_SIZES: Final = ((0.8, 2, 8), (0.15, 9, 200), (0.035, 201, 2_000), (0.015, 2_001, 10_000))
"""Share of schedules, fewest and most ranks."""
_KINDS: Final = ("one", "one", "one", "several", "first", "node", "all but one")
_MOST_HEARD: Final = 200
"""Ranks of a job without common sums: each tells how far it has heard each other one."""
_MOST_BY_HOME: Final = 64
"""Ranks of a job whose samples are dealt by home."""
_MOST_LOSSES: Final = 5


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """A job, and its events."""

    job: SimulatedJob
    losses: tuple[PlannedLoss, ...]
    cohorts: tuple[tuple[int, ...], ...]
    """Ranks that are always at the same place."""
    seed: int
    """Seed of the order in which cohorts run, and of the victims."""


def draw_schedule(seed: int, number: int, ranks: int | None = None) -> FaultSchedule:
    """Draw a schedule: the same for the same arguments, whatever the numbers before it."""
    rng = random.Random(f"{seed} {number}")
    share, chosen = rng.random(), ranks or 0
    for part, least, most in _SIZES:
        if not chosen and share < part:
            chosen = rng.randint(least, most)
        share -= part
    chosen = chosen or _SIZES[0][1]
    steps = rng.randint(1, 7)
    batch_size = rng.randint(1, 4) if chosen <= _MOST_HEARD else 1
    samples = max(1, steps * batch_size * chosen - rng.randint(0, batch_size * chosen - 1))
    job = SimulatedJob(
        ranks=chosen,
        samples=samples,
        batch_size=batch_size,
        epochs=rng.randint(1, 2),
        accumulate=rng.choice((1, 1, 2, 3)),
        buckets=rng.randint(1, 3),
        heard=chosen <= _MOST_HEARD and rng.random() < 0.2,
        keeps_steps=rng.random() < 0.25,
        nodes=rng.choice((0, 0, 0, 2, 3)) if 3 <= chosen <= _MOST_BY_HOME else 0,
        seed=rng.randrange(2**32),
    )
    cohorts = _cohorts(chosen, rng)
    per_step = len(cohorts) * (1 + 2 * job.buckets / job.accumulate)
    events = int(per_step * steps * job.epochs) + 12 * len(cohorts)
    losses: list[PlannedLoss] = []
    for _ in range(rng.randint(1, _MOST_LOSSES)):
        at = rng.randint(1, events)
        if losses and rng.random() < 0.5:
            # Soon after another one: most often within its recovery.
            at = losses[-1].at + rng.randint(0, 12 * len(cohorts))
        losses.append(PlannedLoss(at, rng.choice(_KINDS)))
    return FaultSchedule(job, tuple(losses), cohorts, rng.randrange(2**32))


def _cohorts(ranks: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    if ranks <= COHORTS:
        return tuple((rank,) for rank in range(ranks))
    count = rng.randint(2, COHORTS)
    of = [rng.randrange(count) for _ in range(ranks)]
    parts = (tuple(rank for rank in range(ranks) if of[rank] == k) for k in range(count))
    return tuple(filter(None, parts))
