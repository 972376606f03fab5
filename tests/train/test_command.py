"""`dlio train`, as users run it."""

import errno
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlio.cli.train_command import find_parts
from dlio.comm.single import SingleCommunicator
from dlio.errors import SourceError, UsageError
from dlio.image.crop import Crop
from dlio.loader.dataset import open_dataset
from dlio.train.config import TrainConfig, train_config
from dlio.train.model import make_model
from dlio.train.rank_layout import RankLayout
from dlio.train.training_data import RunData
from dlio.util.options import options_of

MpiRun = Callable[..., subprocess.CompletedProcess[str]]
SAMPLES, CLASSES = 101, 4


def _consumed(trace: Path, epoch: int) -> Counter[int]:
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return Counter(s for row in rows if row["epoch"] == epoch for s in row["samples"])


@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
@pytest.mark.daily("gossip")
def test_two_ranks_train_on_every_sample_once(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    tmp_path: Path,
    exchange: str,
) -> None:
    files = ("--report", "r.json", "--trace", "t.jsonl", "--save", "w.pt")
    # The last global batch has one sample, so one rank has none.
    shape = ("--epochs", "2", "--batch-size", "10", "--image-size", "32", "--pretend-nodes", "2")
    tiers = ("--tiers", f"{tmp_path}:100MiB")
    done = dlio("train", str(pictures), "-n", "2", "--exchange", exchange, *files, *shape, *tiers)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "Held-out accuracy is" in done.stdout

    report = json.loads((tmp_path / "r.json").read_text())
    stored = sum(file.stat().st_size for file in (pictures / "train").rglob("*.jpg"))
    assert report["dataset"]["samples"] == SAMPLES
    assert (report["ranks"], report["nodes"]) == (2, 2)
    first, second = report["epochs"]
    for epoch in (first, second):
        assert epoch["samples"] == SAMPLES
        assert 0 <= epoch["val_accuracy"] <= 1
        assert 0 <= epoch["stall_fraction"] <= 1
        assert epoch["skipped"] == []
        # After each step, two ranks that gossip have their mean weights, up to rounding.
        assert epoch["consensus_distance"] < 1e-6
    assert 0.98 * stored < first["bytes"]["source"] <= 1.02 * report["dataset"]["bytes"]
    assert second["bytes"]["source"] == 0
    assert sum(second["bytes"].values()) == report["dataset"]["bytes"]

    for number in (0, 1):
        assert _consumed(tmp_path / "t.jsonl", number) == Counter(range(SAMPLES))
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 6
    assert sorted(len(row["samples"]) for row in rows if row["step"] == 5) == [0, 0, 1, 1]

    state = torch.load(tmp_path / "w.pt", weights_only=True)
    make_model("resnet", CLASSES, 32).load_state_dict(state)
    assert all(tensor.isfinite().all() for tensor in state.values())
    left = {path.name for path in tmp_path.iterdir()} - {"r.json", "t.jsonl", "w.pt", "cache"}
    assert not [name for name in left if ".tmp" in name]


def test_a_truncated_picture_ends_the_run_or_is_skipped(
    dlio: Callable[..., subprocess.CompletedProcess[str]], pictures: Path, tmp_path: Path
) -> None:
    shutil.copytree(pictures / "train", tmp_path / "mine")
    damaged = sorted((tmp_path / "mine").rglob("*.jpg"))[7]
    damaged.write_bytes(damaged.read_bytes()[:2000])
    args = ("train", "mine", "--epochs", "1", "--image-size", "32", "--report", "r.json")
    stopped = dlio(*args)
    assert stopped.returncode == 2
    (line,) = stopped.stderr.splitlines()
    assert line.startswith("dlio: error:")
    assert damaged.name in line
    assert not (tmp_path / "r.json").exists()

    went_on = dlio(*args, "--on-error", "skip", "--trace", "t.jsonl")
    assert went_on.returncode == 0, went_on.stderr
    (epoch,) = json.loads((tmp_path / "r.json").read_text())["epochs"]
    assert epoch["samples"] == SAMPLES - 1
    assert [Path(name).name for name in epoch["skipped"]] == [damaged.name]
    assert damaged.name in went_on.stdout
    assert len(_consumed(tmp_path / "t.jsonl", 0)) == SAMPLES - 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--val", "nowhere"], "nowhere"),
        (["--pretend-nodes", "3"], "--pretend-nodes 3"),
        (["--report", "nowhere/r.json"], "does not exist"),
        (["--tiers", "ram"], "ram"),
        (["--model", "vgg"], "resnet"),
        (["--image-size", "8"], "at least 32"),
    ],
)
def test_mistakes_are_reported_before_ranks_are_started(
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    import dlio.launch.mpi_launch
    from dlio.cli import main

    def never(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(dlio.launch.mpi_launch, "launch", never)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(pictures / "train"), "-n", "2", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_with_train_and_val_names_both_parts(tmp_path: Path) -> None:
    for name in ("train", "test", "val"):
        (tmp_path / name).mkdir()
    path = str(tmp_path)
    assert find_parts(path, None) == (f"{path}/train", f"{path}/val")
    assert find_parts(path, "mine") == (f"{path}/train", "mine")
    (tmp_path / "cats").mkdir()
    # With four folders it is a data set of four classes.
    assert find_parts(path, None) == (path, None)
    assert find_parts("memory://x", None) == ("memory://x", None)


def test_a_folder_that_may_not_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=f"{tmp_path} cannot be read: Permission denied"):
        find_parts(str(tmp_path), None)


def test_ranks_get_the_record_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    config = train_config(
        source="pictures",
        val="held out",
        epochs=5,
        batch_size=7,
        image_size=96,
        crop_scale=0.5,
        exchange="gossip",
        shuffle="global",
        pretend_nodes=2,
        tiers="ram:1MiB",
        seed=2**63,
        lr=0.05,
        workers=3,
        on_error="skip",
        device="cpu",
        report="r",
        trace="t",
        trace_out="to",
        save="s",
        replica=("a", "b"),
        callback=("m:f",),
    )
    assert _handed(monkeypatch, config) == config
    assert _handed(monkeypatch, train_config("pictures")) == train_config("pictures")


def _handed(monkeypatch: pytest.MonkeyPatch, config: TrainConfig) -> TrainConfig:
    """Return the record that a rank reads when the launcher is given `config`."""
    from dlio.cli import train_command
    from dlio.launch import command_ranks, mpi_launch
    from dlio.util.live_line import LiveLine

    seen: list[TrainConfig] = []

    def start(
        argv: list[str],
        count: int,
        *,
        environment: dict[str, str],
        min_ranks: int | None,
        spares: int,
        live: LiveLine,
    ) -> subprocess.CompletedProcess[str]:
        assert not live.shown
        assert (argv[-2:], count) == (["dlio.cli.rank_main", "train_command"], 2)
        assert (min_ranks, spares) == (None, 0)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as rank:
            rank.setenv("PMI_RANK", "0")
            command_ranks.run_as_rank()
        assert not set(environment) & set(os.environ), "the script of a rank must not see it"
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(mpi_launch, "launch", start)
    monkeypatch.setattr(train_command, "train_rank", train_rank := _recorder(seen))
    assert command_ranks.on_ranks(2, train_rank, config)
    return seen[0]


def test_a_rank_without_its_launcher_does_not_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would do all of the work, and print each line again."""
    from dlio.launch import command_ranks

    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "DLIO_STORE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLIO_RECORD", command_ranks._task(_recorder([]), [], ranks=2))
    with pytest.raises(UsageError, match="2 ranks were to start, but"):
        command_ranks.run_as_rank()


def _recorder(seen: list[TrainConfig]) -> Callable[[TrainConfig], None]:
    def train_rank(config: TrainConfig) -> None:
        seen.append(config)

    train_rank.__module__, train_rank.__qualname__ = "dlio.cli.train_command", "train_rank"
    return train_rank


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"workers": 0},
        {"image_size": 31},
        {"crop_scale": 0.0},
        {"crop_scale": 1.5},
        {"seed": -1},
        {"seed": 2**64},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"keep": 3},
        {"momentum": 0.5, "optimizer": "adam"},
    ],
)
def test_a_configuration_that_cannot_work_names_its_option(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    assert name in {field.name for field in options_of(TrainConfig)}
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} "):
        train_config("pictures", **wrong)


@pytest.mark.parametrize("training", [True, False])
def test_training_crops_have_at_least_the_requested_area(pictures: Path, training: bool) -> None:
    config = train_config("x", image_size=48, crop_scale=0.5)
    sources = RunData(config, RankLayout(SingleCommunicator()))
    crop = sources.open(str(pictures / "train"), "none", training).crop
    same = Crop(48, training, (0.5, 1.0), across=48) if training else Crop(48, training)
    assert crop == same
    if training:
        usual = open_dataset(str(pictures / "train"), image_size=48, tiers="none").crop
        assert replace(crop, scale=usual.scale, across=None) == usual


def test_a_batch_of_more_than_all_samples_is_told(
    dlio: Callable[..., subprocess.CompletedProcess[str]], pictures: Path
) -> None:
    shape = ("--epochs", "1", "--image-size", "32", "--tiers", "none")
    for batch, is_too_large in (("500", True), (str(SAMPLES), False)):
        done = dlio("train", str(pictures / "train"), "--batch-size", batch, *shape)
        assert done.returncode == 0, done.stderr
        words = f"samples of all ranks in a step, and there are {SAMPLES}"
        assert (words in done.stdout) is is_too_large


def test_the_default_rate_grows_with_the_global_batch() -> None:
    config = train_config("pictures", batch_size=32)
    assert config.peak_lr(2) == pytest.approx(0.1)
    assert config.peak_lr(1) < config.peak_lr(2) < config.peak_lr(8)
    assert train_config("pictures", lr=0.3).peak_lr(8) == 0.3


def test_options_of_the_reader_are_given_to_all_that_read(
    dlio: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    numbers = np.random.default_rng(0).random((24, 2, 16), np.float32)
    np.savez(tmp_path / "a.npz", images=numbers, labels=np.arange(24) % 3)
    # A part of each sample.
    half = ("--reader-option", 'select={"images": [0]}')
    files = ("--trace", "t.jsonl", "--save", "w.pt", "--tiers", "none")
    done = dlio("train", "a.npz", *half, *files, "--epochs", "1", "--batch-size", "8")
    assert done.returncode == 0, done.stderr
    judged = dlio("eval", "a.npz", *half, "--weights", "w.pt")
    assert judged.returncode == 0, judged.stderr
    assert dlio("eval", "a.npz", "--weights", "w.pt").returncode
    assert not dlio("ledger", "t.jsonl", "a.npz", *half).returncode
    for command in (("train", "a.npz"), ("eval", "a.npz", "--weights", "w.pt")):
        refused = dlio(*command, "--reader-option", "selekt=1")
        assert "the tables reader, which reads a.npz, has no such option" in refused.stderr


def test_a_split_is_trained_on_and_another_held_out(
    dlio: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("val", 12), ("test", 9)):
        arrays[f"{split}_images"] = generator.random((count, 16), np.float32)
        arrays[f"{split}_labels"] = generator.integers(0, 3, count)
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez(tmp_path / "copy.npz", **arrays)
    files = ("--report", "r.json", "--trace", "t.jsonl", "--save", "w.pt", "--tiers", "none")
    shape = ("--epochs", "1", "--batch-size", "8")
    refused = dlio("train", "a.npz", *files, *shape)
    assert refused.returncode
    assert "--split train" in refused.stderr
    splits = ("--split", "train", "--val-split", "val")
    done = dlio("train", "a.npz", *splits, "--replica", "copy.npz", *files, *shape)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["dataset"]["samples"] == 40
    assert report["epochs"][0]["metrics"]
    assert not dlio("ledger", "t.jsonl", "a.npz", "--split", "train").returncode
    assert dlio("ledger", "t.jsonl", "a.npz", "--split", "all").returncode == 1
    judged = dlio("eval", "a.npz", "--split", "test", "--weights", "w.pt")
    assert judged.returncode == 0, judged.stderr
    assert "9 samples on 1 rank" in judged.stdout
