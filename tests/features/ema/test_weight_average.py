"""The average of weights follows them, and is restored."""

import pytest
import torch
from torch import nn

from dlio.errors import UsageError
from dlio.features.ema.weight_average import WeightAverage
from dlio.train.config import train_config


def test_the_average_follows_the_weights_and_is_restored() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, decay=0.5)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for step in range(1, 60):
        average.update(step)
    assert torch.allclose(average.model().get_parameter("weight"), model.weight, atol=1e-4)
    kept = {name: value.clone() for name, value in average.tensors().items()}
    with torch.no_grad():
        model.weight.fill_(3.0)
    average.update(60)
    assert average.tensors()["weight"].max() == pytest.approx(2.0)
    average.load({"weight": kept["weight"]})
    assert torch.equal(average.tensors()["weight"], kept["weight"])
    assert torch.equal(average.tensors()["bias"], model.bias)


@pytest.mark.needs("pruning")
def test_an_average_of_weights_that_are_removed_is_refused() -> None:
    with pytest.raises(UsageError, match="--prune apoptosis"):
        train_config("pictures", ema=0.9, prune="apoptosis")
