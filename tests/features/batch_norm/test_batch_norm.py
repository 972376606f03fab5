"""Batch normalisation over ranks."""

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.errors import UsageError
from dlio.train.config import train_config
from tests.conftest import MpiRun

BODY = Path(__file__).with_name("batch_norm_checks.py")
GHOSTS = BODY.with_name("ghost_checks.py")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.daily("3")
def test_ranks_normalise_as_one_process(mpirun: MpiRun, ranks: int) -> None:
    done = mpirun(ranks, str(BODY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kept"] * ranks


def test_one_rank_normalises_as_torch() -> None:
    runpy.run_path(str(BODY))["check_synchronised"]()


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gossip"},
        pytest.param({"prune": "apoptosis"}, marks=pytest.mark.needs("pruning")),
        {"fault_tolerance": "shrink"},
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--batch-norm sync does not go with"):
        train_config(source="data", batch_norm="sync", **options)


@pytest.mark.mpi
def test_groups_give_the_same_bits_on_any_number_of_ranks(mpirun: MpiRun) -> None:
    weights = set()
    for ranks in (1, 2, 3):
        done = mpirun(ranks, str(GHOSTS))
        assert done.returncode == 0, done.stderr
        weights.add(done.stdout.strip())
    assert len(weights) == 1
    assert len(weights.pop()) > 1000


ONE = {"one": (1, "--tiers", "none")}
TWO = {"two": (2, "--tiers", "ram:16MiB", "--pretend-nodes", "2", "--shuffle", "global")}
RESUMED = {  # Ended after an epoch on two ranks, and resumed on one.
    "begun": (2, "--checkpoint", "c", "--callback", "nets:Stop"),
    "resumed": (1, "--checkpoint", "c", "--resume"),
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "placements",
    [{**ONE, **TWO}, pytest.param({**ONE, **RESUMED}, marks=pytest.mark.nightly)],
    ids=["two", "resumed"],
)
def test_training_gives_the_same_bits_wherever_samples_are(
    dlio: Callable[..., subprocess.CompletedProcess[str]],
    pictures: Path,
    here: Path,
    placements: dict[str, tuple[Any, ...]],
) -> None:
    for name, (ranks, *more) in placements.items():
        done = dlio(
            *("train", str(pictures / "train"), "-n", str(ranks), "--model", "convnet(width=4)"),
            *("--batch-size", str(16 // int(ranks)), "--batch-norm", "ghost(4)", "--epochs", "2"),
            *("--image-size", "32", "--workers", "1", "--save", f"{name}.pt", *map(str, more)),
        )
        assert done.returncode == 0, done.stderr
    first, *_, last = (here / f"{name}.pt" for name in placements)
    one, other = (torch.load(path, weights_only=True) for path in (first, last))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exchange": "tree"}, "does not go with --exchange tree"),
        ({"exchange": "allreduce+onebit"}, r"does not go with --exchange allreduce\+onebit"),
        ({"shuffle": "local"}, "does not go with --shuffle local"),
        pytest.param(
            {"balance": True}, "does not go with --balance", marks=pytest.mark.needs("balance")
        ),
        pytest.param(
            {"prune": "apoptosis"}, "does not go with --prune", marks=pytest.mark.needs("pruning")
        ),
        ({"fault_tolerance": "shrink"}, "does not go with --fault-tolerance"),
        ({"batch_size": 24}, "not a multiple"),
    ],
)
def test_groups_refuse_what_they_cannot_keep(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        train_config(source="data", batch_norm="ghost(16)", **options)


@pytest.mark.parametrize(
    "text", ["ghost", "ghost()", "ghost(1)", "ghost(0)", "ghosts(4)", "global"]
)
def test_unknown_modes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--batch-norm"):
        train_config(source="data", batch_norm=text)
