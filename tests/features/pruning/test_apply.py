"""A model cut in place, with its optimizer, equals a smaller model."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dlio
from dlio.errors import DlioError
from dlio.exchange.cut import TensorCut
from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.input_statistics import Collector
from dlio.features.pruning.model_surgery import PrunedLayout, apply, shrink_to
from dlio.features.pruning.neuron_groups import PrunableGroups
from dlio.features.pruning.removal_plan import Limits, RemovalPlan, plan_removals, weights_of
from tests.features.pruning.networks import KINDS, make

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
_FOUND: dict[str, PrunableGroups] = {}


def _found(kind: str) -> PrunableGroups:
    if kind not in _FOUND:
        _FOUND[kind] = find_groups(*make(kind, "relu", 0))
    return _FOUND[kind]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    out = model(inputs)
    target = torch.linspace(-1, 1, out.numel()).view_as(out)
    (out - target).square().mean().backward()
    optimizer.step()


def _random_plan(prunable: PrunableGroups, seed: int) -> RemovalPlan:
    rng = np.random.default_rng(seed)
    keep = {
        group.name: np.sort(rng.permutation(group.width)[: rng.integers(1, group.width)])
        for group in prunable.groups
        if rng.random() < 0.8
    }
    return RemovalPlan(keep)


def _by_hand(model: nn.Module, small: nn.Module, cuts: Sequence[TensorCut]) -> None:
    """Load slices of the whole model's tensors into a small model."""
    state = model.state_dict()
    for cut in cuts:
        tensor = state[cut.name]
        for dim, kept in cut.kept:
            tensor = tensor[(slice(None),) * dim + (kept,)]
        state[cut.name] = tensor
    small.load_state_dict(state)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_cut_model_equals_the_whole_one_with_the_cut_neurons_ignored(
    kind: str, seed: int
) -> None:
    prunable = _found(kind)
    model, inputs = make(kind, "relu", seed)
    model.eval()
    what = _random_plan(prunable, seed)
    whole = copy.deepcopy(model)
    with torch.no_grad():
        for group in prunable.groups:
            if group.name in what.keep:
                gone = np.setdiff1d(np.arange(group.width), what.keep[group.name])
                for member in group.consumers:
                    weight = whole.get_submodule(member.module).get_parameter("weight")
                    weight.movedim(member.dim, 0)[member.channels[gone].ravel()] = 0
        apply(model, prunable.groups, what)
        torch.testing.assert_close(model(inputs), whole(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_steps_after_a_cut_equal_those_of_a_small_net_with_the_sliced_state(
    kind: str, name: str
) -> None:
    prunable = _found(kind)
    model, inputs = make(kind, "relu", 1)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        _step(model, optimizer, inputs)
    whole, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    applied = apply(model, prunable.groups, _random_plan(prunable, 7), [optimizer])

    small, _ = make(kind, "relu", 2)
    shrink_to(small, PrunedLayout.from_json(json.loads(json.dumps(applied.layout.to_json()))))
    _by_hand(whole, small, applied.cuts)
    by_name = {cut.name: cut for cut in applied.cuts}
    for index, state in saved["state"].items():
        cut = by_name.get(ordered[index])
        for key, value in state.items():
            if cut is not None and value.ndim:
                for dim, kept in cut.kept:
                    if value.shape[dim] == cut.before[dim]:
                        value = value.index_select(dim, kept)
                state[key] = value
    fresh = OPTIMIZERS[name](small.parameters())
    fresh.load_state_dict(saved)
    for _ in range(4):
        _step(model, optimizer, inputs)
        _step(small, fresh, inputs)
    for (name, mine), other in zip(model.named_parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=name)


def test_parameters_hooks_and_attributes_are_the_same_objects_after_a_cut() -> None:
    prunable = _found("convolutional")
    model, inputs = make("convolutional", "relu", 1)
    fired: list[tuple[int, ...]] = []
    seen: list[int] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: fired.append(tuple(p.shape)))  # type: ignore[no-untyped-call]
        for p in model.parameters()
    ]
    weight = model.get_parameter("0.weight")
    weight.register_hook(lambda grad: seen.append(len(grad)))  # type: ignore[no-untyped-call]
    weight.mark = "mine"  # type: ignore[attr-defined]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _step(model, optimizer, inputs)
    before = list(model.parameters())
    mean = model.get_buffer("1.running_mean")
    keep = np.arange(16, dtype=np.int64)
    applied = apply(model, prunable.groups, RemovalPlan({"0": keep}), [optimizer])
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model.get_buffer("1.running_mean") is mean
    assert {cut.name for cut in applied.cuts} == {
        *("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight")
    }
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape == (16, 3, 3, 3)
    assert weight.mark == "mine"  # type: ignore[attr-defined]
    fired.clear()
    seen.clear()
    _step(model, optimizer, inputs)
    assert sorted(fired) == sorted(tuple(p.shape) for p in model.parameters())
    assert seen == [16]
    for handle in handles:
        handle.remove()
    fired.clear()
    _step(model, optimizer, inputs)
    assert fired == []


def test_aligned_tensors_are_cut_with_the_parameters() -> None:
    prunable = _found("mlp")
    model, _ = make("mlp", "relu", 1)
    residuals = {name: p.detach().clone() for name, p in model.named_parameters()}

    def cut(cuts: Sequence[TensorCut]) -> None:
        for one in cuts:
            residuals[one.name] = one.of(residuals[one.name])

    apply(model, prunable.groups, _random_plan(prunable, 3), aligned=[cut])
    for name, parameter in model.named_parameters():
        assert torch.equal(residuals[name], parameter)


def test_a_refused_cut_changes_nothing() -> None:
    prunable = _found("mlp")
    model, inputs = make("mlp", "relu", 1)
    before = copy.deepcopy(model.state_dict())
    what = RemovalPlan({"0": np.arange(8)}, shifts={"2.bias": np.ones(16)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.get_parameter("2.weight")]["flat"] = torch.zeros(384)
    with pytest.raises(DlioError, match=r"'flat' of 2\.weight has shape \(384,\)"):
        apply(model, prunable.groups, what, [optimizer])
    optimizer.state[model.get_parameter("2.weight")] = {"sides": [torch.eye(24), torch.eye(16)]}
    with pytest.raises(DlioError, match=r"'sides' of 2\.weight is a list of tensors"):
        apply(model, prunable.groups, what, [optimizer])
    output = model(inputs)
    with pytest.raises(DlioError, match="cannot be shrunk while something else refers"):
        apply(model, prunable.groups, what)
    del output
    with pytest.raises(DlioError, match="a different width of"):
        apply(model, prunable.groups, RemovalPlan({"0": np.arange(25)}))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    apply(model, prunable.groups, what)
    assert model.get_parameter("0.weight").shape == (8, 7)


def test_weights_keep_their_memory_format() -> None:
    prunable = _found("convolutional")
    model, inputs = make("convolutional", "relu", 1)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    apply(model, prunable.groups, RemovalPlan({"0": np.arange(8)}))
    for name in ("0.weight", "3.weight"):
        weight = model.get_parameter(name)
        assert weight.grad is not None
        for tensor in (weight, weight.grad):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            assert not tensor.is_contiguous()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_fused_optimizers_has_the_weights_memory_format(
    kind: type[torch.optim.Optimizer],
) -> None:
    """Fused optimizers assume that weights and state are laid out alike in memory.

    Adam has a large eps: otherwise rounding of a gradient of 0 becomes a whole step.
    """
    prunable = _found("convolutional")
    weights = []
    for fused in (True, False):
        model, inputs = make("convolutional", "relu", 1)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-3}
        optimizer = kind(model.parameters(), lr=0.01, fused=fused, **options)  # type: ignore[call-arg]
        for step in range(6):
            if step == 3:
                apply(model, prunable.groups, RemovalPlan({"0": np.arange(8)}), [optimizer])
            _step(model, optimizer, inputs)
        weights.append(model.get_parameter("3.weight").detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_nothing_to_remove_keeps_the_layout() -> None:
    prunable = _found("mlp")
    model, _ = make("mlp", "relu", 1)
    layout = PrunedLayout(3)
    assert apply(model, prunable.groups, RemovalPlan(), layout=layout).layout is layout


@pytest.mark.parametrize("kind", list(KINDS))
def test_rounds_of_cuts_are_one_layout_for_a_new_model_and_an_export(
    kind: str, tmp_path: Path
) -> None:
    prunable = _found(kind)
    model, inputs = make(kind, "relu", 1)
    groups, layout = prunable.groups, PrunedLayout()
    rng = np.random.default_rng(5)
    for version in (1, 2, 3):
        keep = {
            group.name: np.sort(rng.permutation(group.width)[: max(2, group.width * 3 // 4)])
            for group in groups
        }
        applied = apply(model, groups, RemovalPlan(keep), layout=layout)
        groups, layout = applied.groups, applied.layout
        assert layout.version == version
        assert {g.name: g.width for g in groups} == {
            n: len(left) for n, left in layout.groups.items()
        }
    model.eval()
    again = find_groups(model, inputs)
    assert [(g.name, g.width) for g in again.groups] == [(g.name, g.width) for g in groups]
    for mine, other in zip(groups, again.groups, strict=True):
        for a, b in zip(mine.members, other.members, strict=True):
            assert a.key == b.key
            assert np.array_equal(a.channels, b.channels)

    path = tmp_path / "pruned.pt"
    torch.save({"model": model.state_dict(), "layout": json.dumps(layout.to_json())}, path)
    saved = torch.load(path, weights_only=True)
    fresh, _ = make(kind, "relu", 9)
    shrink_to(fresh.eval(), PrunedLayout.from_json(json.loads(saved["layout"])))
    fresh.load_state_dict(saved["model"])
    with torch.no_grad():
        expected = model(inputs)
        assert torch.equal(fresh(inputs), expected)
        exported = torch.export.export(fresh, (inputs,)).module()
        torch.testing.assert_close(exported(inputs), expected, rtol=1e-5, atol=1e-5)
    wide, _ = make(kind, "relu", 1, width=40)
    with pytest.raises(DlioError, match="make the model with the options"):
        shrink_to(wide, layout)


def test_a_whole_round_keeps_the_outputs_of_a_net() -> None:
    """Statistics, plan and cut together, on a net with many redundant neurons."""
    model, inputs = make("residual", "relu", 4)
    prunable = find_groups(model, inputs)
    with torch.no_grad():
        for group in prunable.groups:
            for member in group.producers + group.through:
                layer: Any = model.get_submodule(member.module)
                layer.weight[8:] = layer.weight[:8].repeat(2, *[1] * (layer.weight.ndim - 1))
                for name in ("bias", "running_mean", "running_var"):
                    tensor = getattr(layer, name, None)
                    if tensor is not None:
                        tensor[8:] = tensor[:8].repeat(2)
                layer.weight[20:] = 0
                if getattr(layer, "bias", None) is not None:
                    layer.bias[20:] = 0
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with Collector(model, prunable.groups, every=1) as collector:
        model.train()(inputs).square().mean().backward()
        collector.step()
        optimizer.zero_grad()
    what = plan_removals(
        prunable.groups,
        weights_of(model, prunable.groups),
        collector.statistics(),
        Limits(loss=0.0),
    )
    model.eval()
    with torch.no_grad():
        before = model(inputs)
        applied = apply(model, prunable.groups, what, [optimizer])
        assert all(group.width % 8 == 0 for group in applied.groups)
        assert sum(group.width for group in applied.groups) < 3 * 24
        torch.testing.assert_close(model(inputs), before, rtol=1e-4, atol=1e-4)


def test_the_guides_example_runs_and_prunes() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/pruning.md").read_text()
    code = guide.split("```python")[1].split("```")[0]
    model, images = make("convolutional", "relu", 1)
    with torch.no_grad():
        model.get_parameter("3.weight")[:8] = 0
        model.get_parameter("3.bias")[:8] = -1
    batch = images, torch.arange(8) % 4
    names: dict[str, object] = {
        "dlio": dlio,
        "model": model,
        "images": images,
        "held_images": images,
        "held_labels": batch[1],
        "loader": [batch] * 130,
        "total_steps": 200,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    }
    exec(code, names)
    apoptosis = names["apoptosis"]
    assert isinstance(apoptosis, dlio.Apoptosis)
    assert apoptosis.steps == 130
    # A quarter of 16 neurons is not a multiple of 8, so the first rounds remove nothing.
    assert [each.step for each in apoptosis.rounds][:1] == [48]
    assert model.get_parameter("3.weight").shape[0] in (8, 16)
