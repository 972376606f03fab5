"""`dlio train --prune apoptosis`: networks shrink on all ranks, and are saved and resumed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dlio as library
from dlio.errors import UsageError
from dlio.train.config import train_config
from tests.train.nets import mlp

Dlio = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = ("--image-size", "32", "--tiers", "ram:64MiB", "--workers", "1")
PRUNE = ("--prune", "apoptosis", "--prune-tolerance", "20", "--model", "nets:mlp(width=64)")


@pytest.mark.mpi
def test_a_run_prunes_reports_saves_and_resumes_around_its_rounds(
    dlio: Dlio, pictures: Path, here: Path, request: pytest.FixtureRequest
) -> None:
    same: tuple[str, ...] = (
        str(pictures / "train"),
        "-n",
        "2",
        "--batch-size",
        "2",
        "--epochs",
        "6",
        *SHAPE,
    )
    same += (*PRUNE, "--optimizer", "adam", "--val", str(pictures / "val"))
    record = ("--report", "r.json", "--tensorboard", "tb")
    # An epoch has 26 steps; the first two rounds are after steps 48 and 96.
    saved = ("--checkpoint", "c", "--checkpoint-every", "47", "--keep", "99")
    whole = dlio("train", *same, *saved, "--save", "whole.pt", *record)
    assert whole.returncode == 0, whole.stderr
    names = [path.name for path in sorted((here / "c").glob("step-*"))]
    assert names == [f"step-{at:08d}" for at in (26, 47, 52, 78, 94, 104, 130, 141, 156)]

    epochs = json.loads((here / "r.json").read_text())["epochs"]
    counts = [epoch["pruning"]["parameters"] for epoch in epochs]
    first = sum(p.numel() for p in mlp(4, 32, 64).parameters())
    assert epochs[0]["pruning"]["parameters_at_first"] == counts[0] == first
    assert counts[-1] < counts[0]
    assert counts == sorted(counts, reverse=True)
    rounds = [each for epoch in epochs for each in epoch["pruning"]["rounds"]]
    assert rounds[0]["step"] == 48
    assert rounds[-1]["parameters"] == counts[-1]
    for epoch in epochs:
        seen = epoch["pruning"]
        assert sum(seen["layers"].values()) == seen["parameters"]
        # Two operations per weight of an MLP, without its biases.
        hidden = seen["layers"]["1"] // (3 * 32 * 32 + 1)
        assert seen["flops_per_sample"] == 2 * hidden * (3 * 32 * 32 + 4)
        assert hidden % 8 == 0
    assert epochs[-1]["pruning"]["statistics"]["steps"] <= 156 * 0.65 / 8 + 1
    assert f"{counts[-1]:,} of {first:,} parameters are left" in whole.stdout
    assert f"{counts[-1]:,} parameters" in whole.stdout
    assert any((here / "tb").iterdir())

    net = library.load_pruned(mlp(4, 32, 64), str(here / "whole.pt"))
    assert sum(p.numel() for p in net.parameters()) == counts[-1]

    # Resume pruned once; and at night also just before a round, with the batches that the round is
    # tried on, and just after one.
    nightly = request.config.getoption("--nightly")
    for kept in (names[:8], *((names[:5], names[:2], names[:3]) if nightly else ())):
        shutil.copytree(here / "c", here / "again")
        for path in (here / "again").glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path)
        again = dlio("train", *same, "--checkpoint", "again", "--resume", "--save", "again.pt")
        assert again.returncode == 0, again.stderr
        mine = torch.load(here / "whole.pt", weights_only=True)
        theirs = torch.load(here / "again.pt", weights_only=True)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), kept[-1]
        shutil.rmtree(here / "again")

    # On one rank.
    plain = [each for each in (same[0], *same[3:]) if each not in PRUNE[:4]]
    refused = dlio("train", *plain, "--checkpoint", "c", "--resume")
    assert refused.returncode != 0
    assert "--prune apoptosis" in refused.stderr


def test_a_tolerance_is_a_number_of_points() -> None:
    with pytest.raises(UsageError, match="--prune-tolerance -1"):
        train_config("data", prune="apoptosis", prune_tolerance=-1)
    with pytest.raises(UsageError, match="--prune magnitude: choose one of off, apoptosis"):
        train_config("data", prune="magnitude")
    with pytest.raises(UsageError, match="--prune-tolerance needs --prune apoptosis"):
        train_config("data", prune_tolerance=0.5)
    with pytest.raises(UsageError, match="--prune-target needs --prune apoptosis"):
        train_config("data", prune_target=0.5)
    with pytest.raises(UsageError, match="--prune-target does not go with --prune-tolerance"):
        train_config("data", prune="apoptosis", prune_tolerance=0.5, prune_target=0.5)
    with pytest.raises(UsageError, match="--prune-target"):
        train_config("data", prune="apoptosis", prune_target=1.5)
