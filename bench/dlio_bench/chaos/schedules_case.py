"""`--case schedules`: schedules of losses on thousands of ranks, simulated."""

import time
from dataclasses import asdict
from typing import Final

from dlio_bench.chaos.chaos_job import ChaosCase
from dlio_bench.chaos.simulated_jobs.outcome_check import ScheduleOutcome, run_schedule
from dlio_bench.chaos.simulated_jobs.schedule_draws import COHORTS, draw_schedule
from dlio_bench.chaos.simulated_jobs.turns import Turns

_NAMED: Final = 20
_SHOWN: Final = {
    "schedules": "schedules",
    "ranks_most": "ranks, at most",
    "of_1000_ranks_or_more": "schedules of 1,000 ranks or more",
    "events": "messages and steps",
    "losses": "ranks lost",
    "recoveries": "recoveries",
    "interrupted": "recoveries that another loss interrupted",
    "given": "sums given to ranks that lacked them",
    "disagreements": "disagreements and hangs",
    "samples_lost": "samples lost",
    "samples_doubled": "samples doubled",
    "seconds": "seconds",
}


def measure(case: ChaosCase) -> dict[str, object]:
    """Run `--schedules` schedules of `--seed`, each through the code that decides in training."""
    options = case.options
    total = ScheduleOutcome()
    wrong: list[dict[str, object]] = []
    ranks: list[int] = []
    began = time.perf_counter()
    first = options.first_schedule
    with Turns(COHORTS) as turns:
        for number in range(first, first + options.schedules):
            schedule = draw_schedule(options.seed, number)
            outcome = run_schedule(schedule, turns)
            ranks.append(schedule.job.ranks)
            total.add(outcome)
            if outcome.wrong and len(wrong) < _NAMED:
                wrong.append({"schedule": number, "job": asdict(schedule.job), **asdict(outcome)})
    seconds = time.perf_counter() - began
    figures = {
        "schedules": options.schedules,
        "ranks_most": max(ranks),
        "of_1000_ranks_or_more": sum(each >= 1000 for each in ranks),
        **{key: value for key, value in asdict(total).items() if key != "disagreements"},
        "disagreements": len(total.disagreements),
        "seconds": seconds,
    }
    rows = [{"figure": words, "value": f"{figures[key]:,.0f}"} for key, words in _SHOWN.items()]
    said = [
        f"schedule {each['schedule']} (--first-schedule {each['schedule']} --schedules 1): "
        f"{each['disagreements'] or 'samples lost or doubled'}"
        for each in wrong
    ]
    return {**figures, "wrong": wrong, "rows": rows, "said": said}
