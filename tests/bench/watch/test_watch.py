"""`dlio bench watch` finds a part that has become slower, on a machine of any speed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio_bench.results.report_values import Figure
from dlio_bench.watch import watch_command as watched
from dlio_bench.watch.watch_command import PARTS, WatchPart, from_json, judge, normalised, to_json

TINY = WatchPart(
    ("readers", "--samples", "64", "--sample-bytes", "64", "--repeats", "3", "--format", "shard"),
    "processor",
)


def _runs(slower: float, machine_s: float, noise: float) -> dict[str, Figure]:
    """Six repeats on a machine that takes `machine_s` for the calibration."""
    random = np.random.default_rng(3)
    seconds = slower * machine_s * random.lognormal(0, noise, 6)
    figures = (
        Figure("rate", "samples/s", tuple(100 / seconds), {}, "higher"),
        Figure("time", "s", tuple(seconds), {}, "lower"),
        Figure("messages", "", (7.0,) * 6),
    )
    return {each.name: normalised(each, machine_s) for each in figures}


@pytest.mark.parametrize("machine_s", [0.1, 3.0])
def test_a_slower_part_is_found_on_a_machine_of_any_speed(machine_s: float) -> None:
    baseline = _runs(1, 1, 0.05)
    for slower, verdict in ((1.0, "same"), (1.5, "worse"), (0.6, "better")):
        judged = {each.key: each for each in judge(baseline, _runs(slower, machine_s, 0.05))}
        assert judged["rate"].verdict == judged["time"].verdict == verdict
        assert judged["messages"].verdict == "same"
        assert judged["rate"].fails == (verdict == "worse")
    noisy = {each.key: each for each in judge(baseline, _runs(1.2, machine_s, 1.5))}
    assert noisy["rate"].verdict == "too noisy"
    assert not noisy["rate"].fails


def test_counts_are_compared_exactly() -> None:
    count = {"messages": Figure("messages", "", (7.0, 7.0))}
    for values, verdict in (((7.0, 7.0), "same"), ((7.0, 8.0), "changed")):
        (judged,) = judge(count, {"messages": Figure("messages", "", values)})
        assert (judged.verdict, judged.fails) == (verdict, verdict == "changed")
    varying = {"messages": Figure("messages", "", (7.0, 9.0))}
    assert list(judge(varying, count)) == []
    assert [each.verdict for each in judge(count, {})] == ["gone"]
    assert [each.verdict for each in judge({}, count)] == ["new"]


def test_the_command_compares_with_the_baseline_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "readers", TINY)
    file = tmp_path / "baseline.json"
    watch = watched.Watch(("readers",), str(file), repeats=2, folder=str(tmp_path))
    with pytest.raises(UsageError, match="run with --update first"):
        watched.command(watch, OutputOptions())
    watched.command(replace(watch, update=True), OutputOptions())
    stored = json.loads(file.read_text())
    figures = from_json(stored["parts"]["readers"])
    rates = [key for key, each in figures.items() if each.better == "higher" and each.unit]
    assert rates
    # As if the part had been a thousand times faster.
    faster = {
        key: Figure(key, each.unit, tuple(1000 * v for v in each.values), {}, each.better)
        if key in rates
        else each
        for key, each in figures.items()
    }
    file.write_text(json.dumps({**stored, "parts": {"readers": to_json(faster)}}))
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit) as end:
        watched.command(watch, OutputOptions(str(report)))
    assert end.value.code == 1
    verdicts = json.loads(report.read_text())["verdicts"]["readers"]
    assert {verdicts[key] for key in rates} == {"worse"}
    assert "worse" in capsys.readouterr().out
    assert not list(tmp_path.glob("dlio-bench-watch-*"))


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text('{"schema": "other"}')
    with pytest.raises(UsageError, match="not a baseline of dlio-watch/1"):
        watched.command(watched.Watch(baseline=str(file), folder=str(tmp_path)), OutputOptions())
