"""Samples that meet before a gradient is seen are told, and steps that keep them apart are not."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dlio.integrations.script.batch_origins import BatchOrigins
from dlio.integrations.script.mixed_inputs import MixedInputs

_SAMPLES = 6
_Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_NET = nn.Linear(4, 3)
_TABLE = torch.rand(3)


def _loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(_NET(x), y)


def _each(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(_NET(x), y, reduction="none")


def _mixed_by(index: torch.Tensor) -> _Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = _NET(0.7 * x + 0.3 * x[index])
        return 0.7 * nn.functional.cross_entropy(out, y) + 0.3 * nn.functional.cross_entropy(
            out, y[index]
        )

    return step


def _mixed_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flipped = x.flip(0).mul_(0.3)
    x.mul_(0.7).add_(flipped)
    return _loss(x, y)


def _cut(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 1:3] = x[torch.tensor([1, 2, 3, 4, 5, 0]), 1:3]
    return _loss(x, y)


def _hard(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = _each(x, y)
    return (losses * (losses.detach() > losses.detach().median())).mean()


def _soft(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = _each(x, y)
    return (losses * losses.detach().softmax(0)).sum()


def _weighed_by_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = _TABLE[y]
    return (_each(x, y) * (weights / weights.sum())).sum()


def _class_weights(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        _NET(x), y, weight=1 / (torch.bincount(y, minlength=3) + 1.0)
    )


def _positive_weight(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target = (y == 1).float()
    weight = (1 - target).sum() / target.sum()
    return nn.functional.binary_cross_entropy_with_logits(_NET(x)[:, 0], target, pos_weight=weight)


def _positive_weight_of_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        _NET(x)[:, 0], (y == 1).float(), pos_weight=_TABLE[0]
    )


def _centred_by_teacher(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = _NET(x)
        goal = nn.functional.softmax(out - out.mean(0), 1)
    return nn.functional.cross_entropy(_NET(x), goal)


def _in_order_of_length(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lengths = x.abs().sum(1)
    ordered, order = lengths.sort(descending=True)
    x, y = x[order], y[order]
    return (_each(x / ordered[:, None], y) / lengths[order]).mean()


def _shuffled_alike(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    return _loss(x[order] * 2 + x.index_select(0, order), y[order])


def _padded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lengths = y + 1
    kept = torch.arange(4)[None] < lengths[:, None]
    most = lengths.max()
    kept = kept[:, :most] & (torch.arange(int(most))[None] < lengths[:, None])
    errors: torch.Tensor = (_NET(x).square()[:, :most] * kept[:, :3]).sum()
    return errors / kept.sum().clamp(min=1)


def _in_chunks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = [_loss(*each) for each in zip(torch.split(x, 2), torch.split(y, 2), strict=True)]
    return torch.stack(losses).sum()


def _with_metrics(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    right = (out.argmax(1) == y).float().mean() + x.mean() + y.max()
    assert not torch.isnan(x).any()
    return nn.functional.cross_entropy(out, y) + 0 * float(right)


def _augmented(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(len(x)) > 0.5
    x = torch.where(mask[:, None], x.flip(1), x.roll(1, dims=1)) + torch.randn_like(x)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    x[mask] = x[mask].flip(1)
    return (_each(x, y) * _TABLE[y]).mean()


def _penalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_(True)
    slope = torch.autograd.grad(_NET(x).sum(), x, create_graph=True)[0]
    return _loss(x, y) + slope.square().sum(1).mean()


def _attacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(True)
    torch.autograd.backward(_loss(x, y))
    assert x.grad is not None
    return _loss((x + x.grad / x.grad.norm()).detach(), y)


def _attacked_each(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(_loss(x, y), x)
    other = (x + slope.sign() + slope / slope.norm(dim=1, keepdim=True)).detach()
    return _loss(other, y)


def _balanced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    first, second = nn.functional.cross_entropy(out, y), out.square().mean()
    result: torch.Tensor = first + (first / second).detach() * second
    return result


def _balanced_without_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    first, second = nn.functional.cross_entropy(out, y), out.square().mean()
    with torch.no_grad():
        shares = torch.stack([first, second]).softmax(0)
    result: torch.Tensor = (shares * torch.stack([first, second])).sum()
    return result


def _balanced_by_gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    first, second = nn.functional.cross_entropy(out, y), out.square().mean()
    lengths = [
        torch.autograd.grad(each, _NET.weight, retain_graph=True)[0].norm()
        for each in (first, second)
    ]
    result: torch.Tensor = first + lengths[0] / lengths[1] * second
    return result


def _hardest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = _each(x, y)
    return (losses * (losses > losses.mean())).mean()


def _mixed_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    return nn.functional.cross_entropy(0.7 * out + 0.3 * out[_LAST], y)


def _numbers_of_each(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = _NET(x)
    losses = [nn.functional.cross_entropy(out[k], y[k]) for k in range(len(x))]
    weighed = sum(each.detach() * each for each in losses) / len(x)
    weight = _NET.weight.norm()
    ordered = out[_LAST]
    together = (ordered * 2 - nn.functional.one_hot(y, 3)[_LAST]).square().mean()
    weighted = _loss(x, y) * weight.detach() - _loss(x, y).detach()
    result: torch.Tensor = weighed + together + weighted
    return result


_LAST = torch.tensor([5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize(
    ("step", "function"),
    [
        (_mixed_by(_LAST), "an index"),
        (lambda x, y: _loss(0.5 * (x + x.flip(0)), y), "flip"),
        (lambda x, y: _loss(torch.lerp(x, x.roll(1, 0), 0.3), y), "roll"),
        (_mixed_in_place, "flip"),
        (_cut, "an index"),
        (lambda x, y: _loss(x - x.mean(0), y), "mean"),
        (lambda x, y: _loss(x / x.std(dim=0, keepdim=True), y), "std"),
        (lambda x, y: _loss(torch.div(x, torch.max(x)), y), "max"),
        (lambda x, y: nn.functional.mse_loss(_NET(x) - x[:, :3].mean(0), _NET(x)), "mean"),
        (_hard, "median"),
        (_soft, "softmax"),
        (lambda x, y: _loss(nn.functional.normalize(x, dim=0), y), "normalize"),
        (_weighed_by_sum, "sum"),
        (_class_weights, "bincount"),
        (_positive_weight, "sum"),
        (_centred_by_teacher, "mean"),
        (_attacked, "norm"),
        (_balanced, "div"),
        (_balanced_without_gradient, "cross_entropy"),
        (_balanced_by_gradients, "cross_entropy"),
        (_hardest, "mean"),
        (_mixed_inside, "samples in another order"),
        (
            lambda x, y: nn.functional.mse_loss(_NET(x)[_LAST.tolist(), 0], x[:, 0]),
            "samples in another order",
        ),
    ],
)
def test_samples_that_meet_are_told(step: _Step, function: str) -> None:
    said = _said(step)
    assert len(set(said)) == 1
    assert f"({function} over the batch)" in said[0]
    assert ("by the number of ranks" in said[0]) == (function in ("sum", "softmax"))
    assert said[0].startswith("test_mixed_inputs.py:")


@pytest.mark.parametrize(
    "step",
    [
        _loss,
        lambda x, y: _loss((x / 255 - _TABLE.mean()) * 2, y),
        _in_order_of_length,
        _shuffled_alike,
        _padded,
        _with_metrics,
        _augmented,
        _penalised,
        _attacked_each,
        _numbers_of_each,
        lambda x, y: nn.functional.mse_loss(_NET(x)[_LAST.tolist(), 0], x[_LAST, 0]),
        lambda x, y: (_each(x, y) * (y > 0)).sum() / (y > 0).sum(),
        lambda x, y: nn.functional.mse_loss(_NET(x), nn.functional.one_hot(y, 3).float()),
        lambda x, y: _loss(nn.functional.normalize(x).softmax(-1), y),
        lambda x, y: _loss(x.view(-1).view(_SAMPLES, 4)[torch.arange(_SAMPLES)], y),
        _in_chunks,
        _positive_weight_of_data,
    ],
)
def test_steps_that_keep_samples_apart_are_not(step: _Step) -> None:
    assert _said(step) == []


def test_samples_are_known_where_as_many_features_are_and_a_gradient_is_asked_for() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x @ torch.ones(4, _SAMPLES)  # A square.
        x.requires_grad_(True)
        return (x * x[torch.tensor([1, 0, 2, 3, 4, 5])]).sum() / len(y)

    assert any("samples in another order" in each for each in _said(step))


def _said(step: _Step) -> list[str]:
    said: list[str] = []
    watch = MixedInputs(said.append)
    torch.manual_seed(0)
    x, y = torch.randn(_SAMPLES, 4), torch.tensor([0, 1, 2, 0, 1, 1])
    watch.start([x, y], _SAMPLES)
    try:
        torch.autograd.backward(step(x, y))
    finally:
        watch.close()
    return said


class _Keeping:
    """Steps that keep something of their samples for later ones."""

    def __init__(self) -> None:
        self.queue, self.kept = torch.rand(20, 3), [torch.rand(_SAMPLES, 3)]
        self.ahead: tuple[torch.Tensor, torch.Tensor] | None = None
        self.averages = torch.rand(4)

    def by_queue(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = _NET(x)
        loss: torch.Tensor = (out @ self.queue.clone().T).logsumexp(1).mean()
        self.queue[:_SAMPLES] = out.detach()
        return loss

    def by_list(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = _NET(x)
        loss: torch.Tensor = (out @ torch.cat(self.kept).T).logsumexp(1).mean()
        self.kept.append(out.detach())
        return loss

    def by_average(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = _loss(x + self.averages, y)
        self.averages = 0.9 * self.averages + 0.1 * x.mean(0)
        return loss

    def taken_ahead(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last, self.ahead = self.ahead, ((x - 1) / 2, y)
        return _loss(*(last or self.ahead))

    def for_a_metric(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = _NET(x)
        self.kept.append(out.detach())
        torch.cat(self.kept).mean()
        return nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("by_queue", True),
        ("by_list", True),
        ("by_average", True),
        ("taken_ahead", False),
        ("for_a_metric", False),
    ],
)
def test_samples_of_earlier_batches_are_told_where_later_ones_meet_them(
    name: str, is_told: bool
) -> None:
    said: list[str] = []
    watch = MixedInputs(said.append)
    step: _Step = getattr(_Keeping(), name)
    for _ in range(3):
        x, y = torch.randn(_SAMPLES, 4), torch.arange(_SAMPLES) % 3
        watch.start([x, y], _SAMPLES)
        try:
            torch.autograd.backward(step(x, y))
        finally:
            watch.close()
        del x, y
    assert any("values of samples of earlier batches" in each for each in said) == is_told
    assert all(each.startswith("test_mixed_inputs.py:") for each in said)


@pytest.mark.parametrize("mixes", [True, False])
def test_a_collate_function_is_looked_at_too(mixes: bool) -> None:
    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(samples)
        mixed = torch.lerp(batch["x"], batch["x"].roll(1, 0), 0.3)
        return {"x": mixed if mixes else (batch["x"] - 1) / 2, "y": batch["y"]}

    said: list[str] = []
    run = MixedInputs(said.append).around_collate(collate)
    for _ in range(3):
        batch = run([{"x": torch.randn(4), "y": torch.tensor(k)} for k in range(_SAMPLES)])
    assert batch["x"].shape == (_SAMPLES, 4)
    assert len(said) == 2 * mixes  # Of the first call and the second.
    assert all("(roll over the batch)" in each for each in said)


def test_it_ends_below_a_mode_of_the_script_and_after_it() -> None:
    watch = MixedInputs(print)
    watch.start([], _SAMPLES)
    with torch.device("cpu"):
        watch.close()
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    watch.close()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("watch", [MixedInputs(print), BatchOrigins(lambda _: None)])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.Tensor, "backward"),
        (torch.Tensor, "item"),
        (nn.functional, "cross_entropy"),
        (torch.autograd, "backward"),
    ],
)
def test_what_a_script_puts_in_the_place_of_a_function_is_called_once(
    owner: Any, name: str, watch: MixedInputs | BatchOrigins, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    x, y = torch.rand(_SAMPLES, 4), torch.arange(_SAMPLES) % 3
    if isinstance(watch, MixedInputs):
        watch.start([x, y], _SAMPLES)
    else:
        watch.start()
    try:
        loss: Any = _loss(x, y)
        if owner is torch.autograd:
            torch.autograd.backward([loss])
        else:
            loss.backward()
        loss.item()
    finally:
        watch.close()
    assert calls == [name]
