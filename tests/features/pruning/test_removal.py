"""Plans of removals: they keep their limits and are pure functions of their arrays."""

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlio.errors import UsageError
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import Collector, Statistics
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.features.pruning.removal_plan import (
    Limits,
    RemovalPlan,
    find_twins,
    plan_removals,
    weights_of,
)
from tests.features.pruning.networks import KINDS, make

_GROUPS: dict[str, tuple[NeuronGroup, ...]] = {}


def _case(kind: str, seed: int) -> tuple[tuple[NeuronGroup, ...], dict[str, Any], Statistics]:
    model, inputs = make(kind, "relu", seed)
    if kind not in _GROUPS:
        _GROUPS[kind] = find_groups(model, inputs).groups
    groups = _GROUPS[kind]
    with Collector(model, groups, every=1) as collector:
        model(inputs).square().mean().backward()
        collector.step()
    return groups, weights_of(model, groups), collector.statistics()


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    share=st.floats(0, 1),
    multiple=st.sampled_from([1, 4, 8]),
    loss=st.sampled_from([0.0, 0.1, 1e9]),
)
def test_plans_keep_to_share_and_multiple_and_are_pure(
    kind: str, seed: int, share: float, multiple: int, loss: float
) -> None:
    groups, weights, statistics = _case(kind, seed)
    limits = Limits(constant=0.3, twin=0.8, loss=loss, share=share, multiple=multiple)
    before = copy.deepcopy((weights, statistics.sums(), statistics.peaks()))
    what = plan_removals(groups, weights, statistics, limits)
    assert all(np.array_equal(weights[name], before[0][name]) for name in weights)
    assert np.array_equal(statistics.sums(), before[1])
    assert np.array_equal(statistics.peaks(), before[2])
    again = plan_removals(groups, copy.deepcopy(weights), statistics, limits)
    text = json.dumps(what.to_json())
    assert json.dumps(again.to_json()) == text
    assert json.dumps(RemovalPlan.from_json(json.loads(text)).to_json()) == text
    for group in groups:
        gone = [r for r in what.removals if r.group == group.name]
        assert len(gone) <= max(share * group.width, multiple)
        assert share or not gone
        assert len(gone) < group.width
        if group.name not in what.keep:
            assert not gone
            continue
        keep = what.keep[group.name].tolist()
        assert sorted([*keep, *(r.neuron for r in gone)]) == list(range(group.width))
        assert len(keep) * group.unit % multiple == 0
        assert all(r.twin in keep for r in gone if r.kind == "twin")
        assert all(0 <= r.cost <= 1 and r.bound >= 0 for r in gone)


def test_the_neurons_that_the_loss_needs_least_go_first_and_no_further_than_its_limit() -> None:
    groups, weights, statistics = _case("mlp", 1)
    group = groups[0]
    loss = statistics.moments["2"].loss[group.consumers[0].channels[:, 0]]
    order = np.argsort(loss, kind="stable")
    limit = float(loss[order[:6]].sum()) * 1.000001
    limits = Limits(constant=0.0, twin=0.0, loss=limit, share=1.0, multiple=1)
    what = plan_removals([group], weights, statistics, limits)
    unneeded = {r.neuron for r in what.removals if r.kind == "unneeded"}
    dead = {r.neuron for r in what.removals if r.kind == "dead"}
    assert unneeded == set(order[: 6 + len(dead)].tolist()) - dead


def test_frozen_groups_stay_as_they_are() -> None:
    groups, weights, statistics = _case("mlp", 1)
    limits = Limits(loss=1e9, multiple=1, frozen=frozenset({groups[0].name}))
    assert set(plan_removals(groups, weights, statistics, limits).keep) == {groups[1].name}


def test_a_width_that_is_not_a_multiple_becomes_one_or_stays() -> None:
    groups, weights, statistics = _case("mlp", 1)
    for share, kept in ((0.0, 24), (0.1, 16), (0.4, 16), (0.9, 8)):
        limits = Limits(loss=1e9, share=share)
        what = plan_removals(groups[:1], weights, statistics, limits)
        assert len(what.keep.get("0", range(24))) == kept


@pytest.mark.parametrize("share", [0.001, 1 / 25])
def test_a_share_of_less_than_a_neuron_removes_one(share: float) -> None:
    groups, weights, statistics = _case("mlp", 1)
    assert int(share * groups[0].width) == 0
    limits = Limits(loss=1e9, share=share, multiple=1)
    what = plan_removals(groups[:1], weights, statistics, limits)
    assert len(what.keep[groups[0].name]) == groups[0].width - 1


def test_at_least_the_requested_number_of_neurons_stays() -> None:
    groups, weights, statistics = _case("mlp", 1)
    limits = Limits(loss=1e9, share=1.0, multiple=1, least={groups[0].name: 9})
    what = plan_removals(groups, weights, statistics, limits)
    assert [len(what.keep[group.name]) for group in groups] == [9, 1]


def test_without_statistics_only_twins_are_removed() -> None:
    groups, weights, statistics = _case("mlp", 1)
    weights["0.weight"][3] = 2 * weights["0.weight"][5]
    weights["0.bias"][3] = 2 * weights["0.bias"][5]
    blind = Statistics(
        {
            name: replace(m, count=0.0, steps=0.0, high=m.high - np.inf, low=m.low + np.inf)
            for name, m in statistics.moments.items()
        }
    )
    what = plan_removals(groups, weights, blind, Limits(loss=1e9, multiple=1))
    (removal,) = what.removals
    assert removal.kind == "twin"
    assert {removal.neuron, removal.twin} == {3, 5}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(2, 60),
    block=st.integers(1, 70),
    scales=st.booleans(),
)
def test_twins_do_not_depend_on_the_size_of_blocks(
    seed: int, count: int, block: int, scales: bool
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, 5))
    copies = rng.integers(0, count, count // 2)
    vectors[: count // 2] = vectors[copies] * (
        rng.uniform(0.5, 2, (count // 2, 1)) if scales else 1
    )
    order = rng.permutation(count)
    twins = find_twins(vectors, order, scales, 1e-3, block)
    assert {t.of for t in twins} == {t.of for t in find_twins(vectors, order, scales, 1e-3, count)}
    assert not {t.of for t in twins} & {t.twin for t in twins}
    for twin in twins:
        gap = vectors[twin.of] - twin.scale * vectors[twin.twin]
        assert np.isclose(np.linalg.norm(gap), twin.distance)
        assert twin.distance <= 1e-3 * np.linalg.norm(vectors[twin.of])


def test_twins_are_judged_after_the_removals_before_them() -> None:
    model, inputs = make("mlp", "relu", 2)
    groups = find_groups(model, inputs).groups
    with torch.no_grad():
        model.get_parameter("0.weight")[:8] = 0
        model.get_parameter("0.bias")[:8] = -1
        for name in ("2.weight", "2.bias"):
            model.get_parameter(name)[3] = model.get_parameter(name)[5]
        model.get_parameter("2.weight")[3, :8] = 7
    with Collector(model, groups, every=1) as collector:
        model(inputs).square().mean().backward()
        collector.step()
    limits = Limits(loss=0.0, twin=1e-3, multiple=1)
    weights = weights_of(model, groups)
    what = plan_removals(groups, weights, collector.statistics(), limits)
    dead = [r for r in what.removals if r.group == "0"]
    assert [(r.neuron, r.kind, r.bound) for r in dead] == [(n, "dead", 0.0) for n in range(8)]
    twins = [r for r in what.removals if r.kind == "twin"]
    assert [{r.neuron, r.twin} for r in twins] == [{3, 5}]
    assert twins[0].bound == 0.0
    alone = plan_removals(groups[1:], weights, collector.statistics(), limits)
    assert not [r for r in alone.removals if r.kind == "twin"]


def test_before_an_unknown_activation_only_identical_neurons_are_merged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ELU(1.5), nn.Linear(16, 3))
    inputs = torch.randn(32, 5)
    groups = find_groups(model, inputs).groups
    with torch.no_grad():
        for of, twin, factor in ((1, 2, 1.0), (3, 4, 1.0 + 1e-5), (5, 6, 2.0)):
            for tensor in (model.get_parameter("0.weight"), model.get_parameter("0.bias")):
                tensor[of] = factor * tensor[twin]
    with Collector(model, groups, every=1) as collector:
        model(inputs).square().mean().backward()
        collector.step()
    limits = Limits(constant=0.0, loss=0.0, multiple=1)
    (removal,) = plan_removals(
        groups, weights_of(model, groups), collector.statistics(), limits
    ).removals
    assert {removal.neuron, removal.twin} == {1, 2}
    assert removal.bound == 0.0


@pytest.mark.parametrize(
    "options", [{"multiple": 0}, {"share": 1.5}, {"loss": -1.0}, {"twin": float("nan")}]
)
def test_invalid_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Limits(**options)
