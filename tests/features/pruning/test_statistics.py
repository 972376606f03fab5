"""Statistics match the values and gradients of training, and add up over ranks."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import Collector, Statistics
from tests.features.pruning.networks import make


def _run(collector: Collector, model: nn.Module, inputs: torch.Tensor) -> None:
    model.zero_grad()
    model(inputs).square().mean().backward()
    collector.step()


def test_moments_match_the_inputs_of_the_next_layer() -> None:
    model, _ = make("convolutional", "relu", 0)
    groups = find_groups(model, torch.randn(2, 3, 8, 8)).groups
    seen: list[torch.Tensor] = []
    model.get_submodule("3").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with Collector(model, groups, every=1) as collector:
        for _ in range(3):
            _run(collector, model, torch.randn(4, 3, 8, 8))
    moments = collector.statistics().moments["3"]
    values = torch.cat(seen).detach().double().movedim(1, 0).flatten(1)
    assert moments.count == values.shape[1] == 3 * 4 * 64
    assert moments.steps == 3
    np.testing.assert_allclose(moments.mean, values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(moments.rms, values.square().mean(1).sqrt(), rtol=1e-6)
    np.testing.assert_array_equal(moments.dead, (values == 0).double().mean(1))
    np.testing.assert_array_equal(moments.high, values.amax(1))
    np.testing.assert_array_equal(moments.low, values.amin(1))


@pytest.mark.parametrize("kind", ["mlp", "convolutional", "transformer"])
def test_the_score_is_the_loss_by_a_factor_on_the_neuron(kind: str) -> None:
    model, inputs = make(kind, "tanh", 0)
    groups = find_groups(model, inputs).groups
    member = groups[0].consumers[0]
    layer = model.get_submodule(member.module)
    with Collector(model, groups, every=1) as collector:
        _run(collector, model, inputs)
    score = collector.statistics().moments[member.module].loss
    width = layer.get_parameter("weight").shape[member.dim]
    factor = torch.ones(width, requires_grad=True)
    tail = [1] * (layer.get_parameter("weight").ndim - 2)
    layer.register_forward_pre_hook(lambda _, args: args[0] * factor.view(-1, *tail))
    model(inputs).square().mean().backward()
    assert factor.grad is not None
    np.testing.assert_allclose(score, factor.grad.abs(), rtol=1e-3, atol=1e-7)


def test_only_some_steps_and_samples_of_training_are_measured() -> None:
    model, inputs = make("mlp", "relu", 0)
    groups = find_groups(model, inputs).groups
    with Collector(model, groups, every=4, values=10 * 24) as collector:
        for _ in range(9):
            _run(collector, model, inputs)
        model.eval()
        model(inputs)
        moments = collector.statistics().moments["2"]
        assert (moments.count, moments.steps) == (3 * 10, 3)
        collector.reset()
        assert collector.statistics().moments["2"].count == 0
    model.train()(inputs)
    assert collector.statistics().moments["2"].count == 0


def test_sums_and_peaks_of_ranks_match_those_of_all_their_samples() -> None:
    model, inputs = make("mlp", "relu", 0)
    groups = find_groups(model, inputs).groups

    def of(samples: torch.Tensor) -> Statistics:
        with Collector(model, groups, every=1) as collector:
            _run(collector, model, samples)
        return collector.statistics()

    ranks, together = [of(inputs[:12]), of(inputs[12:])], of(inputs)
    sums: Any = sum(rank.sums() for rank in ranks)
    peaks: Any = np.maximum(*(rank.peaks() for rank in ranks))
    assert sums.dtype == peaks.dtype == np.float64
    reduced = ranks[0].reduced(sums, peaks)
    for name, moments in together.moments.items():
        mine = reduced.moments[name]
        assert (mine.count, mine.steps) == (moments.count, 2)
        for row in ("mean", "rms", "dead", "high", "low"):
            np.testing.assert_allclose(getattr(mine, row), getattr(moments, row), atol=1e-6)


def test_statistics_of_no_samples_can_be_reduced() -> None:
    model, inputs = make("mlp", "relu", 0)
    nothing = Collector(model, find_groups(model, inputs).groups)
    nothing.close()
    statistics = nothing.statistics()
    again = statistics.reduced(statistics.sums(), statistics.peaks())
    assert np.isneginf(again.moments["2"].high).all()
    assert np.isposinf(again.moments["2"].low).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_step_that_is_not_finite_is_ignored(bad: float) -> None:
    model, inputs = make("mlp", "relu", 0)
    groups = find_groups(model, inputs).groups
    wrong = inputs.clone()
    wrong[0] = bad
    statistics = []
    for steps in ([inputs, wrong, inputs], [inputs, inputs]):
        with Collector(model, groups, every=1) as collector:
            for each in steps:
                _run(collector, model, each)
        statistics.append(collector.statistics())
    assert np.array_equal(statistics[0].sums(), statistics[1].sums())
    assert np.array_equal(statistics[0].peaks(), statistics[1].peaks())


def test_a_copy_of_the_model_is_not_measured() -> None:
    model, inputs = make("mlp", "relu", 0)
    groups = find_groups(model, inputs).groups
    with Collector(model, groups, every=1) as collector:
        _run(collector, model, inputs)
        before = collector.statistics().sums()
        # The copy has the hooks too, as one that averages weights has.
        copy.deepcopy(model)(100 * inputs)
        collector.step()
    after = collector.statistics().moments
    for name, moments in after.items():
        assert moments.count == len(inputs), name
    assert before.any()
