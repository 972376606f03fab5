"""`dlio bench compare`: ratios with intervals, differences of machines, and errors."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.errors import UsageError
from dlio_bench.results.compare import changes_of, is_worse
from dlio_bench.results.envelope import envelope
from dlio_bench.results.report_values import Figure, Ratio, Results
from dlio_bench.results.saved_report import read_report


def _written(
    path: Path,
    rates: tuple[float, ...],
    settings: dict[str, object] | None = None,
    benchmark: str = "loader",
    **environment: object,
) -> Path:
    results = Results(
        benchmark,
        settings=settings or {},
        figures=[
            Figure("throughput", "samples/s", rates, {"loader": "dlio"}, "higher"),
            Figure("wait", "s", tuple(1 / rate for rate in rates), {"loader": "dlio"}, "lower"),
            Figure("size", "bytes", (10.0,)),
        ],
        ratios=[Ratio("dlio / torch", tuple(rate / 100 for rate in rates))],
    )
    report = envelope(results)
    assert isinstance(report["environment"], dict)
    report["environment"] |= environment
    path.write_text(json.dumps(report))
    return path


FAST = (200.0, 202.0, 198.0, 201.0, 199.0, 200.0)
SLOW = tuple(rate / 2 for rate in FAST)


def _run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "compare", *argv])
    return int(ended.value.code or 0)


def test_figures_are_matched_and_their_ratios_have_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = _written(tmp_path / "a.json", FAST), _written(tmp_path / "b.json", SLOW)
    assert _run(str(first), str(other)) == 0
    shown = capsys.readouterr().out
    row = re.search(r"loader dlio: throughput.*", shown)
    assert row is not None
    assert "200 (198 to 202)" in row[0]
    assert "0.500" in row[0]
    assert re.search(r"0\.49\d to 0\.50\d", row[0])
    assert "not in" not in shown
    assert "warning" not in shown


def test_what_became_worse_beyond_its_interval_ends_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = _written(tmp_path / "a.json", FAST), _written(tmp_path / "b.json", SLOW)
    assert _run(str(first), str(other), "--worse-than", "1.1") == 1
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("throughput", "wait", "dlio / torch"):
        assert re.search(f"worse by more than 1.1: [^:]*(: )?{name} in ", shown), name
    assert "worse by more than 1.1: size" not in shown
    assert _run(str(other), str(first), "--worse-than", "1.1") == 0
    assert _run(str(first), str(other), "--worse-than", "2.1") == 0


def test_a_median_that_is_worse_within_its_interval_is_not_counted(tmp_path: Path) -> None:
    wide = (100.0, 210.0, 120.0, 220.0, 110.0, 205.0)
    first = read_report(str(_written(tmp_path / "a.json", FAST)))
    other = read_report(str(_written(tmp_path / "b.json", wide)))
    change = next(each for each in changes_of(first, other) if each.shown.name == "throughput")
    assert change.ratio is not None
    assert change.ratio < 1 / 1.1
    assert not is_worse(change, 1.1)


def test_differences_of_machines_are_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ext4, lustre = (
        [{"path": "/data", "type": kind, "options": "rw"}] for kind in ("ext4", "lustre")
    )
    first = _written(tmp_path / "a.json", FAST, file_systems=ext4, kernel="5.1")
    other = _written(
        tmp_path / "b.json", FAST, processor="Abacus", file_systems=lustre, kernel="6.1"
    )
    assert _run(str(first), str(other)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("processor", "kernel", "file system of path 1"):
        assert 0 <= shown.index(f"warning: another {name}") < shown.index("compared with")
    assert "Abacus" in shown
    assert "lustre (rw)" in shown


def test_unlike_settings_have_no_ratios_unless_they_are_what_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one: dict[str, object] = {"batch_size": 7, "workers": None, "path": "/a", "seed": 0}
    two: dict[str, object] = {"batch_size": 50, "workers": 4, "path": "/b", "seed": 1, "new": 3}
    first = str(_written(tmp_path / "a.json", FAST, one))
    other = str(_written(tmp_path / "b.json", SLOW, two))
    assert _run(first, other) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "200 (198 to 202)" in shown
    assert "0.500" not in shown
    assert "differ in batch_size 7 and 50; workers not given and 4:" in shown
    assert "--vary batch_size --vary workers" in shown
    assert _run(first, other, "--worse-than", "1.1") == 2
    assert _run(first, other, "--vary", "batch-size", "--vary", "workers") == 0
    assert "0.500" in capsys.readouterr().out
    assert _run(first, other, "--vary", "workers", "--vary", "batch_size", "--worse-than", "9") == 0
    third = str(_written(tmp_path / "c.json", SLOW, one, "storage"))
    capsys.readouterr()
    assert _run(first, third) == 0
    assert "differ in benchmark loader and storage" in " ".join(capsys.readouterr().out.split())


def test_a_setting_that_no_report_has_and_reports_of_one_run_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(_written(tmp_path / "a.json", FAST, {"batch_size": 7}))
    other = str(_written(tmp_path / "b.json", SLOW, {"batch_size": 7}))
    assert _run(first, other, "--vary", "batchsize") == 2
    assert "did you mean batch_size?" in capsys.readouterr().err
    assert _run(first, other) == 0
    assert "one run" not in capsys.readouterr().out
    assert _run(first, str(shutil.copy(first, tmp_path / "c.json"))) == 0
    assert f"{tmp_path}/c.json are of one run" in " ".join(capsys.readouterr().out.split())
    assert _run(first, first) == 0
    assert "are of one run: nothing differs" in " ".join(capsys.readouterr().out.split())


def test_missing_figures_and_too_few_repeats_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = _written(tmp_path / "a.json", FAST), _written(tmp_path / "b.json", SLOW[:3])
    content = json.loads(other.read_text())
    content["figures"][1]["name"] = "other"
    other.write_text(json.dumps(content))
    assert _run(str(first), str(other)) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert f"not in {other}: wait (loader dlio)" in shown
    assert f"not in {first}: other (loader dlio)" in shown
    assert "*: fewer than 6 repeats" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a report"),
        ('{"schema": "dlio-bench/9"}', "schema dlio-bench/9, but this dlio reads dlio-bench/1"),
        ('{"schema": "dlio-bench/1"}', "damaged report"),
        ('{"schema": "\\u001b[2J"}', "schema \\\\x1b"),
        ('{"a": 1}', "no schema, and no machine"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read_report(str(path))
    assert str(path) in str(error.value)


def test_old_reports_of_the_site_are_readable() -> None:
    data = Path(__file__).parents[3] / "docs" / "benchmarks" / "data"
    for path in sorted(data.glob("*.json")):
        report = read_report(str(path))
        assert report.figures, path
    loader = read_report(str(data / "loader.json"))
    rate = next(f for f in loader.figures if f.name == "throughput" and f.labels["case"] == "dlio")
    assert (rate.unit, rate.better) == ("samples/s", "higher")


def _trained(path: Path, batch_size: int) -> Path:
    report = {
        "dataset": {"samples": 90, "bytes": 9000},
        "config": {"source": "data", "batch_size": batch_size},
        "epochs": [{"epoch": 0, "seconds": 2.0, "samples": 90, "loss": 1.5}],
        "versions": {"dlio": "0.1.0", "python": "3.11.7"},
        "machine": {"host": "here", "system": "Linux"},
    }
    path.write_text(json.dumps(report))
    return path


def test_reports_of_training_are_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = _written(tmp_path / "bench.json", FAST, processor="x")
    trained = _trained(tmp_path / "trained.json", 8)
    assert _run(str(trained), str(bench)) == 2
    said = capsys.readouterr()
    assert "different benchmarks: training in" in said.out
    assert "does not say its processor" in " ".join(said.out.split())
    assert "None" not in said.out
    assert "old report" not in said.out
    assert "no figure is in this report and in another one" in said.err
    assert _run(str(trained), str(_trained(tmp_path / "other.json", 8))) == 0
    assert "1.000" in capsys.readouterr().out
    assert _run(str(trained), str(_trained(tmp_path / "other.json", 16))) == 0
    assert "batch_size 8 and 16" in " ".join(capsys.readouterr().out.split())
