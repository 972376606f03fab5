"""The contenders of `dlio bench prune --case samples` do as their papers say, and count it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio.errors import UsageError
from dlio.train.networks.resnet import SmallResNet
from dlio_bench.prune import samples
from dlio_bench.prune.prune_options import PruneBenchOptions
from dlio_bench.prune.skipping_rivals import Density, LossHistory, choose, deep, shallow


def test_infobatch_skips_a_share_of_low_losses_and_keeps_the_sum_of_weights() -> None:
    generator = np.random.default_rng(0)
    losses = generator.gamma(2.0, 1.0, 1000).astype(np.float32)
    low = losses < losses.mean()
    weights = choose(losses, 0.5, generator)
    assert (weights[~low] == 1).all()
    assert set(weights[low].tolist()) == {0.0, 2.0}
    assert (weights[low] > 0).sum() == int(0.5 * low.sum())
    assert weights.sum() == pytest.approx(1000, abs=2)
    again = choose(losses, 0.5, generator)
    assert (again != weights).any()
    assert (choose(np.ones(9, np.float32), 0.5, generator) == 1).all()


def test_a_sample_is_mastered_while_its_loss_goes_straight() -> None:
    """Columns: a constant loss, one that falls evenly, one that jumps, one that jumps late."""
    history = LossHistory(4)
    for epoch in range(9):
        late = 3.0 if epoch == 8 else 1.0
        row = [1.0, 2.0 - epoch / 10, float(epoch % 2), late]
        assert history.mastered(1e-3).tolist() == [epoch > 5, epoch > 5, False, epoch > 5]
        history.add(np.array(row, np.float32))
    assert history.mastered(1e-3).tolist() == [True, True, False, False]


def test_density_is_largest_where_features_are_many() -> None:
    torch.manual_seed(0)
    density = Density(kernels=32)
    crowd, alone = torch.randn(60, 4) * 0.3, torch.full((4, 4), 3.0) + torch.randn(4, 4)
    features = torch.cat([crowd, alone])
    for _ in range(20):
        density.of(features)
        density.follow(features)
    densities = density.of(features)
    assert densities[60:].max() < densities[:60].median()


def test_the_yardstick_is_the_training_on_all_samples_that_is_as_accurate() -> None:
    points = [(10.0, 0.40), (8.0, 0.38), (6.0, 0.30)]
    for accuracy, cost in ((0.39, 9.0), (0.34, 7.0)):
        interpolated, sign = samples.cost_of_all(accuracy, points)
        assert interpolated == pytest.approx(cost)
        assert not sign
    assert samples.cost_of_all(0.45, points) == (10.0, ">")
    assert samples.cost_of_all(0.40, [*points, (12.0, 0.40)]) == (10.0, "")
    assert samples.cost_of_all(0.20, points) == (6.0, "<")


def test_contenders_count_their_work_and_kept_runs_are_not_repeated(
    pictures: Path, tmp_path: Path
) -> None:
    options = PruneBenchOptions(
        source=str(pictures),
        val=str(pictures.parent / "val"),
        seeds=1,
        epochs=4,
        width=8,
        image_size=32,
        variant=("infobatch", "pfb"),
        keep=str(tmp_path),
    )
    results: dict[str, Any] = samples.measure(options)
    work = {name: runs[0]["extra"] for name, runs in results["raw"].items()}
    assert list(work) == [
        *("all samples", "all samples, 3 epochs", "all samples, 2 epochs"),
        *("infobatch", "pfb"),
    ]
    assert work["all samples"] == {"forward": 4, "backward": 4, "work": 4}
    assert work["all samples, 2 epochs"]["work"] == pytest.approx(2)
    assert work["infobatch"]["forward"] == work["infobatch"]["backward"] < 4
    # Two of four epochs block 40 % of each batch, after the shallow part of the network.
    total = len(dlio.open(str(pictures), image_size=32))
    assert total < 64
    kept = math.ceil(0.6 * total)
    assert work["pfb"]["backward"] == pytest.approx(2 + 2 * kept / total)
    assert work["pfb"]["backward"] < work["pfb"]["forward"] < 4
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert samples.measure(options)["rows"] == results["rows"]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    with pytest.raises(UsageError, match="is of another training"):
        samples.measure(replace(options, width=16))


def test_the_parts_of_the_network_make_the_whole() -> None:
    torch.manual_seed(0)
    model = SmallResNet(5, 32, width=8).eval()
    images = torch.randn(6, 3, 32, 32)
    outputs = deep(model)(shallow(model)(images))
    assert torch.allclose(outputs, model(images), atol=1e-5)
