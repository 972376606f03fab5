"""Terms of a loss are read from its graph, and so are losses that compare samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dlio.exchange.loss_terms import (
    NEARLY_NONE,
    GraphStates,
    chain_to,
    count_along,
    find_terms,
    selects_nothing,
)
from dlio.exchange.mixed_samples import mixed_samples
from dlio.integrations.script.learned_products import learned_products, multiplied_values

_N = 8
Loss = Callable[[], torch.Tensor]
torch.manual_seed(0)
_x, _t, _y = torch.randn(_N, 6), torch.randn(_N, 4), torch.arange(_N) % 4
_net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
_weight, _scale = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(()))
_mask = torch.arange(_N) < 5


def _out() -> torch.Tensor:
    scores: torch.Tensor = _net(_x)
    return scores


def _penalty() -> torch.Tensor:
    squares = [p.square().sum() for p in _net.parameters()]
    result: torch.Tensor = torch.stack(squares).sum() + _weight.norm(p=2)
    return result


_MEANS: dict[str, tuple[Loss, list[tuple[str, float]]]] = {
    "fused": (lambda: functional.cross_entropy(_out(), _y), [("cross_entropy", 8)]),
    "ignored": (
        lambda: functional.cross_entropy(_out(), _y, ignore_index=0),
        [("cross_entropy", 6)],
    ),
    "raw": (lambda: functional.mse_loss(_x @ _weight, _t), [("mse_loss", 32)]),
    "custom": (lambda: (_out() - _t).square().mean(1).mean(), [("mean", 8)]),
    "features": (lambda: (_out() - _t).square().mean(0).sum(), [("mean", 8)]),
    "selected": (lambda: (_out() - _t)[_mask].abs().mean(), [("mean", 20)]),
    "penalty": (lambda: functional.mse_loss(_out(), _t) + 0.1 * _penalty(), [("mse_loss", 32)]),
    "uncertain": (lambda: (-_scale).exp() * functional.mse_loss(_out(), _t), [("mse_loss", 32)]),
    "stack": (
        lambda: torch.stack([functional.cross_entropy(_out(), _y), _out().mean()]).mean(),
        [("cross_entropy", 8), ("mean", 32)],
    ),
}


@pytest.mark.parametrize("name", _MEANS)
def test_means_tell_what_they_divide_by(name: str) -> None:
    make, expected = _MEANS[name]
    terms = find_terms([make()], GraphStates(_N))
    assert sorted((term.name, term.count) for term in terms.terms) == sorted(expected)
    assert not any(term.is_sum for term in terms.terms)
    assert not terms.unknown


def _loop(of: Callable[[int], torch.Tensor]) -> torch.Tensor:
    loss = torch.zeros(())
    for k in range(_N):
        loss = loss + of(k)
    return loss


@pytest.mark.parametrize(
    ("make", "divisors"),
    [
        (lambda: _loop(lambda k: functional.mse_loss(_net(_x[k]), _t[k])), []),
        (lambda: _loop(lambda k: functional.mse_loss(_net(_x[k]), _t[k])) / len(_x), [_N]),
        (lambda: _loop(lambda k: functional.cross_entropy(_out()[k : k + 1], _y[k : k + 1])), []),
        (lambda: _loop(lambda k: (k + 1) * functional.mse_loss(_net(_x[k]), _t[k])) / 3, [3]),
        (lambda: torch.stack([(_net(each) - 1).abs().mean() for each in _x]).mean(), [_N]),
        (lambda: torch.stack([each.square().mean() for each in _out().unbind()]).sum(), []),
        (lambda: _loop(lambda k: (_out()[k] - _t[k]).abs().sum()) / 5, [5]),
        (lambda: _loop(lambda k: (_out()[k].expand(_N, 4) - _t).abs().sum()) / 5, [5]),
    ],
)
def test_terms_of_single_samples_are_a_sum_over_them(make: Loss, divisors: list[float]) -> None:
    (term,) = find_terms([make()], GraphStates(_N)).terms
    assert (term.is_sum, len(term.each), term.shape) == (True, _N, (_N,))
    assert [each.value for each in term.divisors] == pytest.approx(divisors)


def test_terms_of_all_samples_are_not_joined_though_they_are_as_many() -> None:
    def heads() -> torch.Tensor:
        wide = torch.cat([_out(), _out()], 1)
        return torch.stack([wide[:, k].square().mean() for k in range(_N)]).mean()

    terms = find_terms([heads()], GraphStates(_N)).terms
    assert [(term.is_sum, term.count, term.divisors) for term in terms] == [(False, _N, ())] * _N
    one = functional.mse_loss(_net(_x[:1]), _t[:1]) / 1
    # What a line of the script does with one sample, it remembers, by term.
    for name in ("mse_loss", "sum"):
        (term,) = find_terms([one], GraphStates(1), {f"{name} of each sample"}).terms
        assert term.is_sum == (name == "mse_loss")


def test_predictions_may_be_given_where_the_target_is_expected() -> None:
    loss = functional.mse_loss(_t, _out())
    (term,) = find_terms([loss], GraphStates(_N)).terms
    assert (term.name, term.is_sum, term.count) == ("mse_loss", False, _t.numel())
    assert count_along(loss, chain_to(loss, term)) == _t.numel()


_SUMS: dict[str, tuple[Loss, list[float]]] = {
    "fused": (lambda: functional.mse_loss(_out(), _t, reduction="sum"), []),
    "by samples": (lambda: (_out() - _t).abs().sum() / len(_x), [8]),
    "halved": (lambda: -0.5 * (1 + _out()).sum() / len(_x), [2, 8]),
    "masked": (lambda: ((_out() - _t).square().mean(1) * _mask).sum() / _mask.sum(), [5]),
    "dot": (lambda: torch.einsum("bc,bc->", _out(), _t) / 3, [3]),
    "vector": (lambda: functional.cross_entropy(_out(), _y, reduction="none"), []),
}


@pytest.mark.parametrize("name", _SUMS)
def test_sums_tell_by_what_they_are_divided(name: str) -> None:
    make, divisors = _SUMS[name]
    terms = find_terms([make()], GraphStates(_N))
    (term,) = terms.terms
    assert term.is_sum
    assert [abs(each.value) for each in term.divisors] == pytest.approx(divisors)
    assert [each.is_tensor for each in term.divisors] == [name == "masked"] * len(divisors)
    assert not terms.unknown


@pytest.mark.parametrize(
    ("operation", "make"),
    [
        ("sqrt", lambda: functional.mse_loss(_out(), _t).sqrt()),
        ("div", lambda: 1 - (_out() * _t).sum() / _out().sum()),
        ("mul", lambda: functional.mse_loss(_out(), _t) * _out().mean()),
        ("std", lambda: functional.mse_loss(_out(), _t) + _out().std(0).mean()),
        ("pow", lambda: ((_out().T @ _out()) / _N - torch.eye(4)).pow(2).sum()),
    ],
)
def test_a_loss_that_is_not_linear_above_its_reductions_is_told(operation: str, make: Loss) -> None:
    assert find_terms([make()], GraphStates(_N)).unknown == [operation]


def _mixed(make: Loss) -> str | None:
    loss = make()
    return mixed_samples([loss], _N, find_terms([loss], GraphStates(_N)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: functional.cross_entropy(_out() @ _out().T, torch.arange(_N)),
        lambda: functional.cross_entropy(_out() @ _t.T, torch.arange(_N)),
        lambda: (lambda z: z @ z.T)(torch.cat([_out(), _out()])).logsumexp(1).mean(),
        lambda: (_out()[None] - _out()[:, None]).square().sum(2).mean(),
        lambda: torch.cdist(_out(), _out()).mean(),
        lambda: functional.triplet_margin_loss(
            _out()[torch.tensor([0, 1])], _out()[torch.tensor([2, 3])], _out()[torch.tensor([4, 5])]
        ),
        lambda: (_out() - _out().mean(0)).square().mean(),
        lambda: (_out() - _out()[_y == 0].mean(0)).square().mean(),
        lambda: functional.mse_loss(_out(), _t) + _out().std(0).mean(),
        lambda: ((_out().T @ _out()) / _N - torch.eye(4)).pow(2).sum(),
        lambda: functional.cross_entropy(_out(), _y, reduction="none").topk(3).values.mean(),
        lambda: (_out() - _t).abs().view(-1).sort(descending=True).values[:9].mean(),
        lambda: (_out() - _t).square().max(0).values.mean(),
    ],
)
def test_losses_that_compare_samples_are_found(make: Loss) -> None:
    assert _mixed(make) is not None


def test_a_sample_may_be_selected_several_times() -> None:
    boxes = torch.arange(_N).repeat_interleave(2)
    assert _mixed(lambda: (_out()[boxes] - 1).abs().sum() / 9) is None
    assert _mixed(lambda: (_out()[boxes.flip(0)] - 1).abs().sum() / 9) is not None


@pytest.mark.parametrize(
    ("positives", "is_masked", "expected"),
    [(0, False, True), (1, False, True), (3, False, False), (0, True, False), (1, True, False)],
)
def test_a_divisor_of_1_may_stand_for_no_element(
    positives: int, is_masked: bool, expected: bool
) -> None:
    chosen = (torch.arange(_N) < positives).float()[:, None]
    each = _out().square() * chosen if is_masked else _out().square()
    (term,) = find_terms([each.sum() / chosen.sum().clamp(min=1)], GraphStates(_N)).terms
    assert term.may_be_kept == expected


def test_a_loop_over_as_many_steps_as_samples_adds_up_no_samples() -> None:
    # Batches of (time, samples, features), with as many time steps as samples.
    steps = torch.randn(_N, _N, 6)
    far = zip(_net(steps), torch.zeros(_N, _N, 4), strict=True)
    loss = sum((functional.mse_loss(out, goal) for out, goal in far), torch.zeros(())) / _N
    assert len(find_terms([loss], GraphStates(_N, dim=1)).terms) == _N
    assert [len(term.each) for term in find_terms([loss], GraphStates(_N)).terms] == [_N]


def test_labels_that_are_ignored_are_a_mask() -> None:
    target = torch.where(torch.arange(_N) == 2, _y, -100)
    loss = functional.cross_entropy(_out(), target, ignore_index=-100, label_smoothing=0.1)
    assert not any(term.may_be_kept for term in find_terms([loss], GraphStates(_N)).terms)


def test_losses_of_single_samples_compare_none() -> None:
    square = nn.Sequential(nn.Linear(6, _N), nn.ReLU(), nn.Linear(_N, _N), nn.BatchNorm1d(_N))
    attention = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
    sequences = torch.randn(_N, _N, 6)
    for make, _ in [*_MEANS.values(), *_SUMS.values()]:
        assert _mixed(make) is None
    assert _mixed(lambda: square(_x).square().mean()) is None
    assert _mixed(lambda: _out().topk(2, dim=1).values.mean()) is None
    assert _mixed(lambda: _out().max(1).values.mean()) is None
    assert _mixed(lambda: _out()[_y == 0].mean(1).square().mean()) is None
    assert _mixed(lambda: _out()[_y == 0].mean(0).sum()) is None
    assert _mixed(lambda: attention(sequences).square().mean()) is None
    assert _mixed(lambda: functional.cross_entropy(_out() @ torch.randn(4, 50), _y)) is None
    classes = nn.Linear(4, _N)  # As many as samples.
    places = torch.arange(_N)
    assert _mixed(lambda: functional.cross_entropy(classes(_out()) / 2, places)) is None
    kinds = functional.normalize(classes.weight).T
    assert _mixed(lambda: functional.cross_entropy(_out() @ kinds, places)) is None


@pytest.mark.parametrize("kept", [0, 5])
def test_sums_of_no_element_are_seen(kept: int) -> None:
    far, mask = _out() - _t, (torch.arange(_N) < kept)[:, None]
    for total in (
        (far.square() * mask).sum(),
        far[mask[:, 0]].abs().sum(),
        far.where(mask, torch.zeros_like(far)).sum(),
        functional.cross_entropy(_out(), _y.where(mask[:, 0], -100), reduction="sum"),
        functional.cross_entropy(_out(), (_y + 1) % 3 * mask[:, 0] + 1, reduction="sum")
        if kept
        else functional.cross_entropy(_out(), _y * 0 + 1, ignore_index=1, reduction="sum"),
    ):
        loss = total / mask.sum().clamp(min=1)
        (term,) = find_terms([loss], GraphStates(_N)).terms
        assert selects_nothing(term.reduces) == (kept == 0)


@pytest.mark.parametrize(("empty", "divisor"), [(range(1), 1.0), (range(_N), NEARLY_NONE)])
def test_a_sum_over_samples_selects_nothing_if_none_of_them_does(
    empty: range, divisor: float
) -> None:
    out = _out()
    far = [(out[k, : k not in empty] - _t[k, : k not in empty]).abs().sum() for k in range(_N)]
    (term,) = find_terms([sum(far, torch.zeros(())) / torch.tensor(1.0)], GraphStates(_N)).terms
    assert len(term.each) == _N
    assert term.divided_by(0) == divisor


def test_a_divisor_of_all_elements_is_one_of_their_sum() -> None:
    each = functional.cross_entropy(_out(), _y, reduction="none")
    weights = torch.arange(8.0)
    for loss in ((each * weights / weights.sum()).sum(), (each.neg() / weights.sum()).sum() / 2):
        (term,) = find_terms([loss], GraphStates(_N)).terms
        assert [divisor.value for divisor in term.divisors][:1] == [28.0]
    (term,) = find_terms([(each.square() / 28 + 1).sqrt().sum()], GraphStates(_N)).terms
    assert term.divisors == ()  # It is not one of the sum.


def test_a_gradient_that_backward_is_given_divides_a_sum_by_a_number_or_is_told() -> None:
    each = functional.mse_loss(_out(), _t, reduction="none")
    for given, divisors in (
        (torch.ones_like(each), [1.0]),
        (torch.full_like(each, 1 / 7), [7.0]),
        (torch.zeros_like(each), []),
        (None, []),
    ):
        parts = find_terms([each], GraphStates(_N), gradients=[given])
        assert [divisor.value for divisor in parts.terms[0].divisors] == divisors
        assert not parts.is_given
    assert find_terms([each], GraphStates(_N), gradients=[torch.rand_like(each)]).is_given


def test_learned_weights_get_gradients_of_values_times_the_factors_of_terms() -> None:
    out = torch.nn.Linear(3, 2)(torch.randn(4, 3))
    s, mask = torch.nn.Parameter(torch.tensor([0.5, 0.2])), torch.tensor([True, False, True, True])
    first, second = out[:, 0][mask].mean(), out[:, 1].square().mean()
    both = torch.stack([first, second])
    f, g = 3.0, 0.5

    def learned(loss: torch.Tensor) -> tuple[bool, list[float]]:
        states = GraphStates(4)
        parts = find_terms([loss], states)
        products = learned_products(parts, states)
        factors = [f if term.reduces in _below(first) else g for term in parts.terms]
        is_clear = all(each.is_clear(factors) for each in products)
        before = both.detach().clone()
        with multiplied_values(products, factors):
            (gradient,) = torch.autograd.grad(loss, s, retain_graph=True)
        assert both.equal(before)
        return is_clear, gradient.tolist()

    a, b = first.item(), second.item()
    for loss, expected in (
        (s[0] * first + s[1] * second, [f * a, g * b]),
        (first / s[0] + s[1] - second, [-f * a / 0.25, 1.0]),
        ((s * both + s).mean(), [(f * a + 1) / 2, (g * b + 1) / 2]),
        (s[0] * both.sum() / 2, None),
        ((s[1] * both).sum(), [0.0, f * a + g * b]),
        (both @ s, [f * a, g * b]),
        (s[0] * (first + s[1]), None),
        (2 * first + 0.3 * second + s.square().sum(), [1.0, 0.4]),
    ):
        is_clear, gradient = learned(loss)
        assert is_clear == (expected is not None)
        assert gradient == pytest.approx(expected or gradient)


def test_a_value_of_no_element_gives_a_learned_weight_no_gradient() -> None:
    out, s = torch.nn.Linear(3, 2)(torch.randn(4, 3)), torch.nn.Parameter(torch.zeros(()))
    loss = (-s).exp() * torch.stack([out[:, 0][:0].mean(), out[:, 1].mean()]).sum()
    clear = ((-s).exp() * torch.stack([out[:, 0][:0].mean(), out[:, 1].mean()])).sum()
    for each, expected in ((loss, math.nan), (clear, -out[:, 1].mean().item())):
        states = GraphStates(4)
        parts = find_terms([each], states)
        factors = [float(math.prod(term.shape) > 0) for term in parts.terms]
        with multiplied_values(learned_products(parts, states), factors):
            (gradient,) = torch.autograd.grad(each, s)
        assert gradient.item() == pytest.approx(expected, nan_ok=True)


def test_a_dot_product_of_means_is_no_mean() -> None:
    out = torch.nn.Linear(3, 2)(torch.randn(4, 3))
    mean = out.mean(0)
    assert find_terms([mean @ mean], GraphStates(4)).unknown
    (term,) = find_terms([mean @ torch.ones(2)], GraphStates(4)).terms
    assert not term.is_sum


def _below(loss: torch.Tensor) -> set[object]:
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        nodes += [each for each, _ in node.next_functions if each is not None]
    return set(nodes)
