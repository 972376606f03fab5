"""`dlio train --mesh data=2,model=2`: ranks that share layers train as one process does."""

import csv
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import has_feature

Dlio = Callable[..., subprocess.CompletedProcess[str]]
TABLE = ("--target", "y", "--model", "mlp(width=256,depth=2)", "--tiers", "ram:1MiB")
MODERATE = ("--optimizer", "sgd", "--momentum", "0.5", "--lr", "0.02")


def draw(path: Path, rows: int, seed: int) -> None:
    """Write rows of which a linear teacher names the class."""
    random = np.random.default_rng(seed)
    teacher = np.random.default_rng(0).normal(size=6)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"x{column}" for column in range(6)), "y"])
        for row in random.normal(size=(rows, 6)):
            table.writerow([*row, "ab"[int(row @ teacher > 0)]])


def trained(dlio: Dlio, here: Path, name: str, *args: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (the report of a run, its weights)."""
    done = dlio("train", *args, *MODERATE, "--report", f"{name}.json", "--save", f"{name}.pt")
    assert done.returncode == 0, done.stderr
    weights = torch.load(here / f"{name}.pt", weights_only=True)
    return json.loads((here / f"{name}.json").read_text()), weights


def assert_alike(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == others.keys()
    for name, value in others.items():
        assert weights[name].shape == value.shape, name
        away = float((weights[name].double() - value.double()).abs().max())
        assert away < 1e-5, (name, away)


@pytest.mark.mpi
@pytest.mark.parametrize("mesh", ["data=2,model=2", "model=2"])
@pytest.mark.nightly  # By day, tests of the mesh train layers in parts.
def test_layers_in_parts_train_as_whole_ones(dlio: Dlio, tmp_path: Path, mesh: str) -> None:
    draw(tmp_path / "train.csv", 150, 1)
    draw(tmp_path / "val.csv", 50, 2)
    averaged = ("--ema", "0.9") if has_feature("ema") else ()
    common = ("train.csv", "--val", "val.csv", *TABLE, "--clip", "0.3", *averaged)
    ranks, batch = ("4", "16") if mesh == "data=2,model=2" else ("2", "32")
    on_one = ("--batch-size", "32")
    one, expected = trained(dlio, tmp_path, "one", *common, *on_one, "--epochs", "3")
    on_mesh = ("-n", ranks, "--mesh", mesh, "--batch-size", batch)
    saving = ("--epochs", "3", "--checkpoint", "c")
    parts, weights = trained(dlio, tmp_path, "parts", *common, *on_mesh, *saving)
    assert_alike(weights, expected)
    assert any("share 2 tensors, 9" in note for note in parts["notes"])
    for mine, its in zip(parts["epochs"], one["epochs"], strict=True):
        assert mine["samples"] == 150
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5)
        assert mine["metrics"]["loss"] == pytest.approx(its["metrics"]["loss"], rel=1e-5)
    # Checkpoints hold whole layers: other meshes and single processes go on with them.
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    on: list[dict[str, torch.Tensor]] = []
    for folder, where in (("c", on_mesh), ("d", on_one)):
        more = (*common, "--epochs", "4", "--checkpoint", folder, "--resume")
        report, weights = trained(dlio, tmp_path, f"on-{folder}", *more, *where)
        assert report["resumed"] is not None
        on.append(weights)
    assert_alike(*on)
    whole = ("--weights", "one.pt", *TABLE[:4])
    done = dlio("eval", "val.csv", *whole, "-n", ranks, "--mesh", mesh, "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics["loss"] == pytest.approx(one["epochs"][-1]["metrics"]["loss"], rel=1e-5)


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_transformer_in_parts_of_heads(dlio: Dlio, pictures: Path, tmp_path: Path) -> None:
    common: tuple[str, ...] = (str(pictures / "train"), "--epochs", "2", "--image-size", "32")
    common = (*common, "--model", "vit", "--mixup", "0.4")
    _, expected = trained(dlio, tmp_path, "one", *common, "--batch-size", "20")
    for ranks in ("2", "3"):  # Three heads: two ranks share the other layers alone.
        mesh = ("-n", ranks, "--mesh", f"model={ranks}", "--batch-size", "20")
        _, weights = trained(dlio, tmp_path, f"of{ranks}", *common, *mesh)
        assert_alike(weights, expected)


@pytest.mark.mpi
@pytest.mark.nightly
def test_a_resumed_run_drops_the_same_neurons_on_ranks_that_share_layers(
    dlio: Dlio, tmp_path: Path
) -> None:
    draw(tmp_path / "train.csv", 150, 1)
    model = ("--target", "y", "--model", "mlp(width=256,dropout=0.3)", "--checkpoint", "c")
    trained(dlio, tmp_path, "one", "train.csv", *model, "--epochs", "1")
    on_mesh = ("-n", "2", "--mesh", "model=2", "--epochs", "2", "--resume")
    on, _ = trained(dlio, tmp_path, "on", "train.csv", *model, *on_mesh)
    assert on["resumed"] is not None
    (note,) = on["notes"]  # And none of other weights.
    assert "2 ranks share" in note


def test_a_model_without_such_layers_is_refused(dlio: Dlio, pictures: Path) -> None:
    args = ("--epochs", "1", "--image-size", "32", "--model", "resnet(width=4)", "-n", "2")
    done = dlio("train", str(pictures / "train"), *args, "--mesh", "model=2")
    assert done.returncode != 0
    assert "the model has no layer that 2 ranks can share" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
