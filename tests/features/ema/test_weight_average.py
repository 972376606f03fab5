"""The average of weights follows them, and is restored."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.features.ema.ema_feature import EmaOptions
from dlio.features.ema.weight_average import EmaHooks
from dlio.train.checkpoint.checkpoint_store import open_checkpoint
from dlio.train.config import train_config
from dlio.train.feature_hooks import SavedFeature
from dlio.train.rank_layout import RankLayout


def test_the_average_follows_the_weights_and_is_restored() -> None:
    model = nn.Linear(2, 2)
    run: Any = SimpleNamespace(model=model, layout=RankLayout(SingleCommunicator()))
    average = EmaHooks(EmaOptions(0.5), run)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for step in range(1, 60):
        average.after_update(step)
    assert torch.allclose(average.evaluated().get_parameter("weight"), model.weight, atol=1e-4)
    kept = {name: value.clone() for name, value in average.weights().items()}
    with torch.no_grad():
        model.weight.fill_(3.0)
    average.after_update(60)
    assert average.weights()["weight"].max() == pytest.approx(2.0)
    average.restore(SavedFeature(None, {"weight": kept["weight"]}, lambda _: ()))
    assert torch.equal(average.weights()["weight"], kept["weight"])
    assert torch.equal(average.weights()["bias"], model.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_weights_of_16_bits_follows_them(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1, bias=False).to(dtype).requires_grad_(False)
    exact = nn.Linear(1, 1, bias=False).double().requires_grad_(False)
    layout = RankLayout(SingleCommunicator())
    averages = []
    for each in (model, exact):
        each.weight.fill_(1.0)
        run: Any = SimpleNamespace(model=each, layout=layout)
        averages.append(EmaHooks(EmaOptions(0.9999), run))
        each.weight.fill_(2.0)
    start = 100_000  # Beyond the first steps, whose factors are smaller.
    for step in range(start, start + 3_000):
        for average in averages:
            average.after_update(step)
    short, whole = (average.weights()["weight"].item() for average in averages)
    assert whole == pytest.approx(2 - 0.9999**3_000)
    assert short == pytest.approx(whole, rel=1e-4)
    used = averages[0].evaluated().get_parameter("weight")
    assert used.dtype == dtype
    assert used.item() == pytest.approx(whole, rel=2**-8)
    again = EmaHooks(EmaOptions(0.9999), SimpleNamespace(model=model, layout=layout))
    again.restore(SavedFeature(None, averages[0].weights(), lambda _: ()))
    assert again.weights()["weight"].item() == short


NETS = """
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, classes)
        self.second.weight = self.first.weight
        self.bfloat16()

    def forward(self, x):
        x = nn.functional.adaptive_avg_pool2d(x.mean(1), 8).flatten(1).bfloat16()
        return self.last(self.second(self.first(x).relu()).relu()).float()

def half(classes):
    return Half(classes)
"""


@pytest.mark.mpi
def test_averages_of_tied_weights_of_16_bits_are_resumed_and_exported(
    dlio: Callable[..., subprocess.CompletedProcess[str]], pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "nets16.py").write_text(NETS)
    same: tuple[str, ...] = (
        "train",
        str(pictures / "train"),
        "-n",
        "2",
        "--batch-size",
        "16",
        "--epochs",
        "2",
    )
    same += ("--model", "nets16:half", "--image-size", "32", "--ema", "0.99", "--lr", "0.1")
    same += ("--checkpoint", "c", "--keep", "9")
    done = dlio(*same, "--save", "whole.pt")
    assert done.returncode == 0, done.stderr
    saved = sorted((tmp_path / "c").glob("step-*"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {value.dtype for value in whole.values()} == {torch.bfloat16}
    held = open_checkpoint(str(saved[-1])).read("all/")
    for name, value in whole.items():
        average = held[f"ema/{name}"]  # Under both names, as exports read them.
        assert average.dtype == torch.float32
        assert torch.equal(average.bfloat16(), value)
        assert not torch.equal(held[f"model/{name}"], value)
    for path in saved[1:]:
        shutil.rmtree(path)
    again = dlio(*same, "--resume", "--save", "again.pt")
    assert again.returncode == 0, again.stderr
    resumed = torch.load(tmp_path / "again.pt", weights_only=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.needs("pruning")
def test_an_average_of_weights_that_are_removed_is_refused() -> None:
    with pytest.raises(UsageError, match="--prune apoptosis"):
        train_config("pictures", ema=0.9, prune="apoptosis")
