"""The staging and readers benchmarks give plausible figures on little data."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio_bench.emulated.emulated_mount import why_not
from dlio_bench.readers import ReaderCase
from dlio_bench.readers import measure as measure_readers
from dlio_bench.staging_bench import Sizes, measure

TINY = Sizes(0.3, 1 << 22, 200, 4096, 20_000, 0.1, 1)


@pytest.mark.skipif(why_not() is not None, reason=f"no FUSE: {why_not()}")
@pytest.mark.nightly
def test_cases_over_slowfs(tmp_path: Path) -> None:
    measured = measure(["slow-200", "small-files", "two-jobs"], TINY, str(tmp_path))
    cases: Any = measured["cases"]
    assert 0 < cases["slow-200"]["share_of_bandwidth"]["median"] <= 1
    # Each file is opened and read once, whoever is faster, and 64 for their identity.
    assert cases["small-files"]["asked_of_the_source"]["opens"] == 264
    assert cases["small-files"]["asked_of_the_source"]["bytes"] == 264 * 4096
    assert cases["two-jobs"]["read_over_data"]["median"] <= 1.1
    assert cases["two-jobs"]["kept_over_data"]["median"] < 1.1
    assert list(tmp_path.iterdir()) == []


def test_cases_on_the_local_disk(tmp_path: Path) -> None:
    cases: Any = measure(["local", "memory"], TINY, str(tmp_path))["cases"]
    assert cases["local"]["into_memory_over_dd_read"]["median"] > 0
    assert cases["memory"]["peak_MiB"]["median"] < 256
    assert list(tmp_path.iterdir()) == []


# webdataset leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_reader_beside_its_library(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    argv = ["bench", "readers", "--samples", "64", "--sample-bytes", "2000", "--repeats", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--report", str(report)])
    assert not ended.value.code
    cases = json.loads(report.read_text())["formats"]
    for name, figures in cases.items():
        assert figures["pass_over_library"]["median"] > 0, name
    formats: Any = measure_readers(["npy"], ReaderCase(64, 2000, 10, 1))["formats"]
    assert formats["npy"]["bytes"] == 128_000
