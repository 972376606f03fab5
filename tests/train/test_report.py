"""Reports of a run: the names in JSON, and sentences that match the figures."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from dlio.train.config import train_config
from dlio.train.report import EpochReport, RankEpoch, RunReport

DATA_BYTES = 1000


def _rank(**changed: Any) -> RankEpoch:
    measured: dict[str, Any] = {
        "sums": [20.0, 4.0, 10.0],
        "seconds": 2.0,
        "exchange_wait_s": 0.2,
        "exchange_bytes": 64.0,
        "step_ms": [10.0, 20.0],
        "left_out": 0,
        "share": 5,
        "computed_per_s": 8.0,
    }
    loader: dict[str, Any] = {
        "stall_s": 0.5,
        "first_batch_s": 0.1,
        "bytes": {"source": 500, "peer": 0, "ram": 500, "disk": 0},
        "sent": 0,
        "messages": 1,
        "late": 0,
        "healed": 0,
        "tier_errors": 0,
        "decoded": 0,
        "decode_saved_s": 0.0,
        "skipped": [],
        "notes": [],
    }
    for name, value in changed.items():
        (loader if name in loader else measured)[name] = value
    measured["loader"] = loader
    return cast(RankEpoch, measured)


def _epoch(**changed: Any) -> EpochReport:
    return replace(EpochReport.of_ranks(0, [_rank(), _rank()], 0.5, 0.0, 0.1), **changed)


def _run(*epochs: EpochReport, nodes: int = 1, **config: Any) -> RunReport:
    return RunReport(
        dataset={"samples": 20, "bytes": DATA_BYTES},
        ranks=2,
        nodes=nodes,
        tiers=["ram:1MiB"],
        config=train_config("pictures", **config),
        epochs=list(epochs),
    )


def test_ranks_are_weighted_by_their_samples() -> None:
    busy = _rank(sums=[30.0, 12.0, 30.0], seconds=4.0, stall_s=1.0, skipped=["b.jpg"], notes=["n"])
    idle = _rank(sums=[0.0, 0.0, 0.0], first_batch_s=None, skipped=["a.jpg"], notes=["n"])
    epoch = EpochReport.of_ranks(2, [busy, _rank(), idle], None, 0.25, 0.1)
    assert epoch.epoch == 2
    assert (epoch.samples, epoch.seconds, epoch.samples_per_s) == (40, 4.0, 10.0)
    assert epoch.loss == 50 / 40
    assert epoch.accuracy == 16 / 40
    assert epoch.val_accuracy is None
    assert epoch.stall_fraction == pytest.approx(0.25)
    assert epoch.bytes == {"source": 1500, "peer": 0, "ram": 1500, "disk": 0}
    assert epoch.skipped == ["a.jpg", "b.jpg"]
    assert epoch.notes == ["n"]


def test_a_rank_that_has_joined_behind_the_last_batch_has_made_no_pass() -> None:
    joined = _rank(sums=[0.0, 0.0, 0.0], first_batch_s=None)
    joined["loader"] = cast(Any, {"stall_s": 0.0, "first_batch_s": None})
    epoch = EpochReport.of_ranks(0, [_rank(), joined], None, 0.0, 0.1)
    alone = EpochReport.of_ranks(0, [_rank()], None, 0.0, 0.1)
    assert (epoch.bytes, epoch.samples) == (alone.bytes, alone.samples)


def test_samples_that_were_computed_again_after_a_loss_count_once() -> None:
    counted = EpochReport.of_ranks(0, [_rank(), _rank()], None, 0.0, 0.1).samples
    for known in (counted - 3, counted, counted + 3):
        ranks = [_rank(), _rank()]
        assert EpochReport.of_ranks(0, ranks, None, 0.0, 0.1, samples=known).samples == known


def test_an_epoch_whose_samples_were_all_skipped_has_no_loss() -> None:
    nothing = _rank(sums=[0.0, 0.0, 0.0], first_batch_s=None)
    epoch = EpochReport.of_ranks(0, [nothing], None, 0.0, 0.1)
    assert epoch.loss is None
    assert epoch.accuracy is None
    json.loads(_run(epoch).to_json())
    assert _run(epoch).sentences()


def test_json_has_the_documented_names() -> None:
    written = json.loads(_run(_epoch()).to_json())
    assert {"dataset", "ranks", "nodes", "epochs", "config", "versions", "machine"} <= set(written)
    assert written["dataset"] == {"samples": 20, "bytes": DATA_BYTES}
    (epoch,) = written["epochs"]
    assert {
        *("seconds", "samples", "samples_per_s", "stall_fraction"),
        *("loss", "accuracy", "val_accuracy", "bytes"),
    } <= set(epoch)
    assert set(epoch["bytes"]) == {"source", "peer", "ram", "disk"}


def test_sentences_report_if_the_tiers_hold_the_whole_data_set() -> None:
    none = {"source": 0, "peer": 0, "ram": DATA_BYTES, "disk": 0}
    half = {"source": 500, "peer": 0, "ram": 500, "disk": 0}
    held = " ".join(_run(_epoch(), _epoch(bytes=none)).sentences())
    assert "1.00 times in epoch 1 and not at all afterwards" in held
    before = " ".join(_run(_epoch(bytes=none, epoch=4), _epoch(bytes=none)).sentences())
    assert before.startswith("The source was not read in epoch 5 or afterwards: the tiers hold it")
    assert "A tier still held blocks of another run" in before
    assert "another run" not in held
    too_large = " ".join(_run(_epoch(), _epoch(bytes=half), _epoch(bytes=half)).sentences())
    assert "0.50 times in each later one: the tiers cannot hold it all" in too_large
    resumed = _run(_epoch(), _epoch(bytes=none), _epoch())
    resumed.resumed = "ckpt/step-00000002"
    said = " ".join(resumed.sentences())
    assert "0.50 times in each later one: tiers are empty at --resume" in said


def test_sentences_name_skipped_samples_and_repairs() -> None:
    said = " ".join(_run(_epoch(skipped=["a/1.jpg"], healed=2)).sentences())
    assert "Skipped 1 sample: a/1.jpg" in said
    assert "replaced from the source: 2" in said


@pytest.mark.needs("skipping")
def test_sentences_report_the_share_of_samples_skipped_as_learnt() -> None:
    ranks = [_rank(skip_share=0.4), _rank(skip_share=0.4)]
    skipping = EpochReport.of_ranks(1, ranks, 0.5, 0.0, 0.1)
    assert skipping.skip_share == 0.4
    said = " ".join(_run(_epoch(), skipping).sentences())
    assert "20% of the samples were skipped" in said
    assert "up to 40% of an epoch" in said
    assert "had stayed low" not in " ".join(_run(_epoch()).sentences())


def test_sentences_compare_the_bytes_between_nodes() -> None:
    moved = {"source": 0, "peer": 70, "ram": 930, "disk": 0}
    said = " ".join(_run(_epoch(bytes=moved), nodes=2).sentences())
    assert "7.0% of the bytes moved" in said
    assert "moves 50%" in said
    everywhere = " ".join(_run(_epoch(bytes=moved), nodes=2, shuffle="global").sentences())
    assert "ignores" not in everywhere


@pytest.mark.parametrize("columns", ["40", "80"])
def test_printing_shows_every_epoch_and_whole_figures(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _run(_epoch(loss=1.2345), _epoch(epoch=1, samples_per_s=1234.5)).print()
    printed = capsys.readouterr().out
    for figure in ("1.234", "1,234", "50.0%", "25.0%", "samples/s"):
        assert figure in printed, printed
