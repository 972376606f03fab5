"""The envelope of reports: its schema, and the values that JSON does not have."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

import dlio_bench.results
from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio_bench.results.envelope import begin, envelope, finish
from dlio_bench.results.machine import describe_file_system
from dlio_bench.results.report_values import Figure, PlotCurve, Ratio, Results, Waterfall

jsonschema = pytest.importorskip("jsonschema")
_SCHEMA = json.loads(
    (Path(dlio_bench.results.__file__).parent / "schema.json").read_text(encoding="utf-8")
)


def _results(folder: str) -> Results:
    return Results(
        benchmark="storage",
        settings={"ranks": 2, "folder": folder},
        seeds={"order": 7},
        figures=[Figure("throughput", "samples/s", (1.0, 3.0, 2.0), {"loader": "dlio"}, "higher")],
        ratios=[Ratio("dlio / torch", (1.5, 2.0, 2.5))],
        curves=[PlotCurve("latency", "cdf", "s", "share", (0.1, 0.2), (0.5, 1.0))],
        waterfalls=[Waterfall("epoch", {"read": 1.0, "decode": 2.0})],
        notes=["from the page cache"],
        details={"samples_per_s": {"dlio": 2.0}},
        paths=(folder,),
        versions={"webdataset": "1.0"},
    )


def test_a_report_follows_the_schema_and_keeps_all_repeats(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    output = OutputOptions(report=str(report_file))
    finish(output, _results(str(tmp_path)), begin(output))
    report = json.loads(report_file.read_text())
    jsonschema.validate(report, _SCHEMA)
    assert report["figures"][0]["values"] == [1.0, 3.0, 2.0]
    assert report["figures"][0]["median"] == 2.0
    assert report["ratios"][0]["too_few"]
    assert report["samples_per_s"] == {"dlio": 2.0}
    assert report["environment"]["versions"]["webdataset"] == "1.0"
    assert report["environment"]["file_systems"][0]["size"] > 0
    assert report["seconds"] >= 0


def test_the_schema_refuses_a_figure_without_its_repeats(tmp_path: Path) -> None:
    report = envelope(_results(str(tmp_path)))
    figures = report["figures"]
    assert isinstance(figures, list)
    del figures[0]["values"]
    with pytest.raises(jsonschema.ValidationError, match="values"):
        jsonschema.validate(report, _SCHEMA)


def test_no_detail_replaces_a_key_of_the_envelope() -> None:
    report = envelope(Results("loader", details={"benchmark": "other", "schema": "mine"}))
    assert (report["benchmark"], report["schema"]) == ("loader", "dlio-bench/1")


def test_values_that_are_no_numbers_become_null() -> None:
    results = Results(
        "x",
        figures=[Figure("a", "s", (math.nan, 4.0)), Figure("b", "s", (math.inf,))],
        details={"array": [np.float64("nan"), np.int64(3), np.float32(0.5)], "one": (2,)},
    )
    report = json.loads(json.dumps(envelope(results), allow_nan=False))
    jsonschema.validate(report, _SCHEMA)
    assert report["figures"][0]["values"] == [None, 4.0]
    assert report["figures"][0]["median"] == 4.0
    assert report["figures"][1]["median"] is None
    assert report["array"] == [None, 3, 0.5]
    assert report["one"] == [2]


def test_json_stands_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    finish(OutputOptions(as_json=True), Results("x"), begin(OutputOptions()))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["benchmark"] == "x"
    finish(OutputOptions(), Results("x"), begin(OutputOptions()))
    assert capsys.readouterr().out == ""


def test_a_report_that_cannot_be_written_is_refused_at_the_beginning(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--report"):
        begin(OutputOptions(report=str(tmp_path / "none" / "report.json")))


def test_a_path_that_is_gone_has_the_file_system_of_the_folder_above(tmp_path: Path) -> None:
    gone = describe_file_system(str(tmp_path / "a" / "b"))
    here = describe_file_system(str(tmp_path))
    assert gone["type"] == here["type"]
    assert gone["options"] == here["options"] != ""
    assert os.path.ismount(str(gone["mountpoint"]))
