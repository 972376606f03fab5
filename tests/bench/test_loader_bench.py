"""The benchmark runs, counts every sample, and reports the requested figures."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dlio
from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio_bench.loader_bench import LoaderCase, LoaderChoice, command, measure
from dlio_bench.loader_cases import arrays, augment, mapstyle, shown
from dlio_bench.peers.dlio_contenders import MAKERS
from dlio_bench.peers.standalone.runners import protocol
from dlio_bench.peers.standalone.runners.protocol import Task
from dlio_staging.pack_folder import pack


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.cold
@pytest.mark.nightly  # Each contender imports torch anew, in 2 s.
def test_its_small_form_measures_contenders_in_one_run(pictures: Path) -> None:
    report: dict[str, Any] = measure(
        LoaderCase(str(pictures), image_size=32, batch_size=5, workers=2, repeats=1)
    )
    assert report["samples"] == 12
    assert list(report["samples_per_s"]) == list(LoaderCase().contenders)
    for rate in report["samples_per_s"].values():
        assert len(rate["all"]) == 1
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert report["footprint"]["torch"]["processes"] == 3
    assert report["footprint"]["dlio"]["processes"] == 1
    assert report["footprint"]["dlio"]["pss_MiB"] > 0
    ratios = [
        mine / torch
        for mine, torch in zip(
            report["samples_per_s"]["dlio"]["all"],
            report["samples_per_s"]["torch"]["all"],
            strict=True,
        )
    ]
    assert report["dlio_over_torch"]["median"] == pytest.approx(sum(ratios))
    assert report["machine"]["versions"]["torch"]
    assert report["output"]["dlio"] == "uint8 CHW"
    assert report["absent"] == {}
    assert set(report["cpu_ms_per_sample"]) == set(report["samples_per_s"])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "workers", "output"),
    [
        ("dlio", 2, "uint8 CHW"),
        ("dlio_rows", 2, "uint8 CHW"),
        ("full_decode", 2, None),
        ("torch", 0, "uint8 CHW"),
        ("torch_floats", 0, "float32 CHW"),
    ],
)
def test_a_contender_passes_over_all_pictures(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    workers: int,
    output: str | None,
) -> None:
    files = sorted(map(str, pictures.glob("*/*")))
    labels = [number // 4 for number in range(12)]
    # A contender ends with its process; here, its tier would be that of the tests that follow.
    with ExitStack() as opened:
        open_ = dlio.open
        monkeypatch.setattr(
            dlio, "open", lambda *args, **options: opened.enter_context(open_(*args, **options))
        )
        run = MAKERS[name](Task(files, labels, 32, 5, workers, str(tmp_path)))
        figures = protocol._timed(run, 32, 1)
    assert figures["labels"] == [protocol.checksum(labels)]
    assert figures["output"] == output


def test_large_arrays_are_measured_beside_bare_reads(tmp_path: Path) -> None:
    report: dict[str, Any] = arrays(str(tmp_path), 1, 2, volumes=8)
    for name in ("raw_ram", "raw_disk", "lz4_ram", "lz4_disk"):
        assert report[name]["dlio_over_preadv"]["median"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_latent_map_style_data_set_is_asked_once_for_each_sample_behind_tiers() -> None:
    report: dict[str, Any] = mapstyle(
        repeats=2, workers=2, batch_size=8, samples=100, latency_s=0.002
    )
    for shapes in ("fixed", "varying"):
        part = report[shapes]
        assert part["with"]["calls_per_sample"] == {"epoch_1": [1, 1], "both": [1, 1]}
        assert part["without"]["calls_per_sample"] == {"epoch_1": [1, 1], "both": [2, 2]}
        assert part["without"]["in_flight_most"] <= 2
        assert part["with"]["in_flight_most"] <= 64
        for key in ("first_batch_s", "epoch_1_s", "epoch_2_s"):
            assert part[f"{key}_with_over_without"]["median"] > 0
    assert len(shown(report)) == 4


def test_every_transform_is_timed_next_to_pillow() -> None:
    report: dict[str, Any] = augment(repeats=1, image_size=32, pictures=40)
    timed = [each for each in report.values() if isinstance(each, dict) and "us" in each]
    assert len(timed) == 10
    assert sum("pillow_us" in each for each in timed) == 9
    assert report["ColorJitter"]["pillow_over_dlio"]["median"] > 0


def test_a_case_that_reads_pictures_asks_for_their_folder() -> None:
    with pytest.raises(UsageError, match="--case slow: name SRC"):
        command(LoaderCase(), LoaderChoice(case=("mapstyle", "slow")), OutputOptions(report=None))


def test_packed_data_is_refused_with_a_reason(pictures: Path, tmp_path: Path) -> None:
    pack(str(pictures), str(tmp_path / "packed"))
    with pytest.raises(UsageError, match="is packed"):
        measure(LoaderCase(str(tmp_path / "packed")))
