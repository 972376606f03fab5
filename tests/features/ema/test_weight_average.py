"""The average of weights follows them, and is restored."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.features.ema.ema_feature import EmaOptions
from dlio.features.ema.weight_average import EmaHooks
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


@pytest.mark.needs("pruning")
def test_an_average_of_weights_that_are_removed_is_refused() -> None:
    with pytest.raises(UsageError, match="--prune apoptosis"):
        train_config("pictures", ema=0.9, prune="apoptosis")
