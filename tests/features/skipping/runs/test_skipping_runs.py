"""`dlio train --skip-samples`: kept samples come once, and any number of ranks trains the same."""

import json
import math
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlio.errors import UsageError
from dlio.train.config import train_config

Args = tuple[str, ...]
Dlio = Callable[..., subprocess.CompletedProcess[str]]
N = 101
EPOCHS = 5
SAME: Args = ("--image-size", "32", "--workers", "1", "--tiers", "ram:64MiB")
SAME += ("--model", "nets:mlp", "--epochs", str(EPOCHS), "--skip-samples", "--skip-share", "0.5")


def _samples(path: Path) -> dict[int, list[int]]:
    """Read a trace; return the samples of each epoch, over all ranks and steps."""
    samples: dict[int, list[int]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        samples[row["epoch"]] += row["samples"]
    return samples


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


@pytest.mark.mpi
def test_only_kept_samples_are_read_and_each_is_trained_on_once(
    dlio: Dlio, pictures: Path, here: Path, request: pytest.FixtureRequest
) -> None:
    """The run is the same, up to rounding, on 1, 2 and at night 4 ranks, and with accumulated
    batches.

    The learning rate grows in proportion as the number of samples falls.
    """
    runs = {
        "one": ("--batch-size", "8", "--callback", "nets:Log(path='log')"),
        "two": ("-n", "2", "--batch-size", "2", "--accumulate", "2", "--shuffle", "global"),
        "four": ("-n", "4", "--batch-size", "2", "--pretend-nodes", "2"),
    }
    if not request.config.getoption("--nightly"):
        del runs["four"]
    kept: dict[int, int] = {}
    for name, options in runs.items():
        outputs = ("--report", f"{name}.json", "--trace", f"{name}.jsonl", "--save", f"{name}.pt")
        done = dlio("train", str(pictures / "train"), *SAME, *options, *outputs)
        assert done.returncode == 0, done.stderr
        assert "of the samples were skipped" in " ".join(done.stdout.split())
        samples = _samples(here / f"{name}.jsonl")
        epochs = json.loads((here / f"{name}.json").read_text())["epochs"]
        assert [epoch["skip_share"] for epoch in (epochs[0], epochs[-1])] == [0, 0]
        for number, epoch in enumerate(epochs):
            ids = samples[number]
            kept[number] = len(ids)
            assert len(ids) == len(set(ids)) == epoch["samples"]
            assert epoch["skip_share"] == pytest.approx(1 - len(ids) / N)
            assert 0 < epoch["loss"] < 10
            if 0 < number < EPOCHS - 1:
                assert 0.3 < epoch["skip_share"] < 0.7
        # Skipped samples are not read: bytes are proportional to samples, up to their sizes.
        whole, few = (epochs[k]["bytes"] for k in (-1, 2))
        assert whole["source"] == few["source"] == 0
        read, of = (each["ram"] + each["peer"] for each in (few, whole))
        assert read / of == pytest.approx(epochs[2]["samples"] / N, abs=0.03)
    peak, warm = train_config("x", batch_size=8).peak_lr(1), 0.15 * EPOCHS * N
    steps = [json.loads(line) for line in (here / "log.0").read_text().splitlines()]
    for number in range(1, EPOCHS):
        lr = next(lr for _, epoch, _, lr in steps if epoch == number)
        down = (1 + math.cos(math.pi * (number * N - warm) / (EPOCHS * N - warm))) / 2
        assert lr == pytest.approx(peak * down * N / kept[number])
    first = _samples(here / "one.jsonl")
    for name in list(runs)[1:]:
        other = _samples(here / f"{name}.jsonl")
        assert {k: sorted(v) for k, v in other.items()} == {k: sorted(v) for k, v in first.items()}
        for key, value in _weights(here / "one.pt").items():
            assert torch.allclose(value, _weights(here / f"{name}.pt")[key], rtol=0, atol=1e-4)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.daily("1")
def test_a_run_is_resumed_within_an_epoch_that_skips(
    dlio: Dlio, pictures: Path, here: Path, ranks: int
) -> None:
    same: Args = ("train", str(pictures / "train"), *SAME, "--optimizer", "adam")
    same += ("--checkpoint-every", "3", "--keep", "99")
    two = ("-n", "2", "--batch-size", "4")
    outputs = ("--trace", "t.jsonl", "--report", "r.json")
    whole = dlio(*same, *two, "--checkpoint", "c", "--save", "whole.pt", *outputs)
    assert whole.returncode == 0, whole.stderr
    samples = _samples(here / "t.jsonl")
    epochs = json.loads((here / "r.json").read_text())["epochs"]
    # The first epoch has 13 steps: the 18th is the fifth of the second epoch, which skips.
    names = sorted(path.name for path in (here / "c").glob("step-*"))
    assert "step-00000018" in names
    for name in names[names.index("step-00000018") + 1 :]:
        shutil.rmtree(here / "c" / name)
    batch = ("-n", str(ranks), "--batch-size", str(8 // ranks))
    again = dlio(*same, *batch, "--checkpoint", "c", "--resume", "--save", "again.pt", *outputs)
    assert again.returncode == 0, again.stderr
    resumed = _samples(here / "t.jsonl")
    assert sorted(samples[1][40:]) == sorted(resumed[1])
    assert len(samples[1]) == len(set(samples[1]))
    for epoch in range(2, EPOCHS):
        assert sorted(samples[epoch]) == sorted(resumed[epoch])
    for key, value in _weights(here / "whole.pt").items():
        atol = 0 if ranks == 2 else 1e-4
        assert torch.allclose(value, _weights(here / "again.pt")[key], rtol=0, atol=atol)
    after = json.loads((here / "r.json").read_text())["epochs"]
    assert [e["skip_share"] for e in after] == [e["skip_share"] for e in epochs]
    if ranks == 2:
        assert [e["loss"] for e in after] == [e["loss"] for e in epochs]
        return
    for name in sorted(path.name for path in (here / "c").glob("step-*")):
        if name > "step-00000018":
            shutil.rmtree(here / "c" / name)
    without = tuple(o for o in same if o not in ("--skip-samples", "--skip-share", "0.5"))
    refused = dlio(*without, *batch, "--checkpoint", "c", "--resume")
    assert refused.returncode == 2
    assert "add --skip-samples" in " ".join(refused.stderr.split())


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options",
    [
        ("--exchange", "gossip", "--shuffle", "ring", "--pretend-nodes", "2"),
        ("--exchange", "asgd", "--shuffle", "local", "--tiers", "ram:32MiB,ram:32MiB:decoded"),
        pytest.param(
            ("--balance", "--shuffle", "batch", "--source-order", "block(2)"),
            marks=pytest.mark.needs("balance"),
        ),
    ],
)
@pytest.mark.nightly
def test_skipping_works_with_other_exchanges_shuffles_and_shares(
    dlio: Dlio, pictures: Path, here: Path, options: Args
) -> None:
    rest = ("-n", "2", "--batch-size", "4", "--trace", "t.jsonl", "--report", "r.json")
    done = dlio("train", str(pictures / "train"), *SAME, *rest, *options)
    assert done.returncode == 0, done.stderr
    epochs = json.loads((here / "r.json").read_text())["epochs"]
    for number, ids in _samples(here / "t.jsonl").items():
        assert len(ids) == len(set(ids)) == epochs[number]["samples"]
        if number and "asgd" in options:
            assert epochs[number]["decoded"] == len(ids)
    assert min(epoch["samples"] for epoch in epochs) < 0.7 * N


def test_invalid_options_are_refused() -> None:
    with pytest.raises(UsageError, match="--skip-share needs --skip-samples"):
        train_config("x", skip_share=0.3)
    above = "--skip-share .*: give a number above 0"
    for share, message in (
        (0.0, above),
        (0.9, r"--skip-share .*: give a share above 0, up to 0\.6"),
        (float("nan"), above),
    ):
        with pytest.raises(UsageError, match=message):
            train_config("x", epochs=9, skip_samples=True, skip_share=share)
    with pytest.raises(UsageError, match="give 3 or more"):
        train_config("x", epochs=2, skip_samples=True)
