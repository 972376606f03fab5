"""The benchmark runs, counts every sample, and reports the requested figures."""

import contextlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dlio
from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.image.native import pool_library
from dlio.image.native.build import compiler
from dlio_bench import loader_cores, loader_rows, loader_small
from dlio_bench.bench_data import draw_small_pictures
from dlio_bench.bench_processes import cores_for
from dlio_bench.loader_bench import LoaderCase, LoaderChoice, command, measure
from dlio_bench.loader_cases import arrays, augment, mapstyle, shown
from dlio_bench.loader_cores import PrototypePool, cores, show_cores
from dlio_bench.loader_rows import SHAPES, rows, show_rows
from dlio_bench.loader_small import show_small, small
from dlio_bench.peers import row_contenders
from dlio_bench.peers.dlio_contenders import MAKERS
from dlio_bench.peers.standalone.runners import protocol
from dlio_bench.peers.standalone.runners.protocol import Task, weight
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


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("title", ["rows of 64 bytes", "windows of 1,024 tokens"])
@pytest.mark.parametrize("name", row_contenders.MAKERS)
def test_a_contender_passes_over_all_rows_and_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, title: str
) -> None:
    shape = SHAPES[title]
    array, labels = loader_rows._drawn(shape, 12)
    files = loader_rows._written(str(tmp_path), shape, array, labels)
    with ExitStack() as opened:
        open_ = dlio.open
        monkeypatch.setattr(
            dlio, "open", lambda *args, **options: opened.enter_context(open_(*args, **options))
        )
        workers = 2 if name in ("dlio", "file", "packed") else 0
        run = row_contenders.MAKERS[name](Task(files, labels, 0, 5, workers, str(tmp_path)))
        figures: dict[str, Any] = protocol._timed(run, 0, 2)
    passes = len(figures["labels"])
    assert figures["samples"] == 12 * (passes - 1) > 0
    assert figures["labels"] == [protocol.checksum(labels)] * passes
    assert figures["values"] == [weight(array, labels)]


@pytest.mark.cold
@pytest.mark.nightly  # Each contender imports torch anew, in 2 s.
def test_rows_are_raced_and_those_not_installed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path))
    chosen = ("dlio_2", "packed_2", "torch_getitems_0", "numpy_checked", "grain_rows_0")
    shapes = {"rows of 64 bytes": SHAPES["rows of 64 bytes"]}
    report: dict[str, Any] = rows(1, 5, 3, 20, 600, shapes, chosen)
    figures = report["rows of 64 bytes"]
    assert list(figures["samples_per_s"]) == list(chosen[:-1])
    assert figures["absent"] == {"grain_rows_0": "not installed: dlio bench peers install grain"}
    for other in ("torch_getitems_0 (torch's best)", "numpy_checked"):
        assert figures[f"dlio_2_over_{other}"]["median"] > 0
    show_rows(report)
    assert "limit: NumPy's gather, xxh3 of each row" in capsys.readouterr().out


@pytest.mark.cold
@pytest.mark.nightly  # Each contender imports torch anew, in 2 s.
def test_small_pictures_are_raced_alone_and_beside_spinning_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report: dict[str, Any] = small(1, 5, 3, 400, 600, beside=1, peers=(), look_s=0.2)
    for place in ("alone", "loaded"):
        assert list(report[place]["samples_per_s"]) == [
            "dlio_1",
            "dlio_2",
            "dlio_3",
            "dlio_floats",
        ]
        assert report[place]["dlio_2_over_dlio_1"]["median"] > 0
    for share in report["shares"].values():
        assert share["cores"] > 0
        assert share["kept_share"] > 0
    show_small(report)
    assert "share kept" in capsys.readouterr().out


def test_the_share_kept_is_of_the_cores_that_spinning_threads_get() -> None:
    def figures(rate: float, cpu_ms: float) -> dict[str, Any]:
        return {
            "samples_per_s": {"dlio_2": {"median": rate}},
            "cpu_ms_per_sample": {"dlio_2": {"median": cpu_ms}},
        }

    alone, loaded = figures(20_000, 0.1), figures(1_000, 0.2)
    shares = loader_small._shares(alone, loaded, {"dlio_2": 0.5})
    assert shares == {
        "dlio_2": {
            "cores": 0.5,
            "own_cores": pytest.approx(0.2),
            "cpu_samples_per_s": pytest.approx(10_000),
            "cpu_samples_per_s_loaded": pytest.approx(5_000),
            "kept_share": pytest.approx(0.2),
        }
    }
    assert loader_small._shares(alone, figures(1_000, 0.0), {"dlio_2": 0.5}) == {}


def test_a_spinning_process_of_one_thread_gets_a_core_at_most() -> None:
    assert 0 < cores_for(1, 0.1) < 1.1


def test_small_pictures_are_drawn_into_their_classes(tmp_path: Path) -> None:
    with dlio.open(draw_small_pictures(str(tmp_path), 12, 64, 3), tiers="none") as data:
        assert len(data) == 12
        assert data.classes == ["0", "1", "2"]


@pytest.mark.parametrize("is_built", [True, False] if pool_library.find() else [False])
def test_cores_are_emulated_by_threads_that_sleep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_built: bool
) -> None:
    monkeypatch.setattr(loader_cores, "_PICTURES", 40)
    if not is_built:
        monkeypatch.setattr(loader_cores, "compiler", lambda: None)
        monkeypatch.setattr(pool_library, "find", lambda: None)
    report: dict[str, Any] = cores(1, 4, 2, decode_ms=0.5, seconds=0.05)
    assert report["ideal"] == pytest.approx(4_000)
    names = ["python", "prototype", "native"] if is_built else ["python"]
    for name in names:
        # A sleep is never shorter, but a measurement begins with batches that were ready.
        assert report[name]["ideal_share"]["median"] > 0
        assert report[name]["python_us"]["median"] > 0
        assert report[name]["operations_per_s"]["median"] > 0
    assert list(report["absent"]) == ([] if is_built else ["prototype", "native"])
    show_cores(report)
    said = capsys.readouterr().out
    assert ("left out: dlio.DataLoader, native" in said) is not is_built
    assert ("no C compiler was found" in said) is not is_built


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_a_pool_sleeps_for_every_sample_of_its_batches() -> None:
    with contextlib.closing(PrototypePool(2)) as pool:
        began = time.perf_counter()
        handles = [pool.submit(5, 2_000_000) for _ in range(2)]
        for handle in handles:
            pool.wait(handle)
        assert time.perf_counter() - began >= 10 * 0.002 / 2
