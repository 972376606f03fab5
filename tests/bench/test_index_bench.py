"""`dlio bench index` opens data sets with dlio and other libraries, and counts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio_bench import index_bench

_SAMPLES = 300


# cold: strace must reach the program itself.
@pytest.mark.cold
def test_openings_are_counted_next_to_other_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "index.json"
    formats = [f"--format={name}" for name in ("tar", "csv", "mds")]
    argv = ["bench", "index", *formats, f"--samples={_SAMPLES}", f"--scratch={tmp_path}"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, f"--report={report}"])
    assert ended.value.code == 0
    assert [path.name for path in tmp_path.iterdir()] == [report.name]
    values_of: dict[tuple[str, str, str], float] = {}
    figures: list[dict[str, Any]] = json.loads(report.read_text())["figures"]
    for each in figures:
        labels = each["labels"]
        values_of[labels["format"], labels["library"], each["name"]] = each["values"][0]
    for name in ("tar", "csv", "mds"):
        for opening in ("first", "second"):
            assert values_of[name, f"dlio, {opening}", "time"] > 0
            peak, held = (
                values_of[name, f"dlio, {opening}", f"{which} memory"] for which in ("peak", "held")
            )
            assert peak >= held >= 0
    assert ("tar", "tarfile", "time") in values_of
    assert ("csv", "pyarrow, table in memory", "time") in values_of
    if shutil.which("strace") is not None:
        calls = [
            values_of["tar", f"dlio, {opening}", "system calls"] for opening in ("first", "second")
        ]
        assert calls[1] < calls[0]
    shown = capsys.readouterr().out
    assert ("mds", "Streaming", "time") in values_of or "Streaming is not installed" in shown


@pytest.mark.cold
def test_a_library_that_fails_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(index_bench._CONTENDERS["tar"][0], name="broken", imports="import half_there")
    monkeypatch.setitem(index_bench._CONTENDERS, "tar", (broken,))
    monkeypatch.setattr(index_bench, "find_spec", lambda _: True)
    options = index_bench.IndexBenchOptions(formats=("tar",), samples=10)
    made = index_bench.measure(options, str(tmp_path))["tar"]
    reason = made["broken"]
    assert isinstance(reason, str)
    assert reason.startswith("left out: broken exited with code 1: ModuleNotFoundError")
    assert isinstance(made["dlio, second"], index_bench.OpeningFigures)
