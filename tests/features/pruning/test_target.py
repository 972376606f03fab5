"""A given fraction of the parameters stays, after one early round."""

import pytest
import torch

import dlio
from dlio.errors import UsageError
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters, parameters_with, widths_for
from dlio.features.pruning.pruning_pace import Schedule
from dlio.train.networks.resnet import SmallResNet
from tests.features.pruning.apoptosis_checks import make_net, probe, samples, shapes, train


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.6, 1.0])
def test_widths_leave_the_requested_fraction_of_the_parameters(fraction: float) -> None:
    model = SmallResNet(10, 32, width=32)
    whole = count_parameters(model)
    groups = find_groups(model, torch.zeros(2, 3, 32, 32)).groups
    widths = widths_for(model, groups, fraction, 8)
    assert all(width % 8 == 0 and width > 0 for width in widths.values())
    left = parameters_with(model, groups, widths)
    # A group of 32 channels has only four widths.
    assert left / whole == pytest.approx(fraction, rel=0.25)
    assert count_parameters(model) == whole
    # All groups shrink in the same proportion, up to the next multiple.
    share = min(widths[group.name] / group.width for group in groups)
    assert all(widths[group.name] <= share * group.width + 8 for group in groups)


def test_a_fraction_that_needs_narrower_layers_than_there_are_is_refused() -> None:
    model = SmallResNet(10, 32, width=8)
    groups = find_groups(model, torch.zeros(2, 3, 32, 32)).groups
    with pytest.raises(UsageError, match=r"0\.001 of the parameters .* is the next"):
        widths_for(model, groups, 0.001, 8)


@pytest.mark.parametrize(("width", "nearest"), [(3, "1"), (24, "0.67")])
def test_a_fraction_for_which_nothing_would_be_removed_is_refused(width: int, nearest: str) -> None:
    """torch-pruning 1.6.1 removes int(width * (1 - ratio)) neurons, which may be none."""
    model = torch.nn.Sequential(
        torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)
    )
    groups = find_groups(model, torch.zeros(2, 10)).groups
    with pytest.raises(UsageError, match=f"0.95 of the parameters .*: {nearest} is the next"):
        widths_for(model, groups, 0.95, 8)
    kept = widths_for(model, groups, float(nearest), 8)
    assert list(kept.values()) == [min(width, 16)]


def test_one_round_cuts_to_the_target_whatever_the_loss() -> None:
    def worse(model: torch.nn.Module) -> float:
        return 1e9 / count_parameters(model)

    net = make_net()
    whole = count_parameters(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = Schedule(target=0.3, every=2, looks=3, begin=0.0)
    with dlio.Apoptosis(
        net, optimizer, example=samples(0, 2)[0], probe=worse, steps=60, schedule=schedule
    ) as apoptosis:
        train(net, optimizer, apoptosis, range(60), 0)
        assert [each.step for each in apoptosis.rounds] == [6]
        assert apoptosis.stopped == "the target is reached"
        assert apoptosis.overhead()["steps"] == 3
    assert count_parameters(net) / whole == pytest.approx(0.3, rel=0.25)
    assert shapes(net)[0][0] % 8 == shapes(net)[2][0] % 8 == 0
    assert float(probe(net).detach()) < 1.0  # It has learnt after the cut: ln 4 is 1.39.


def test_the_neurons_that_the_loss_needs_least_are_removed() -> None:
    """Half of the neurons have no effect on the output."""
    net = make_net()
    last = net.get_submodule("4")
    assert isinstance(last, torch.nn.Linear)
    with torch.no_grad():
        last.weight[:, ::2] *= 1e-3
        last.weight[:, 1::2] *= 10
    kept = last.weight[:, 1::2].detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    schedule = Schedule(target=0.45, every=1, looks=4, begin=0.0)
    with dlio.Apoptosis(
        net, optimizer, example=samples(0, 2)[0], steps=60, schedule=schedule
    ) as apoptosis:
        train(net, optimizer, apoptosis, range(8), 0)
    left = last.weight.detach()
    assert left.shape[1] <= 32
    large = left[:, left.abs().amax(0) > 0.1]
    assert large.shape == kept.shape or large.shape[1] >= 0.9 * min(kept.shape[1], left.shape[1])


@pytest.mark.parametrize("target", [0.0, 1.5, -0.2])
def test_fractions_out_of_range_are_refused(target: float) -> None:
    with pytest.raises(UsageError, match=r"Schedule\(target=.*choose a fraction above 0"):
        Schedule(target=target)
