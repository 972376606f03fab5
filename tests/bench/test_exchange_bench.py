"""`dlio bench exchange` gives plausible figures on little data."""

import json
import os
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio_bench import bench_ranks
from dlio_bench.exchange_cases import (
    accuracy_case,
    balance_case,
    message_cost,
    overlap_case,
    placement_case,
    slow_rank_case,
    step_case,
)
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.message_cost import draw
from dlio_bench.results.terminal import show
from dlio_bench.trainings import TrainedEpoch
from dlio_bench.warm_ranks import warm_ranks

TINY = ExchangeBenchOptions(
    repeats=1, network="perceptron", batch_size=2, fabrics=("memory",), counts=(2, 4)
)


@pytest.mark.mpi
@pytest.mark.parametrize("counts", [(4,), pytest.param((2, 4), marks=pytest.mark.nightly)], ids=str)
def test_messages_are_counted_as_theory_has_them(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    counts: tuple[int, ...],
) -> None:
    # Times of messages up to 128 KiB: those of a link are given below.
    monkeypatch.setattr(message_cost, "_SIZES", message_cost._SIZES[:8])
    picture = tmp_path / "model.svg"
    exchanges = ("allreduce", "tree", "parameter-server", "gossip", "asgd")
    options = replace(TINY, exchanges=exchanges, counts=counts, plot=str(picture))
    options = replace(options, alpha_us=2.0, bandwidth_gbs=10)
    results: dict[str, Any] = message_cost.measure(options)
    for row in results["rows"]:
        if row["exchange"] == "asgd":
            assert row["messages_counted"] <= row["messages_in_theory"]
        elif "messages_counted" in row:
            # A weight travels with each bucket.
            assert row["bytes_counted"] == pytest.approx(row["bytes_in_theory"], rel=1e-4)
            assert row["most_bytes"] == pytest.approx(row["most_bytes_in_theory"], rel=1e-4)
            if row["exchange"] != "allreduce":
                assert row["messages_counted"] == row["messages_told"]
                assert row["messages_counted"] == row["messages_in_theory"]
    assert len(results["rows"]) == len(counts) * len(exchanges)
    carried = {row["exchange"]: row for row in results["carried"]}
    assert carried["gossip"]["16"] == carried["gossip"]["4,096"]
    assert carried["parameter-server"]["4,096"] > 200 * carried["parameter-server"]["16"]
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    show("messages", results)
    assert "parameter-server" in capsys.readouterr().out


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.needs("balance")
def test_compressed_sums_of_many_ranks_send_few_messages_with_about_the_least_bytes() -> None:
    with warm_ranks([message_cost.__name__]) as warm:
        for p in (16, 32):
            for row in message_cost._counted(p, ("allreduce+int8", "allreduce+bf16"), warm):
                # The library counts the messages of a collective. The perceptron has 4 buckets.
                assert row.get("most_messages", 0) <= 4 * 4 * p**0.5
                ratio = 4 if row["exchange"].endswith("int8") else 2
                least = 2 * (p - 1) / p / ratio
                assert least <= row.get("bytes_counted", row["bytes_told"]) <= 1.5 * least


def _own_process(comm: Communicator) -> dict[str, object]:
    """A task: the processes of the ranks, those that started them, and their networks."""
    network = os.stat("/proc/self/ns/net").st_ino
    return {"ranks": comm.allgather([os.getpid(), os.getppid(), network])}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "fabric", ["memory", pytest.param(bench_ranks.LINK, marks=pytest.mark.nightly)]
)
def test_warm_ranks_are_forks_of_one_process_in_the_network_of_their_fabric(fabric: str) -> None:
    if fabric == bench_ranks.LINK and (why := bench_ranks.why_no_link()):
        pytest.skip(why)
    with warm_ranks([__name__], fabric) as warm:
        runs = [bench_ranks.run(_own_process, {}, 2, fabric, warm=warm)["ranks"] for _ in "ab"]
    ranks = [rank for each in runs for rank in each]
    assert len({process for process, _, _ in ranks}) == 4
    assert len({parent for _, parent, _ in ranks}) == 1
    here = os.stat("/proc/self/ns/net").st_ino
    assert {network == here for _, _, network in ranks} == {fabric == "memory"}


def test_a_slowed_rank_gets_less_and_the_ideal_is_told() -> None:
    results: dict[str, Any] = balance_case.measure(replace(TINY, images=192))
    for row in results["rows"]:
        *fast, slow = map(int, row["shares"].split())
        assert sum(fast) + slow == 32 * row["ranks"]
        assert min(fast) > slow
        # 4 and 12 ms a sample: 250 samples a second, and 83.
        assert row["ideal_s"]["min"] >= 192 / (250 * len(fast) + 250 / 3)
        assert row["even_over_ideal"]["median"] > 1


@pytest.mark.mpi
def test_overlap_is_of_steps_with_and_without() -> None:
    results: dict[str, Any] = overlap_case.measure(replace(TINY, exchanges=("allreduce", "gossip")))
    for row in results["rows"]:
        assert row["step_without_s"]["median"] > 0
        assert row["with_s"]["median"] > 0
        assert "hidden_percent" in row
    assert results["overhead_of_one_rank_percent"]["median"] > -100


@pytest.mark.mpi
@pytest.mark.nightly
def test_steps_stand_beside_those_of_ddp() -> None:
    options = replace(TINY, exchanges=("allreduce", "allreduce+onebit", "allreduce+threshold"))
    results: dict[str, Any] = step_case.measure(options)
    rows = results["rows"]
    less = {
        row["exchange"]: row["float32_over_sent"] for row in rows if row["network"] == "perceptron"
    }
    assert less["none"] is None
    assert less["allreduce"] == pytest.approx(1, rel=1e-4)
    assert less["DDP, fp16 hook"] == pytest.approx(2)
    assert less["DDP, PowerSGD of rank 4"] > 4
    assert less["allreduce+onebit"] > 25
    assert less["allreduce+threshold"] > 60


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_slow_rank_is_told_beside_none() -> None:
    results: dict[str, Any] = slow_rank_case.measure(replace(TINY, seconds=0.3))
    assert [row["exchange"] for row in results["rows"]] == [
        "allreduce",
        "gossip",
        "local-sgd",
        "asgd",
    ]
    assert all(row["kept_percent"]["median"] > 0 for row in results["rows"])


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_training_goes_on_where_it_was_interrupted(pictures: Path, tmp_path: Path) -> None:
    options = ExchangeBenchOptions(
        source=str(pictures),
        val=str(pictures.parent / "val"),
        exchanges=("allreduce", "gossip+bf16"),
        seeds=1,
        epochs=1,
        keep=str(tmp_path / "kept"),
    )
    results: dict[str, Any] = accuracy_case.measure(options)
    kept = sorted((tmp_path / "kept").iterdir())
    assert [path.name for path in kept] == ["allreduce-0.json", "gossip+bf16-0.json"]
    exact, gossip = results["rows"]
    assert exact["sent_MB"] > 1.9 * gossip["sent_MB"] > 0
    written = [path.stat().st_mtime_ns for path in kept]
    assert accuracy_case.measure(options) == results
    assert [path.stat().st_mtime_ns for path in kept] == written
    with pytest.raises(UsageError, match="another training"):
        accuracy_case.measure(replace(options, epochs=2))


@pytest.mark.needs("balance")
def test_options_of_a_training_are_as_its_report_has_them() -> None:
    options = ExchangeBenchOptions(
        settings=("image-size=32", "balance=true", "lr=0.1", "model=lenet"), pace=2
    )
    factory = "dlio_bench.exchange_cases.paced_network:paced_network"
    model = f"{factory}(model='lenet', sample_ms=2, slow=1.0)"
    assert options.train_options() == {
        "image_size": 32,
        "balance": True,
        "lr": 0.1,
        "model": model,
    }


def test_time_to_an_accuracy_lies_between_epochs() -> None:
    epochs: list[TrainedEpoch] = [
        {"val_accuracy": 0.2, "seconds": 10.0},
        {"val_accuracy": 0.4, "seconds": 8.0},
    ]
    assert accuracy_case.seconds_to(0.1, epochs) == 5.0
    assert accuracy_case.seconds_to(0.3, epochs) == 14.0
    assert accuracy_case.seconds_to(0.5, epochs) is None


def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "model.png"
    draw({"gossip": [1.0, 1.0], "tree": [1.0, 2.0]}, (2, 4), "a link", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.mpi
@pytest.mark.nightly
def test_groups_are_alike_in_all_placements_and_ranks_own_batches_are_not(
    pictures: Path, tmp_path: Path
) -> None:
    options = ExchangeBenchOptions(
        source=str(pictures),
        val=str(pictures.parent / "val"),
        batch_norms=("ghost(16)", "average"),
        seeds=1,
        epochs=5,
        keep=str(tmp_path / "kept"),
    )
    results: dict[str, Any] = placement_case.measure(options)
    for row in results["rows"]:
        first = row["placement"] == placement_case.PLACEMENTS[0].name
        dealt_by_place = row["placement"] != placement_case.PLACEMENTS[-1].name
        if row["batch_norm"] == "ghost(16)" and dealt_by_place:
            assert (row["final_weights"], row["distance_after_5"]) == ("A", 0)
        elif row["batch_norm"] == "average":
            assert (row["distance_after_1"] == 0) == first
    assert len(results["rows"]) == 2 * len(placement_case.PLACEMENTS)


@pytest.mark.mpi
@pytest.mark.nightly
@pytest.mark.needs("balance")
def test_the_slow_ranks_share_is_told_for_each_exchange() -> None:
    options = replace(TINY, images=192, seeds=1, exchanges=("tree", "local-sgd(8)"))
    results: dict[str, Any] = balance_case.measure_unequal(options)
    assert [row["exchange"] for row in results["rows"]] == ["tree", "local-sgd(8)"]
    for row in results["rows"]:
        *fast, slow = map(int, row["shares"].split())
        assert sum(fast) + slow == 32 * (len(fast) + 1)
        assert min(fast) > slow
        assert row["balanced_over_ideal"]["median"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--case", "placement"], "--val"),
        (["--batch-norm", "ghosts"], "choose average"),
        (["--case", "telepathy"], "choose one of messages"),
        (["--case", "training"], "--val"),
        (["--exchange", "telepathy"], "choose one of allreduce"),
        (["--fabric", "string"], "choose one of memory, tcp, link"),
        (["--plot", "model.gif"], "ends in .png or .svg"),
        (["--alpha-us", "0"], "above 0"),
        (["--set", "image-size"], "give OPTION=VALUE"),
        (["--slow", "4"], "--pace"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exchange", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_command_tells_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    argv = ["--case", "slow-rank", "--exchange", "asgd", "--repeats", "1", "--report", str(report)]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exchange", *argv])
    assert ended.value.code in (0, None)
    assert "asgd" in capsys.readouterr().out
    written = json.loads(report.read_text())
    assert written["slow-rank"]["rows"][0]["exchange"] == "asgd"
    assert written["machine"]["versions"]["torch"]
