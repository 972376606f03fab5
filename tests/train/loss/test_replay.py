"""`dlio train --replay`: the trace of a run that lost ranks, without losses, has the same weights.

The model has dropout and batch norm, and the images are cropped at random: whoever trains on other
samples, or on the same in another order, gets other bits.
"""

import json
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dlio
from dlio import DataLoader
from dlio.cli.train_command import train_rank
from dlio.comm.planned_membership import PlannedMembership
from dlio.comm.single import SingleCommunicator
from dlio.comm.survival.recovery import Recovery
from dlio.comm.world import membership
from dlio.errors import UsageError
from dlio.train.config import train_config
from dlio.train.ledger_file import check_ledger, read_lines
from dlio.train.replay import Replay
from tests.train.loss.conftest import EPOCHS, SAMPLES, Run, check_exact

PARAMETERS = 8
"""Of the model `make_noisy`."""
Command = Callable[..., subprocess.CompletedProcess[str]]


def _same_bits(one: Path, other: Path) -> bool:
    a, b = torch.load(one), torch.load(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _random_ends(rng: random.Random, ranks: int) -> dict[int, list[object]]:
    """End one rank or more, but not all, each in a step and at a place of its own."""
    ended = rng.sample(range(ranks), rng.randint(1, ranks - 1))
    return {rank: ["kill", rng.randint(1, 12), rng.randrange(-1, PARAMETERS)] for rank in ended}


@pytest.mark.mpi
@pytest.mark.cold
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "exchange",
    [
        "allreduce",
        "tree",
        "parameter-server",
        "hierarchical --pretend-nodes 2",
        "allreduce+int8",
        "allreduce+onebit",
        "hierarchical+onebit --pretend-nodes 2",
        "tree+adaptive --accumulate 2",
        "local-sgd(3)",
        "diloco(2)+int8",
    ],
)
def test_a_replay_of_a_run_that_lost_ranks_has_its_weights_bit_for_bit(
    exchange: str, seed: int, run: Run, tmp_path: Path
) -> None:
    options = ("--exchange", *exchange.split())
    ends = _random_ends(random.Random(f"{exchange} {seed}"), 4)
    hurt = run(4, ends, *options, "--save", "a.pt", model="make_noisy")
    check_exact(hurt)
    assert hurt.losses
    replayed = run(
        4, {}, *options, "--replay", "t.jsonl", "--save", "b.pt", model="make_noisy", name="again-"
    )
    check_exact(replayed)
    assert replayed.steps == hurt.steps
    assert _same_bits(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (tmp_path / "again-t.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()
    assert all(each.exact for each in check_ledger(read_lines(str(tmp_path / "t.jsonl")), SAMPLES))


def _argv(pictures: Path, *more: str) -> list[str]:
    options = ["--epochs", str(EPOCHS), "--batch-size", "9", "--image-size", "32"]
    return ["train", str(pictures / "train"), *options, "--model", "resnet(width=4)", *more]


def test_one_rank_replays_its_trace_with_the_same_bits(
    dlio: Command, pictures: Path, tmp_path: Path
) -> None:
    whole = dlio(*_argv(pictures, "--trace", "t.jsonl", "--save", "a.pt", "--accumulate", "2"))
    assert whole.returncode == 0, whole.stderr
    again = ("--replay", "t.jsonl", "--trace", "again.jsonl", "--save", "b.pt")
    replayed = dlio(*_argv(pictures, *again, "--accumulate", "2"))
    assert replayed.returncode == 0, replayed.stderr
    assert _same_bits(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()


def _one_process(pictures: Path, **more: Any) -> None:
    config = train_config(
        source=str(pictures / "train"),
        **{"image_size": 32, "epochs": 1, "workers": 1, "model": "resnet(width=4)", **more},
    )
    train_rank(config)


def test_a_replay_that_fails_leaves_this_process_as_it_was(pictures: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=r"missing\.jsonl cannot be read"):
            _one_process(pictures, replay=str(tmp_path / "missing.jsonl"))
        assert membership() is None
    _one_process(pictures)


def test_spares_without_other_ranks_are_refused_in_one_line(pictures: Path) -> None:
    with pytest.raises(UsageError, match="--spares 1 with 1 rank: start more by -n"):
        _one_process(pictures, fault_tolerance="shrink", spares=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": 3}, "is of 3 ranks, and there are 1; start as many (-n)"),
        ({"ranks": None}, "when ranks join, or was written by an earlier version"),
        ({"epoch": 1}, "has no epoch 0; give the trace of a whole run"),
        ({"step": 4}, "epoch 0 lacks step 0; see `dlio ledger`"),
        ({"rank": 5}, "rank(s) [5] came back after they had been lost, or joined"),
    ],
)
def test_another_trace_is_refused_in_one_line(
    change: dict[str, Any], said: str, pictures: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    line = {"epoch": 0, "step": 0, "rank": 0, "samples": [1], "update": 0, "ranks": 1, **change}
    wrote = {key: value for key, value in line.items() if value is not None}
    path.write_text(json.dumps(wrote) + "\n")
    membership = PlannedMembership(SingleCommunicator())
    recovery = Recovery(membership, membership.world)
    with dlio.open(str(pictures / "train"), tiers="none") as data:
        replay = Replay(str(path), [DataLoader(data, 9, num_workers=1)], recovery, 9)
        with pytest.raises(UsageError, match=re.escape(said)) as error:
            replay.begin_epoch(0)
        replay.close()
    assert str(error.value).startswith(f"--replay {path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gossip"},
        {"exchange": "noloco"},
        {"exchange": "asgd"},
        {"checkpoint": "c"},
        pytest.param({"balance": True}, marks=pytest.mark.needs("balance")),
        pytest.param({"prune": "apoptosis"}, marks=pytest.mark.needs("pruning")),
        pytest.param({"skip_samples": True}, marks=pytest.mark.needs("skipping")),
    ],
)
def test_what_depends_on_more_than_the_batches_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not go with --replay"):
        train_config(source="data", replay="t.jsonl", **options)
