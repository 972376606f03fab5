"""Metrics of tasks: exact, and the same however samples are divided among ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlio.train.tasks.classification import Classes, area, score_sums
from dlio.train.tasks.metrics import goodness, mean_of, real_sums, show_metric
from dlio.train.tasks.regression import Numbers
from tests.train.tasks.higgs_like import exact_auc


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.integers(0, 60),
)
def test_sums_of_real_numbers_do_not_depend_on_order_and_ranks(
    values: list[float], cut: int
) -> None:
    whole = real_sums(torch.tensor(values, dtype=torch.float64))
    shuffled = sorted(values, key=lambda value: hash((value, cut)))
    parts = [torch.tensor(part, dtype=torch.float64) for part in (shuffled[:cut], shuffled[cut:])]
    assert np.array_equal(whole, sum(real_sums(part) for part in parts))
    assert mean_of(whole, len(values)) == pytest.approx(np.mean(values), abs=2.0**-32)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_a_value_that_is_not_finite_makes_the_mean_nan(wrong: float) -> None:
    assert math.isnan(mean_of(real_sums(torch.tensor([1.0, wrong])), 2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_the_area_is_within_its_own_bound_of_the_exact_one(seed: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    classes = random.integers(0, 2, 3000)
    scores = (scale * (random.normal(size=3000) + 0.7 * classes)).astype(np.float32)
    measured, bound = area(score_sums(torch.from_numpy(scores), torch.from_numpy(classes == 1)))
    assert abs(measured - exact_auc(scores.astype(np.float64), classes)) <= bound + 1e-12
    assert bound < 0.002


def test_the_area_of_equal_scores_is_one_half_and_of_separated_ones_one() -> None:
    positive = torch.tensor([True, False, True, False])
    assert area(score_sums(torch.zeros(4), positive)) == (0.5, 0.5)
    assert area(score_sums(torch.tensor([1.0, -1.0, 2.0, 0.0]), positive)) == (1.0, 0.0)
    assert math.isnan(area(score_sums(torch.zeros(2), torch.tensor([True, True])))[0])


def test_zeros_of_both_signs_are_equal_scores() -> None:
    assert area(score_sums(torch.tensor([0.0, -0.0]), torch.tensor([True, False]))) == (0.5, 0.5)


def test_metrics_of_classes_are_those_of_all_samples_together() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(101, 7, generator=generator), torch.arange(101) % 7
    classes = Classes(7)
    sums = sum(classes.sums(logits[k::3], labels[k::3]) for k in range(3))
    metrics = classes.metrics(np.asarray(sums))
    assert metrics["accuracy"] == (logits.argmax(1) == labels).sum().item() / 101
    order = logits.argsort(1, descending=True)[:, :5]
    assert metrics["top5"] == (order == labels[:, None]).any(1).sum().item() / 101
    loss = torch.nn.functional.cross_entropy(logits.double(), labels)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert "auc" not in metrics


def test_metrics_of_numbers_are_in_the_units_of_the_target() -> None:
    targets = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    outputs = targets[:, None] + torch.tensor([[0.5], [-0.5], [0.5], [-0.5]])
    metrics = Numbers(scale=10.0).metrics(Numbers(10.0).sums(outputs, targets))
    assert metrics["rmse"] == pytest.approx(5.0)
    assert metrics["mae"] == pytest.approx(5.0)
    assert metrics["r2"] == pytest.approx(1 - 0.25 / 1.25)


@pytest.mark.parametrize("target", [1 / 3, -1.7, 0.0, 1234.567])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equal_targets_have_no_r2(target: float, count: int) -> None:
    sums = Numbers(1.0).sums(torch.zeros(count, 1), torch.full((count,), target))
    assert math.isnan(Numbers(1.0).metrics(sums)["r2"])


def test_a_smaller_error_is_better_and_an_unknown_one_is_worst() -> None:
    assert goodness("rmse", 1.0) > goodness("rmse", 2.0)
    assert goodness("accuracy", 0.2) > goodness("accuracy", 0.1)
    assert goodness("auc", None) == goodness("auc", math.nan) == -math.inf
    assert show_metric("accuracy", 0.5) == "50.0%"
    assert show_metric("auc", 0.81234) == "0.8123"
    assert show_metric("rmse", None) == "-"
