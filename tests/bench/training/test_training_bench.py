"""`dlio bench train` measures steps on ranks, and forecasts others from those of one and two."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.plan.exchange_cost import LinkCost
from dlio_bench.checkpoint_cases.methods import measure_stalls
from dlio_bench.results.report_values import Results
from dlio_bench.training import scaling_measurements, script_case
from dlio_bench.training.bench_networks import NETWORKS, make_batch, make_network
from dlio_bench.training.checkpoint_case import InterruptibleTraining, report
from dlio_bench.training.ettr import ettr_figures, storm_options
from dlio_bench.training.forecast_check import cells
from dlio_bench.training.scaling_case import curves, figures
from dlio_bench.training.scaling_measurements import (
    ScalingMeasurements,
    StepConditions,
    Times,
    batch_of,
)
from dlio_bench.training.training_options import NETWORK_NAMES, TrainingBenchOptions
from dlio_bench.training.training_rank import BenchLoop


def test_options_name_every_network() -> None:
    assert tuple(NETWORKS) == NETWORK_NAMES


@pytest.mark.parametrize(
    "wrong",
    [
        {"networks": "lenet,lenot"},
        {"exchanges": "allredoce"},
        {"ranks": "2,4"},
        {"ranks": "1,2,x"},
        {"forecast": "8..many"},
        {"forecast": "1,8"},
        {"networks": ""},
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).removesuffix("s")):
        TrainingBenchOptions(**wrong)


def test_counts_are_ranges_lists_or_none() -> None:
    assert TrainingBenchOptions(forecast="8..100").forecast_counts == (8, 16, 32, 64)
    assert TrainingBenchOptions(forecast="12, 8").forecast_counts == (8, 12)
    assert TrainingBenchOptions(forecast="none").forecast_counts == ()
    assert TrainingBenchOptions(ranks="4,2,1").rank_counts == (1, 2, 4)


def test_strong_scaling_divides_the_batch_and_ends_where_samples_end() -> None:
    options = TrainingBenchOptions(batch_size=8)
    assert [batch_of(options, "vit", p, "weak") for p in (1, 2, 1024)] == [8, 8, 8]
    assert [batch_of(options, "vit", p, "strong") for p in (1, 2, 8, 16)] == [8, 4, 1, None]


def measured(
    options: TrainingBenchOptions, step_s: dict[tuple[int, str], float]
) -> ScalingMeasurements:
    times = {
        StepConditions("vit", p, 8, exchange): Times(
            [seconds], [seconds - step_s[p, "none"]], [seconds], [{"exchange": 0.0}]
        )
        for (p, exchange), seconds in step_s.items()
    }
    links = {"memory": LinkCost(0.0, 1e-9), "tcp": LinkCost(1e-5, 1e-8)}
    return ScalingMeasurements(times, links, {"vit": (1_000_000, 1)})


def test_forecasts_are_marked_and_know_nothing_of_four_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlio_bench.training.forecast_check.available_cores", lambda: 2)
    options = TrainingBenchOptions(
        networks="vit", exchanges="allreduce", batch_size=8, scaling="weak", forecast="8"
    )
    steps = {(1, "none"): 1.0, (2, "none"): 1.0, (2, "allreduce"): 1.001}
    forecasts = []
    for of_four in (2.0, 7.0):
        given = measured(options, {**steps, (4, "none"): of_four, (4, "allreduce"): of_four})
        result = list(cells(options, given))
        forecasts.append([each.forecast_s for each in result])
        assert [each.ranks for each in result if each.is_forecast] == [8, 8]
        assert {each.forecast for each in figures(result)} == {True, False}
        assert {(each.forecast, each.x) for each in curves(result)} == {
            (False, (1.0, 2.0, 4.0)),
            (True, (8.0,)),
        }
    assert forecasts[0] == forecasts[1]
    (four,) = [each for each in result if (each.ranks, each.exchange) == (4, "allreduce")]
    # Two ranks a core: twice the computing, and 3 times the bytes through each core.
    assert four.forecast_s == pytest.approx(2.003)
    assert four.error == pytest.approx(2.003 / 7 - 1)
    assert four.efficiency == pytest.approx(4 * 8 / 7 / (2 * 8))


def test_ettr_is_of_the_storms_of_chaos() -> None:
    storm = storm_options(TrainingBenchOptions(kills=3, every=2.5))
    assert (storm.ranks, storm.kills, storm.every, storm.restart) == (4, 3, 2.5, True)
    (figure,) = ettr_figures({"shrink": {"ettr": 0.9}, "restart": {"ettr": None}})
    assert figure.values == pytest.approx((90.0,))
    assert figure.labels == {"way": "shrink"}


@pytest.mark.mpi
def test_two_ranks_are_measured_and_more_are_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.cli import main

    monkeypatch.setattr(scaling_measurements, "_SIZES", scaling_measurements._SIZES[:4])
    path = tmp_path / "report.json"
    arguments = "--networks lenet --exchanges gossip --ranks 1,2 --forecast 4,8"
    more = "--scaling weak --batch-size 2 --repeats 1 --steps 2 --report"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train", *arguments.split(), *more.split(), str(path)])
    assert not ended.value.code
    report = json.loads(path.read_text())
    assert report["schema"] == "dlio-bench/1"
    by_ranks = {
        each["labels"]["ranks"]: each["forecast"]
        for each in report["figures"]
        if each["name"] == "step"
    }
    assert by_ranks == {"1": False, "2": False, "4": True, "8": True}
    assert report["parameters"] == {"lenet": 61_706}
    for each in report["waterfalls"]:
        assert list(each["parts"]) == [
            "load wait",
            "forward and backward",
            "exchange",
            "optimizer",
        ]
        exchanges = each["labels"]["exchange"] == "gossip"
        assert (each["parts"]["exchange"] > 1e-5) or not exchanges


@pytest.mark.mpi
def test_the_case_script_has_pairs_of_blocks_watched_and_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio.cli import main

    monkeypatch.setattr(script_case, "_PAIRS", 2)
    path = tmp_path / "report.json"
    arguments = "--case script --networks lenet --batch-size 4 --repeats 2 --steps 2 --report"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "train", *arguments.split(), str(path)])
    assert not ended.value.code
    report = json.loads(path.read_text())
    watched = {each["labels"]["script"]: len(each["values"]) for each in report["figures"]}
    assert watched == {"watched": 4, "not watched": 4}
    assert [len(each["values"]) for each in report["ratios"]] == [4]


def test_checkpoints_are_kept_in_a_folder_that_exists(tmp_path: Path) -> None:
    assert TrainingBenchOptions(checkpoints=str(tmp_path)).checkpoints == str(tmp_path)
    with pytest.raises(UsageError, match="no-such"):
        TrainingBenchOptions(checkpoints=str(tmp_path / "no-such"))


def test_stalls_of_checkpoints_are_those_of_the_network_that_trains(tmp_path: Path) -> None:
    batch = make_batch("lenet", 4, NETWORKS["lenet"].side, seed=0)
    training = InterruptibleTraining(
        BenchLoop(make_network("lenet", 28, 0), lambda: iter([batch] * 5)), None
    )
    training.step()
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    assert training.step(lambda: time.sleep(0.02)) >= 0.02
    after = training.tensors()
    assert before.keys() == after.keys()
    assert all(name.startswith(("model/", "momentum/")) for name in after)
    assert all(not torch.equal(before[name], after[name]) for name in after if "bias" in name)
    comm = SingleCommunicator()
    stalls = measure_stalls(str(tmp_path), ("dlio", "dcp save"), training, 2, 1, comm)
    assert {each.method for each in stalls} == {"dlio", "dcp save"}
    assert all(each.blocked_s > 0 and each.step_s > 0 for each in stalls)
    assert not list(tmp_path.iterdir())
    results = Results("train", settings={})
    report({"network": "lenet"}, stalls, 1 << 20, results)
    names = {each.name for each in results.figures}
    assert names >= {"blocked", "blocked, of 50 steps", "slower"}
    assert [each.labels["network"] for each in results.ratios] == ["lenet"]
    shares = [each for each in results.figures if each.name == "blocked, of 50 steps"]
    for stall in stalls:
        (value,) = (each.values for each in shares if each.labels["method"] == stall.method)
        assert value == pytest.approx((2 * stall.blocked_s / stall.step_s,))
