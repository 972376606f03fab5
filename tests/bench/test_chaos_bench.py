"""`dlio bench chaos`: its arithmetic, and how it tells what it saw."""

import json
import mmap
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from dlio_docs.benchmarks import page

from dlio.cli import main
from dlio.train.ledger_file import LedgerLine
from dlio.util.shared_folders import SHARED_MEMORY, SharedFolder, user_folder
from dlio_bench.chaos.accounts import (
    effective_time,
    quantiles,
    uneven_epochs,
)
from dlio_bench.chaos.chaos_figures import JobRecord, RunRecord, figures_of, next_step, rows_of
from dlio_bench.chaos.leftovers import JOB, kill, processes_of, shared_memory
from dlio_bench.chaos.overhead_case import step_seconds
from dlio_bench.chaos.scheduled_faults import KINDS, InjectedFault, ScheduledFault, make_schedule
from dlio_bench.chaos.stamps import FinishedStep, LossStamp, RankStamps, Stamps, StepStamp, steps_of
from dlio_bench.chaos.suspicions import pauses_of, suspicions_in

Soon = Callable[[Callable[[], bool]], bool]


def _steps(first: int, times: Sequence[float], ranks: int = 2) -> list[FinishedStep]:
    return [FinishedStep(number, at, ranks) for number, at in enumerate(times, first)]


def _stamp(step: int, t: float, generation: int = 0, epoch: int = 0) -> StepStamp:
    return {"t": t, "epoch": epoch, "step": step, "generation": generation, "ranks": 2}


def _loss(generation: int, *ranks: int, t: float = 100.0, change: str = "lost") -> LossStamp:
    return {
        "t": t,
        "change": change,
        "ranks": list(ranks),
        "generation": generation,
        "seconds": 0.25 * generation,
        "renew_s": 0.125,
        "settle_s": 0.0625,
        "samples_again": 4,
    }


def _fault(kind: str = "kill") -> ScheduledFault:
    return ScheduledFault(1.0, kind, (0.5, 0.5), 0.01)


def test_a_trace_shows_samples_that_were_lost_and_doubled() -> None:
    def line(epoch: int, step: int, *samples: int) -> LedgerLine:
        return {"epoch": epoch, "step": step, "rank": 0, "samples": list(samples)}

    ledger = [
        line(0, 0, 0, 2, 4),
        line(0, 1, 1, 3),
        line(1, 0, 0, 2, 4, 2),
        line(1, 1, 1, 2),
        line(3, 0, 0, 1, 2, 3, 4),
    ]
    assert uneven_epochs(ledger[:2], 5, 1) == []
    assert uneven_epochs(ledger, 5, 3) == [
        {
            "epoch": 1,
            "lost": 1,
            "doubled": 2,
            "problems": 0,
        },  # 3 is missing, and 2 comes three times.
        {"epoch": 2, "lost": 5, "doubled": 0, "problems": 1},
        {"epoch": 3, "lost": 0, "doubled": 0, "problems": 1},  # No such epoch was asked for.
    ]


def test_all_time_of_undisturbed_steps_counts() -> None:
    effective = effective_time([_steps(1, [10, 11, 13, 14])], [])
    assert (effective.counted_s, effective.wall_s) == (4, 4)
    assert (effective.steps, effective.redone) == (4, 0)


def test_a_disturbed_step_counts_as_long_as_one_of_as_many_ranks() -> None:
    steps = _steps(1, [0, 1, 2], ranks=3) + _steps(4, [9, 11, 13], ranks=2)
    effective = effective_time([steps], [(2.5, 9.0)])
    # Two steps of 1 s by three ranks, two of 2 s by two; the torn one lasted 7 s and counts 2.
    assert effective.counted_s == 2 + 4 + 2
    assert effective.wall_s == 13
    # The step that ended just after the fault was shorter than usual, and counts as it was.
    assert effective_time([_steps(1, [0, 2, 2.5, 4.5])], [(2.2, 2.4)]).counted_s == 4.5


def test_steps_that_are_made_again_count_once() -> None:
    runs = [_steps(1, [0, 1, 2, 3]), _steps(3, [10, 11, 12, 13]), []]
    effective = effective_time(runs, [(3.5, 10.0)])
    assert effective.redone == 2
    assert effective.steps == 6
    # Step 2 of the first process; 3, whose beginning is not seen, to 6 of the second one.
    assert effective.counted_s == 1 + 4
    assert effective.wall_s == 13


def test_a_job_without_steps_has_no_effective_time() -> None:
    assert effective_time([[], []], []).wall_s == 0


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert quantiles(values) == {"count": 100, "median": 50.5, "p90": 91, "p99": 100, "max": 100}
    assert quantiles([3.0]) == {"count": 1, "median": 3, "p90": 3, "p99": 3, "max": 3}
    assert quantiles([]) == {"count": 0}


def test_the_same_seed_draws_the_same_faults_of_all_kinds() -> None:
    faults = make_schedule(KINDS, 70, 2.0, "exponential", 5)
    assert faults == make_schedule(KINDS, 70, 2.0, "exponential", 5)
    assert faults != make_schedule(KINDS, 70, 2.0, "exponential", 6)
    kinds = [fault.kind for fault in faults]
    assert all(sorted(kinds[k : k + 9]) == sorted(KINDS) for k in range(0, 63, 9))
    assert all(fault.gap_s <= 0.08 for fault in faults)
    many = make_schedule(["kill"], 4000, 2.0, "exponential", 0)
    assert many[-1].due_s / len(many) == pytest.approx(2.0, rel=0.1)
    even = [fault.due_s for fault in make_schedule(["kill"], 100, 2.0, "uniform", 0)]
    gaps = [after - before for before, after in zip([0.0, *even], even, strict=False)]
    assert min(gaps) >= 1.0
    assert max(gaps) <= 3.0


def test_ranks_are_chosen_of_those_that_are_left() -> None:
    assert _fault("first").choose([2, 3, 5]) == [2]
    assert _fault("kill").choose([2, 3, 5]) == [3]
    assert sorted(_fault("twice").choose([2, 3, 5])) == [3, 5]
    assert [ScheduledFault(0, "kill", (0.999, 0), 0).choose([4, 7])] == [[7]]


def test_the_next_step_is_that_of_the_last_rank_that_is_left() -> None:
    left, slow, hurt = RankStamps(0, 10, 0.0), RankStamps(1, 11, 0.0), RankStamps(2, 12, 0.0)
    left.steps = [_stamp(1, 1.0), _stamp(2, 2.0), _stamp(3, 3.0, generation=1)]
    slow.steps = [_stamp(1, 1.1), _stamp(2, 2.1), _stamp(3, 3.5, generation=1)]
    hurt.steps = [_stamp(1, 1.0)]
    made = InjectedFault(_fault(), 1.5, (2,))
    assert next_step([left, slow, hurt], made) is None  # Nobody has told of the loss.
    left.losses = [_loss(1, 2)]
    assert next_step([left, slow, hurt], made) == 3.5
    assert next_step([left, slow, hurt], InjectedFault(_fault("twice"), 1.5, (1, 2))) is None


def test_a_rank_that_joins_is_not_waited_for_and_its_joining_is_no_loss() -> None:
    left, spare, third = RankStamps(0, 10, 0.0), RankStamps(1, 11, 0.0), RankStamps(2, 12, 0.0)
    left.steps = [_stamp(1, 1.0), _stamp(2, 2.0, generation=1), _stamp(3, 3.0, generation=2)]
    left.losses = [_loss(1, 2), _loss(2, 1, change="joined", t=2.5)]
    spare.steps = [_stamp(3, 3.5, generation=2)]
    spare.losses = left.losses
    third.steps = [_stamp(1, 1.0)]
    ranks = [left, spare, third]
    assert next_step(ranks, InjectedFault(_fault(), 1.5, (2,))) == 2.0
    lost_again = InjectedFault(_fault(), 4.0, (1,))
    assert next_step(ranks, lost_again) is None
    left.losses.append(_loss(3, 1))
    left.steps.append(_stamp(4, 5.0, generation=3))
    assert next_step(ranks, lost_again) == 5.0
    run = RunRecord(0, False, ranks, [], 6.0, "", 0, [])
    figures = figures_of("shrink", [JobRecord([run], [], epochs=1)], samples=10)
    assert (figures["joins"], figures["joining_s"]) == (1, quantiles([0.5]))


def test_figures_are_of_the_records() -> None:
    left, hurt = RankStamps(0, 10, 0.0), RankStamps(1, 11, 0.0)
    left.steps = [_stamp(k, float(k)) for k in range(1, 5)] + [_stamp(5, 6.0, generation=1)]
    hurt.steps = left.steps[:4]
    left.losses = [_loss(1, 1)]
    run = RunRecord(
        0, False, [left, hurt], [InjectedFault(_fault(), 4.5, (1,))], 7.0, "", 1, ["pmix"]
    )
    hung = RunRecord(None, True, [], [], 7.0, "", 0, [])
    late = RunRecord(0, False, [left, hurt], [InjectedFault(_fault(), 6.5, (0,))], 7.0, "", 0, [])
    hung.made.append(InjectedFault(_fault(), 6.5, (0,)))
    jobs = [
        JobRecord([run], [{"epoch": 0, "lost": 1, "doubled": 2, "problems": 0}], epochs=1),
        JobRecord([hung]),
        JobRecord([RunRecord(2, False, [], [], 7.0, "dlio: error: x", 0, [])]),
    ]
    figures = figures_of("shrink", jobs, samples=10)
    assert figures["unnoticed"] == 0
    without = figures_of("shrink", [JobRecord([late], epochs=1)], samples=10)
    assert (without["unnoticed"], without["unchecked_jobs"]) == (1, 1)
    assert figures["unchecked_jobs"] == 0
    assert figures["faults"] == {"kill": 2}
    assert (figures["hangs"], figures["failed_jobs"], figures["jobs"]) == (1, 1, 3)
    assert figures["failures"] == ["dlio: error: x"]
    assert (figures["samples_lost"], figures["samples_doubled"]) == (1, 2)
    assert figures["recovery_s"] == quantiles([0.25])
    assert figures["next_step_s"] == quantiles([1.5])
    assert (figures["left_processes"], figures["left_files"]) == (1, ["pmix"])
    assert figures["ettr"] == pytest.approx(4 / 5)  # The torn step lasted 2 s and counts 1.
    assert figures["samples_per_s"] == pytest.approx(10 / 5)


def test_a_restart_lasts_until_the_next_process_makes_steps() -> None:
    first, second = RankStamps(0, 10, 0.0), RankStamps(0, 20, 9.0)
    first.steps = [_stamp(k, float(k)) for k in range(1, 5)]
    second.steps = [_stamp(k, 7.0 + k) for k in range(3, 8)]
    made = [InjectedFault(_fault(), 4.5, (1,))]
    job = JobRecord(
        [
            RunRecord(137, False, [first], made, 5.0, "", 0, []),
            RunRecord(0, False, [second], [], 15.0, "", 0, []),
        ],
        epochs=1,
    )
    figures = figures_of("restart", [job], samples=10)
    assert figures["next_step_s"] == quantiles([5.5])  # To step 3, for the second time.
    assert figures["caught_up_s"] == quantiles([7.5])  # To step 5.
    assert (figures["steps"], figures["steps_redone"]) == (7, 2)
    assert (figures["failed_jobs"], figures["samples_lost"]) == (0, None)
    assert figures["ettr"] == pytest.approx(6 / 13)


def test_a_stored_report_becomes_tables_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlio_docs.benchmarks.DATA", tmp_path)
    left = RankStamps(0, 10, 0.0)
    left.steps = [_stamp(k, float(k)) for k in range(1, 4)]
    job = JobRecord(
        [RunRecord(0, False, [left], [], 7.0, "", 0, [])],
        [{"epoch": 0, "lost": 3, "doubled": 0, "problems": 0}],
        1,
    )
    rows = rows_of({"shrink": figures_of("shrink", [job], samples=10)})
    ratio = {"parameters_MB": 25, "shrink_over_off": 1.01, "ratios": [1.0, 1.02]}
    stored = {
        "title": "Storms",
        "command": "dlio bench chaos",
        "date": "2026-01-01",
        "data": "pictures",
        "load_average": [0.1, 0.2],
        "machine": {"versions": {}, "commit": "x", "processor": "x", "cores": 2, "memory": "x"}
        | {"python": "3"},
        "report": {"storm": {"rows": rows}, "overhead": {"rows": [ratio]}},
    }
    (tmp_path / "chaos.json").write_text(json.dumps(stored))
    text = page("chaos")
    assert "| samples lost | 3 |" in text
    assert "| parameters MB | shrink over off |\n| --- | --- |\n| 25 | 1.01 |" in text


def test_stamps_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-1-7.jsonl"
    begin = {"t": 1.0, "kind": "begin", "rank": 1, "pid": 7, "step": 0}
    lines = [begin, {"kind": "step", **_stamp(1, 2.0)}, {"kind": "step", **_stamp(2, 3.0)}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    stamps = Stamps(str(tmp_path))
    stamps.read()
    assert stamps.ranks == []
    path.write_text(text[:-5])
    stamps.read()
    assert [step.number for step in steps_of(stamps.ranks)] == [1]
    path.write_text(text + json.dumps({"t": 4.0, "kind": "end", "peak_KiB": 9}) + "\n")
    stamps.read()
    assert [step.at for step in steps_of(stamps.ranks)] == [2.0, 3.0]
    assert stamps.ranks[0].peak_kib == 9
    assert stamps.newest == 4.0


def test_step_times_leave_out_the_first_steps_and_those_between_epochs() -> None:
    rank = RankStamps(0, 1, 0.0)
    rank.steps = [_stamp(k, k * k / 2, epoch=k // 8) for k in range(1, 11)]
    assert step_seconds(rank) == [6.5, 8.5, 9.5]


def test_processes_of_a_job_are_known_by_their_environment(tmp_path: Path, soon: Soon) -> None:
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, JOB: str(tmp_path)})
    try:
        assert soon(lambda: processes_of(str(tmp_path)) == [child.pid])
        assert processes_of(f"{tmp_path}x") == []
        kill([child.pid])
        child.wait(60)
        assert processes_of(str(tmp_path)) == []
    finally:
        child.kill()
        child.wait()


def test_shared_memory_is_left_over_when_nobody_uses_it() -> None:
    name = f"chaos-test-{os.getpid()}"
    path = Path(SHARED_MEMORY, name)
    try:
        with open(path, "w+b") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                assert name not in shared_memory()
        assert name in shared_memory()
    finally:
        path.unlink()
    with SharedFolder(name):
        assert f"{user_folder()}/{name}" not in shared_memory()
    assert f"{user_folder()}/{name}" not in shared_memory()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--torchft", "/nowhere/python"], "--torchft /nowhere/python: cannot be run"),
        (["--torchft", "false"], "cannot import torchft (it said nothing): name the interpreter"),
        (["--faults", "kill,plague"], "--faults plague: choose one of kill, stop"),
        (["-n", "2", "--faults", "twice"], "-n 3"),
        (["-n", "7"], "6"),
        (["--exchange", "telepathy"], "choose one of allreduce"),
        (["--case", "calm"], "choose one of storm"),
        (["/nowhere", "--case", "overhead"], "/nowhere: no such file"),
    ],
)
def test_what_cannot_be_done_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chaos", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_pauses_are_of_one_rank_at_a_step_and_the_same_on_all() -> None:
    pauses = pauses_of(3, ranks=4, steps=1000, count=100)
    assert pauses == pauses_of(3, ranks=4, steps=1000, count=100)
    assert len(pauses) == 100
    assert set(pauses.values()) == set(range(4))
    assert min(pauses) >= 1
    assert max(pauses) <= 1000
    assert len(pauses_of(0, 2, 5, 9)) == 5


def test_suspicions_are_read_from_what_a_job_says() -> None:
    said = [
        "epoch 1/2: loss 1.0, 5 samples/s in 1.0 s",
        "rank 1 (process 5) hangs and is killed: all others of its node have waited 30 s for it",
        "rank 2 (process 6) computes 7 times slower than the others of its node",
        "rank 1 (node n) lost at step 5: 3 ranks go on, 0.02 s",
    ]
    assert suspicions_in(said) == said[1:]
