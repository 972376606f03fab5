"""The ways to prune that `dlio bench prune --case images` compares with."""

import numpy as np
import pytest
import torch

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.train.networks.resnet import SmallResNet
from dlio_bench.prune.rivals import chosen, norms, remaining, shrink

EXAMPLE = torch.zeros(2, 3, 32, 32)


def _network() -> tuple[SmallResNet, tuple[NeuronGroup, ...]]:
    torch.manual_seed(0)
    model = SmallResNet(5, 32, width=16)
    return model, find_groups(model, EXAMPLE).groups


@torch.no_grad()
def test_the_lasso_shortens_weights_by_equal_steps_until_they_are_zero() -> None:
    model, groups = _network()
    for group in groups:
        for member in (*group.producers, *group.consumers):
            before = norms(model, member)
            shrink(model, member, 0.01)
            expected = (before - 0.01).clamp(min=0).numpy()
            assert norms(model, member).numpy() == pytest.approx(expected, abs=1e-5)
            shrink(model, member, float(norms(model, member).median()) + 1e-6)
            after = norms(model, member)
            assert len(after) / 2 <= int((after == 0).sum())


@torch.no_grad()
def test_neurons_that_nothing_computes_or_reads_are_cut_in_multiples() -> None:
    model, groups = _network()
    group = max(groups, key=lambda each: each.width)
    assert len(remaining(model, group)) == group.width
    consumer = group.consumers[0]
    weight = model.get_submodule(consumer.module).get_parameter("weight")
    weight.movedim(consumer.dim, 0)[torch.from_numpy(consumer.channels[:20].ravel())] = 0
    for other in group.consumers[1:]:
        weight = model.get_submodule(other.module).get_parameter("weight")
        weight.movedim(other.dim, 0)[torch.from_numpy(other.channels[:20].ravel())] = 0
    left = remaining(model, group)
    assert len(left) == group.width - 16
    assert set(range(20, group.width)) <= set(left.tolist())


def test_what_torch_pruning_chooses_can_be_cut() -> None:
    model, groups = _network()
    keep = chosen(model, groups, EXAMPLE, 0.5)
    assert set(keep) == {group.name for group in groups}
    assert all(len(keep[group.name]) == group.width // 2 for group in groups)
    # The neurons with the smallest weights go.
    group = groups[-1]
    assert isinstance(keep[group.name], np.ndarray)
    applied = apply(model, groups, RemovalPlan(keep))
    assert [each.width for each in applied.groups] == [each.width // 2 for each in groups]
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 5)
