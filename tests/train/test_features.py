"""Further options of `dlio train`: optimizers, precision, accumulation, callbacks, models."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from dlio.comm import Op, Request
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.callbacks.early_stopping import EarlyStopping
from dlio.train.callbacks.nan_guard import NanGuard
from dlio.train.config import train_config
from dlio.train.factory import call_with, split_options
from dlio.train.model import make_model
from dlio.train.optimizers import OPTIMIZERS, make_optimizer

Args = tuple[str, ...]
Dlio = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = ("--image-size", "32", "--workers", "1")


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_learns_and_decays_weights_only(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make_optimizer(name, net, 0.9, 1e-2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0]
    assert all(p.ndim > 1 for p in optimizer.param_groups[0]["params"])
    x = torch.randn(64, 4)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(60):
        for group in optimizer.param_groups:
            group["lr"] = train_config("x", optimizer=name).peak_lr(2)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.daily("2")
def test_accumulated_batches_are_one_large_batch(
    dlio: Dlio, pictures: Path, here: Path, ranks: int
) -> None:
    same: Args = (
        "train",
        str(pictures / "train"),
        "--epochs",
        "1",
        *SHAPE,
        "--model",
        "nets:mlp",
    )
    same += ("-n", str(ranks), "--report", "r.json")
    large = dlio(*same, "--batch-size", "12", "--save", "large.pt")
    assert large.returncode == 0, large.stderr
    sent = [
        epoch["exchange_bytes"] for epoch in json.loads((here / "r.json").read_text())["epochs"]
    ]
    small = dlio(*same, "--batch-size", "4", "--accumulate", "3", "--save", "small.pt")
    assert small.returncode == 0, small.stderr
    one, other = _weights(here / "large.pt"), _weights(here / "small.pt")
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=0, atol=1e-5), name
    report = json.loads((here / "r.json").read_text())
    # Three batches are accumulated into one exchange of gradients.
    assert [epoch["exchange_bytes"] for epoch in report["epochs"]] == sent


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.daily("bf16")
def test_mixed_precision_learns_as_float32_does(
    dlio: Dlio, pictures: Path, here: Path, precision: str
) -> None:
    same: Args = (
        "train",
        str(pictures / "train"),
        "--epochs",
        "2",
        *SHAPE,
        "--model",
        "resnet(width=4)",
    )
    same += ("--report", "r.json", "--batch-size", "16")
    losses = {}
    for each in ("fp32", precision):
        done = dlio(*same, "--precision", each)
        assert done.returncode == 0, done.stderr
        losses[each] = [e["loss"] for e in json.loads((here / "r.json").read_text())["epochs"]]
    assert losses[precision] != losses["fp32"]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.05)


def test_a_nan_loss_ends_the_run_or_skips_the_step(dlio: Dlio, pictures: Path, here: Path) -> None:
    same: Args = (
        "train",
        str(pictures / "train"),
        "--epochs",
        "1",
        *SHAPE,
        "--batch-size",
        "10",
    )
    same += ("--model", "nets:exploding(at=3)", "--report", "r.json", "--save", "w.pt")
    stopped = dlio(*same)
    assert stopped.returncode == 2
    assert "epoch 1, step 3 of the optimizer" in stopped.stderr
    assert "--nan skip" in stopped.stderr
    assert not (here / "r.json").exists()
    skipped = dlio(*same, "--nan", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert json.loads((here / "r.json").read_text())["epochs"][0]["left_out"] == 1
    assert all(value.isfinite().all() for value in _weights(here / "w.pt").values())
    went_on = dlio(*same, "--nan", "off")
    assert went_on.returncode == 0, went_on.stderr
    assert not all(value.isfinite().all() for value in _weights(here / "w.pt").values())


def test_ranks_with_one_model_skip_a_step_together() -> None:
    class Other(SingleCommunicator):
        """One of two ranks; the loss of the other one is NaN."""

        size = 2

        def iallreduce(self, array: npt.NDArray[Any], op: Op = "sum") -> Request:
            array += 1
            return super().iallreduce(array)

    run: Any = SimpleNamespace(
        last_loss=torch.tensor(1.0),
        gradient_norm=None,
        precision=SimpleNamespace(scales=False),
        comm=Other(),
        exchange=SimpleNamespace(alike=True),
    )
    assert not NanGuard(skip=True).before_step(run)
    run.exchange.alike = False
    assert NanGuard(skip=True).before_step(run)
    run.last_loss = torch.tensor(float("inf"))
    assert not NanGuard(skip=True).before_step(run)


@pytest.mark.needs("pruning")
def test_epochs_with_pruning_do_not_count_towards_early_stopping() -> None:
    ended: list[str] = []
    config = train_config(source="data", val="held-out", early_stopping=2)
    run: Any = SimpleNamespace(config=config, history=[], stop=ended.append)
    for accuracy, removed in ((0.5, {}), (0.4, {"dead": 3}), (0.4, {}), (0.4, {})):
        assert not ended
        run.history.append(
            SimpleNamespace(
                watch="accuracy",
                watched=accuracy,
                features={"pruning": {"rounds": [{"removed": removed}]}},
            )
        )
        EarlyStopping().epoch_ends(run, run.history[-1])
    assert ended


@pytest.mark.mpi
def test_a_run_that_does_not_improve_ends_on_all_ranks(
    dlio: Dlio, pictures: Path, here: Path
) -> None:
    # At such a low rate nothing is learnt: the held-out accuracy stays the same.
    done = dlio(
        *("train", str(pictures), "-n", "2", "--epochs", "9", *SHAPE, "--model", "nets:mlp"),
        *("--lr", "1e-12", "--early-stopping", "2", "--report", "r.json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((here / "r.json").read_text())
    assert len(report["epochs"]) == 3
    assert "has not been better" in report["stopped"]
    assert "has not been better" in done.stdout


def test_matrices_are_dumped_unchanged(dlio: Dlio, pictures: Path, here: Path) -> None:
    done = dlio(
        *("train", str(pictures / "train"), "--epochs", "2", *SHAPE, "--model", "nets:mlp"),
        *("--dump-matrices", "dump", "--save", "w.pt"),
    )
    assert done.returncode == 0, done.stderr
    last = here / "dump" / "epoch-0002"
    for name, value in _weights(here / "w.pt").items():
        assert np.array_equal(np.load(last / "weights" / f"{name}.npy"), value.numpy())
        gradient = np.load(last / "gradients" / f"{name}.npy")
        assert gradient.shape == tuple(value.shape)
        assert gradient.any()


def test_tensorboard_gets_curves_and_summaries(dlio: Dlio, pictures: Path, here: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = dlio(
        *("train", str(pictures), "--epochs", "2", *SHAPE, "--model", "nets:mlp"),
        *("--tensorboard", "tb", "--summaries", "2", "--report", "r.json"),
    )
    assert done.returncode == 0, done.stderr
    events = reading.EventAccumulator(str(here / "tb"))
    events.Reload()
    tags = events.Tags()
    assert {"train/loss", "train/lr", "epoch/val_accuracy", "data/bytes_source"} <= {
        *tags["scalars"]
    }
    assert {"weights/1.weight", "gradients/1.weight"} <= {*tags["histograms"]}
    written = [event.value for event in events.Scalars("epoch/val_accuracy")]
    report = json.loads((here / "r.json").read_text())
    assert written == pytest.approx([epoch["val_accuracy"] for epoch in report["epochs"]])


@pytest.mark.mpi
def test_a_users_own_callback_and_model(dlio: Dlio, pictures: Path, here: Path) -> None:
    same: Args = ("train", str(pictures / "train"), "-n", "2", "--epochs", "5", *SHAPE)
    done = dlio(*same, "--model", "nets:mlp(width=3)", "--callback", "nets:Stop", "--save", "w.pt")
    assert done.returncode == 0, done.stderr
    assert (here / "seen.txt").read_text().startswith("0 ")
    assert "Stopped after 1 epoch: enough." in done.stdout
    assert _weights(here / "w.pt")["1.weight"].shape == (3, 3 * 32 * 32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nets:nothing"], "nets has no callable nothing"),
        (["--model", "nowhere:net"], "no module nowhere"),
        (["--model", "nets:mlp(depth=3)"], "depth"),
        (["--model", "nets:mlp(3)"], "option=value"),
        (["--model", "nets:no_module"], "not a torch.nn.Module"),
        (["--callback", "nets:mlp(classes=1, image_size=2)"], "not a dlio.train.callbacks"),
        (["--optimizer", "lbfgs"], "adamw"),
        (["--resume"], "--checkpoint"),
        (["--summaries", "3"], "--tensorboard"),
        (["--early-stopping", "3"], "--val"),
    ],
)
def test_errors_list_the_valid_names(
    dlio: Dlio, pictures: Path, here: Path, options: list[str], said: str
) -> None:
    done = dlio("train", str(pictures / "train"), *SHAPE, *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_factory_gets_the_options_that_it_has_parameters_for() -> None:
    offered = ((("classes", "num_classes"), 7), (("image_size",), 32))

    def both(num_classes: int, image_size: int) -> tuple[int, int]:
        return num_classes, image_size

    def anything(**options: int) -> dict[str, int]:
        return options

    assert call_with("--model", "x", both, {}, offered) == (7, 32)
    assert call_with("--model", "x", both, {"image_size": 5}, offered) == (7, 5)
    # Like torchvision's factories, it passes unknown options on, num_classes among them.
    assert call_with("--model", "x", anything, {"width": 2}, offered) == {
        "num_classes": 7,
        "width": 2,
    }
    assert call_with("--model", "x", dict, {}, ()) == {}


def test_options_in_brackets_are_literals() -> None:
    assert split_options("--model", "resnet") == ("resnet", {})
    assert split_options("--model", "a.b:c(x=1, y='z', w=(1, 2))") == (
        "a.b:c",
        {"x": 1, "y": "z", "w": (1, 2)},
    )
    for wrong in ("net(__import__('os'))", "net(x=open('a'))", "net(", "a b", "net(**{})"):
        with pytest.raises(UsageError, match="--model"):
            split_options("--model", wrong)


def test_the_widths_of_a_model_can_be_chosen() -> None:
    narrow = make_model("resnet(width=4)", 5, 64)
    assert sum(p.numel() for p in narrow.parameters()) < 30_000
