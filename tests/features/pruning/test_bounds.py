"""Removals change outputs by at most their bounds, as measured in double precision."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import unfold

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import Collector
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import GroupMember, NeuronGroup, PrunableGroups
from dlio.features.pruning.removal_plan import (
    Limits,
    Removal,
    RemovalPlan,
    plan_removals,
    weights_of,
)
from tests.conftest import examples
from tests.features.pruning.networks import ACTIVATIONS, KINDS, make

_FOUND: dict[tuple[str, str], PrunableGroups] = {}


def _found(kind: str, activation: str) -> PrunableGroups:
    key = kind, activation
    if key not in _FOUND:
        _FOUND[key] = find_groups(*make(kind, activation, 0))
    return _FOUND[key]


def _spoil(model: nn.Module, group: NeuronGroup, rng: np.random.Generator, noise: float) -> None:
    """Make some neurons near multiples of others, some nearly constant, some dead."""
    with torch.no_grad():
        neurons = rng.permutation(group.width)
        third = max(1, group.width // 5)
        for member in group.producers:
            layer: Any = model.get_submodule(member.module)
            weight = layer.weight.movedim(member.dim, 0)
            for n in range(third):
                a, b, c, d = (
                    member.channels[neurons[(k * third + n) % group.width]] for k in range(4)
                )
                scale = 1.0
                if group.activation is not None and group.activation.scales:
                    scale = float(rng.uniform(0.3, 3))
                weight[a] = scale * weight[b] * (1 + noise * torch.randn_like(weight[b]))
                if layer.bias is not None:
                    layer.bias[a] = scale * layer.bias[b]
                weight[c] *= noise
                weight[d] = 0
                if layer.bias is not None:
                    layer.bias[d] = -1.0 if n % 2 else 0.3
                if group.norm:
                    norm: Any = model.get_submodule(group.norm)
                    for tensor in (norm.weight, norm.running_var):
                        tensor[a] = tensor[b]
                    norm.running_mean[a] = scale * norm.running_mean[b]
                    norm.bias[a] = scale * norm.bias[b]
                    norm.weight[a] = norm.weight[b]


def _observed(model: nn.Module, groups: tuple[NeuronGroup, ...], inputs: torch.Tensor) -> Any:
    """Collect statistics of inputs and gradients, with the net in evaluation mode."""
    with Collector(model, groups, every=1, values=1 << 30) as collector:
        model.eval()
        for group in groups:
            for member in group.consumers:
                model.get_submodule(member.module).training = True
        model(inputs).square().mean().backward()
        collector.step()
        model.eval()
        return collector.statistics()


def _inputs(model: nn.Module, names: set[str], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Record the inputs of layers."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0].detach())
        )
        for name in names
    ]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return seen


def _lengths(layer: nn.Module, inputs: torch.Tensor) -> float:
    """Return the largest norm |(x, 1)| of a producer's input at one position."""
    if isinstance(layer, nn.Conv2d):
        assert isinstance(layer.padding, tuple)
        patches = unfold(
            inputs,
            layer.kernel_size,
            layer.dilation,
            layer.padding,
            layer.stride,
        )
        return float((patches.square().sum(1) + 1).sqrt().max())
    # In a transposed convolution without overlap, each output depends on one position.
    channel = 1 if isinstance(layer, nn.ConvTranspose2d) else -1
    return float((inputs.square().sum(channel) + 1).sqrt().max())


def _output(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return a layer's outputs with the channels as the last axis."""
    with torch.no_grad():
        out: torch.Tensor = layer(inputs)
    return out if isinstance(layer, nn.Linear) else out.movedim(1, -1)


def _change(
    model: nn.Module,
    member: GroupMember,
    what: RemovalPlan,
    removal: Removal,
    inputs: torch.Tensor,
    mean: Any,
) -> float:
    """Return how much one removal, compensated as planned, changes a next layer's outputs."""
    layer: Any = model.get_submodule(member.module)
    small = copy.deepcopy(layer)
    weight = small.weight.detach().movedim(member.dim, 0)
    mine = member.channels[removal.neuron]
    constant = torch.zeros(1)
    if removal.twin >= 0:
        weight[member.channels[removal.twin]] += removal.scale * weight[mine]
    elif member.constant:
        means = torch.from_numpy(mean)[mine]
        constant = torch.einsum(
            "cot,c->o", weight[mine].reshape(len(mine), weight.shape[1], -1), means
        )
    weight[mine] = 0
    gap = _output(small, inputs) + constant - _output(layer, inputs)
    return float(gap.norm(dim=-1).max())


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=examples(20), deadline=None)
@given(
    activation=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 2**16),
    noise=st.sampled_from([0.0, 1e-3, 0.03]),
)
def test_each_removal_changes_the_next_layers_within_its_bound(
    kind: str, activation: str, seed: int, noise: float
) -> None:
    prunable = _found(kind, activation)
    model, inputs = make(kind, activation, seed)
    rng = np.random.default_rng(seed)
    for group in prunable.groups:
        _spoil(model, group, rng, noise)
    statistics = _observed(model, prunable.groups, inputs)
    limits = Limits(constant=0.1, twin=0.2, loss=1e-2, share=1.0, multiple=1)
    # One group at a time: a bound assumes that the removals before it are applied.
    for group in prunable.groups:
        what = plan_removals([group], weights_of(model, [group]), statistics, limits)
        exact = copy.deepcopy(model).double()
        wide = inputs.double() if inputs.is_floating_point() else inputs
        names = {member.module for member in group.producers + group.consumers}
        seen = _inputs(exact, names, wide)
        for removal in what.removals:
            bound = removal.bound
            if removal.kind == "twin":
                producer = group.producers[0].module
                bound *= _lengths(exact.get_submodule(producer), seen[producer])
            for member in group.consumers:
                mean = statistics.moments[member.module].mean
                change = _change(exact, member, what, removal, seen[member.module], mean)
                # Weights and means in single precision are exact to about 1e-6.
                assert change <= bound * (1 + 1e-5) + 2e-5, (group.name, removal)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("kind", ["mlp", "convolutional", "branches", "transformer"])
def test_twins_and_constants_are_detected(kind: str, activation: str) -> None:
    prunable = _found(kind, activation)
    model, inputs = make(kind, activation, 3)
    rng = np.random.default_rng(3)
    for group in prunable.groups:
        _spoil(model, group, rng, 0.0)
    statistics = _observed(model, prunable.groups, inputs)
    limits = Limits(share=1.0, multiple=1, loss=0.0)
    what = plan_removals(prunable.groups, weights_of(model, prunable.groups), statistics, limits)
    kinds = {removal.kind for removal in what.removals}
    assert "twin" in kinds
    assert {"constant", "dead"} & kinds
    scales = {r.scale for r in what.removals if r.kind == "twin"}
    assert all(scale > 0 for scale in scales)
    if activation not in ("relu", "leaky_relu", "identity"):
        assert scales == {1.0}


def test_a_removed_neuron_is_not_a_twin_of_another() -> None:
    prunable = _found("mlp", "relu")
    model, inputs = make("mlp", "relu", 5)
    with torch.no_grad():
        layer: Any = model.get_submodule("0")
        layer.weight[:] = layer.weight[0] * torch.linspace(0.5, 2, 24)[:, None]
        layer.bias[:] = layer.bias[0] * torch.linspace(0.5, 2, 24)
    statistics = _observed(model, prunable.groups, inputs)
    limits = Limits(share=1.0, multiple=1, loss=0.0, constant=0.0)
    what = plan_removals(
        prunable.groups[:1], weights_of(model, prunable.groups), statistics, limits
    )
    assert what.keep["0"].tolist() == [r for r in range(24) if r == what.removals[0].twin]
    with torch.no_grad():
        before = model(inputs)
        apply(model, prunable.groups, what)
        torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-5)
