"""`dlio train --mesh`: ranks that share samples train as one process does."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dlio.errors import UsageError
from dlio.train.config import train_config
from tests.conftest import has_feature

Dlio = Callable[..., subprocess.CompletedProcess[str]]
SAMPLES, SHAPE = 16, (18, 8, 8)
PLAIN = ("--optimizer", "sgd", "--momentum", "0", "--lr", "0.02", "--batch-norm", "sync")


def draw(path: Path, seed: int, samples: int) -> None:
    """Write volumes with a ball in each, the ball's voxels as classes, and its size."""
    random = np.random.default_rng(seed)
    axes = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    classes = np.zeros((samples, *SHAPE), np.uint8)
    for each in classes:
        middle, radius = random.uniform((8, 3, 3), (10, 5, 5)), random.uniform(1, 4)
        each[:] = sum((a - m) ** 2 for a, m in zip(axes, middle, strict=True)) < radius**2
    noise = random.normal(0, 0.5, (samples, 1, *SHAPE))
    with h5py.File(path, "w") as file:
        file["volume"] = (classes[:, None] + noise).astype(np.float32)
        file["classes"] = classes
        file["label"] = (classes.sum((1, 2, 3)) > 60).astype(np.int64)
        file["size"] = classes.sum((1, 2, 3)).astype(np.float32)


def trained(dlio: Dlio, here: Path, name: str, *args: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (the report of a run, its weights)."""
    done = dlio("train", *args, *PLAIN, "--report", f"{name}.json", "--save", f"{name}.pt")
    assert done.returncode == 0, done.stderr
    weights = torch.load(here / f"{name}.pt", weights_only=True)
    return json.loads((here / f"{name}.json").read_text()), weights


@pytest.mark.mpi
@pytest.mark.needs("batch_norm")
@pytest.mark.parametrize(
    ("mesh", "target", "model"),
    [
        ("data=2,space=2", "classes", "unet(width=4,depth=1)"),
        ("data=2,space=2", "label", "convnet(width=4)"),
        ("space=2", "classes", "unet(width=2,depth=1)"),
    ],
)
@pytest.mark.nightly  # By day, ranks of the next test share pictures, and test_mesh.py has slabs.
def test_a_mesh_trains_as_one_process_and_reads_each_slab_once(
    dlio: Dlio, tmp_path: Path, mesh: str, target: str, model: str
) -> None:
    for name, seed, samples in (("train.h5", 0, SAMPLES), ("val.h5", 1, 5)):
        draw(tmp_path / name, seed, samples)
    common = (f"train.h5::volume,{target}", "--val", f"val.h5::volume,{target}", "--epochs", "5")
    options: tuple[str, ...] = ("--model", model, "--tiers", "ram:16MiB", "--workers", "1")
    if target == "label":
        options = (*options, "--accumulate", "2")
        options = (*options, "--ema", "0.9") if has_feature("ema") else options
    one, expected = trained(dlio, tmp_path, "one", *common, *options, "--batch-size", "4")
    count, batch = ("2", "4") if mesh == "space=2" else ("4", "2")
    ranks = ("-n", count, "--mesh", mesh, "--batch-size", batch, "--checkpoint", "c")
    four, weights = trained(dlio, tmp_path, "four", *common, *options, *ranks)
    for name, value in expected.items():
        away = float((weights[name].double() - value.double()).abs().max())
        assert away < 1e-5, (name, away)
    item = 1 if target == "classes" else 8 / np.prod(SHAPE)  # A label is read by both ranks.
    slabs = int(SAMPLES * np.prod(SHAPE) * (4 + item))
    assert four["dataset"]["bytes"] == slabs + (8 * SAMPLES if target == "label" else 0)
    for mine, its in zip(four["epochs"], one["epochs"], strict=True):
        assert mine["samples"] == SAMPLES
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5)
        assert mine["metrics"]["loss"] == pytest.approx(its["metrics"]["loss"], rel=1e-5)
        # Rounding decides between logits that are equal in a few of the elements.
        assert mine["accuracy"] == pytest.approx(its["accuracy"], abs=1e-3)
        assert mine["metrics"] == pytest.approx(its["metrics"], rel=1e-5, abs=1e-3)
        wanted = 0 if mine["epoch"] else four["dataset"]["bytes"]
        assert wanted <= mine["bytes"]["source"] <= 1.01 * wanted
    if target == "classes":
        saved = ("--weights", "one.pt", "--model", model, "-n", count, "--mesh", mesh)
        done = dlio("eval", "val.h5::volume,classes", *saved, "--batch-size", "2", "--json")
        assert done.returncode == 0, done.stderr
        metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
        assert metrics == pytest.approx(one["epochs"][-1]["metrics"], rel=1e-5, abs=1e-3)
        return
    # The state fits other ranks: one process goes on with it, with batches of the same size.
    more = ("--epochs", "6", "--batch-size", "4", "--checkpoint", "c", "--resume")
    resumed, _ = trained(dlio, tmp_path, "on", *common[:3], *options, *more)
    assert resumed["resumed"] is not None
    assert [each["loss"] for each in resumed["epochs"][:5]] == [e["loss"] for e in four["epochs"]]


@pytest.mark.mpi
@pytest.mark.needs("batch_norm")  # Ranks that normalise alone do not equal one process.
def test_ranks_share_pictures_that_each_decodes(dlio: Dlio, pictures: Path, tmp_path: Path) -> None:
    common: tuple[str, ...] = (
        str(pictures / "train"),
        "--epochs",
        "1",
        "--image-size",
        "32",
        "--model",
        "convnet(width=4)",
    )
    common = (*common, "--mixup", "0.4")
    one, expected = trained(dlio, tmp_path, "one", *common, "--batch-size", "20")
    ranks = ("-n", "2", "--mesh", "space=2")
    two, weights = trained(dlio, tmp_path, "two", *common, "--batch-size", "20", *ranks)
    for name, value in expected.items():
        assert float((weights[name].double() - value.double()).abs().max()) < 1e-5, name
    for name in ("accuracy", "loss"):
        assert two["epochs"][0][name] == pytest.approx(one["epochs"][0][name], rel=1e-5)
    assert two["epochs"][0]["samples"] == one["epochs"][0]["samples"] == 101


def test_numbers_of_arrays_are_predicted(dlio: Dlio, tmp_path: Path) -> None:
    draw(tmp_path / "train.h5", 0, 24)
    data = ("train.h5::volume,size", "--val", "train.h5::volume,size", "--model")
    refused = dlio("train", *data, "convnet(4)", "--epochs", "1")
    assert "only option=value" in refused.stderr
    together = ("--batch-norm", "sync") if has_feature("batch_norm") else ()
    options = ("--epochs", "8", "--batch-size", "4", *together)
    done = dlio("train", *data, "convnet(width=4)", *options, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["epochs"][-1]["task"] == "regress"
    assert report["epochs"][-1]["metrics"]["rmse"] < report["epochs"][0]["metrics"]["rmse"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "model=2,space=2"}, "layers in parts .model=. and samples in parts .space=."),
        ({"mesh": "model=2", "exchange": "gossip"}, "--exchange gossip does not go with --mesh"),
        ({"mesh": "model=2", "precision": "fp16"}, "--precision fp16 does not go with --mesh"),
        ({"mesh": "model=2", "check_weights": 5}, "--check-weights does not go with --mesh"),
        pytest.param(
            {"mesh": "model=2", "compile": True},
            "--compile does not go with --mesh",
            marks=pytest.mark.needs("compilation"),
        ),
        ({"mesh": "space=2", "exchange": "gossip"}, "--exchange gossip does not go with --mesh"),
        ({"mesh": "space=2", "fault_tolerance": "shrink"}, "--fault-tolerance shrink does not"),
        pytest.param(
            {"mesh": "space=2", "balance": True},
            "--balance does not",
            marks=pytest.mark.needs("balance"),
        ),
        pytest.param(
            {"mesh": "space=2", "prune": "apoptosis"},
            "--prune apoptosis does not",
            marks=pytest.mark.needs("pruning"),
        ),
        pytest.param(
            {"mesh": "space=2", "skip_samples": True, "epochs": 4},
            "--skip-samples does not",
            marks=pytest.mark.needs("skipping"),
        ),
        ({"mesh": "depth=2"}, "unknown axis 'depth'"),
    ],
)
def test_options_that_a_mesh_cannot_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train_config(source="data", **options)


@pytest.mark.parametrize(
    ("fields", "args", "said"),
    [
        ("volume", (), "needs a field to predict"),
        ("volume,size", ("--task", "classify"), "give --task regress"),
        ("volume,classes", ("--task", "autoencode"), "needs images"),
        ("volume,label", ("--target", "labels"), "Did you mean|did you mean|label"),
        ("volume,label", ("--model", "resnet50"), "takes pictures of 3 channels"),
        ("volume,label", ("--mesh", "space=2"), "needs a multiple of 2 ranks"),
    ],
)
def test_arrays_that_no_task_takes_are_refused(
    dlio: Dlio, tmp_path: Path, fields: str, args: tuple[str, ...], said: str
) -> None:
    draw(tmp_path / "train.h5", 0, 4)
    done = dlio("train", f"train.h5::{fields}", "--epochs", "1", *args)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert any(part in line for part in said.split("|")), line
