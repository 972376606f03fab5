"""Skipping in a user's own loop: gradients are unbiased, and a resumed run continues exactly."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import dlio
from dlio.errors import UsageError

N = 120


def _loader(batch: int = 8, workers: int = 1) -> dlio.DataLoader:
    numbers = torch.arange(N, dtype=torch.float32)
    return dlio.DataLoader(
        torch.utils.data.TensorDataset(numbers), batch, True, num_workers=workers, seed=4
    )


def _losses(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.exp((ids % 40) / 8.0 - 4).astype(np.float32))


def test_each_kept_sample_comes_once_and_the_share_is_as_requested() -> None:
    with _loader() as loader:
        skipper = dlio.SampleSkipper(loader, 12, 0.5, easy=math.inf)
        seen = []
        for epoch in range(12):
            skipper.begin(epoch)
            consumed = []
            for _ in loader:
                weighted = skipper.weigh(_losses(loader.last_samples))
                weights = weighted / _losses(loader.last_samples)
                consumed += list(zip(loader.last_samples.tolist(), weights.tolist(), strict=True))
            ids = [sample for sample, _ in consumed]
            assert len(set(ids)) == len(ids) == skipper.samples
            assert skipper.skip_share == 1 - len(ids) / N
            assert skipper.lr_factor == N / len(ids)
            if skipper.rule.sees_all(epoch):
                assert len(ids) == N
                assert {weight for _, weight in consumed} == {1.0}
            else:
                assert skipper.sample_mask is not None
                kept = np.flatnonzero(skipper.sample_mask.holds(np.arange(N)))
                assert sorted(ids) == kept.tolist()
                # Kept samples of low loss have larger weights.
                low = [weight for sample, weight in consumed if sample % 40 < 10]
                high = [weight for sample, weight in consumed if sample % 40 >= 36]
                assert min(low) < max(low) > max(high)
            seen.append(len(ids))
        assert [seen[0], *seen[-2:]] == [N] * 3
        assert np.mean(seen[1:10]) == pytest.approx(N / 2, abs=8)
        skipper.close()


def test_gradients_are_unbiased() -> None:
    """The mean gradient of a frozen network is within 4 standard errors, which are small."""
    with _loader(16) as loader:
        skipper = dlio.SampleSkipper(loader, 400, 0.5, last=0, easy=math.inf)
        weight = torch.nn.Parameter(torch.ones(2))
        truth = _gradient(weight, np.arange(N), None)
        means = []
        for epoch in range(400):
            skipper.begin(epoch)
            sums, steps = torch.zeros(2), 0
            for _ in loader:
                ids = loader.last_samples
                skipper.record(_losses(ids), ids)
                sums += _gradient(weight, ids, skipper.weights(ids)) * len(ids)
                steps += len(ids)
            means.append((sums / steps).numpy())
        gradients = np.array(means[1:])
        error = gradients.std(0) / np.sqrt(len(gradients))
        assert (np.abs(gradients.mean(0) - truth.numpy()) < 4 * error).all()
        assert (error < 0.02 * np.abs(truth.numpy())).all()
        skipper.close()


def _gradient(weight: torch.nn.Parameter, ids: Any, weights: torch.Tensor | None) -> torch.Tensor:
    values = torch.from_numpy(np.stack([ids / N, np.sin(ids) + 2], 1).astype(np.float32))
    losses = (values * weight).sum(1) ** 2
    mean = losses.mean() if weights is None else (losses * weights).mean()
    (gradient,) = torch.autograd.grad(mean, [weight])
    return gradient


def test_a_loop_resumed_within_an_epoch_has_the_same_samples_and_weights() -> None:
    def trained(stop: tuple[int, int] | None) -> list[tuple[int, int, float]]:
        consumed: list[tuple[int, int, float]] = []
        loader = _loader()
        skipper = dlio.SampleSkipper(loader, 6, 0.5, seed=3, easy=math.inf)
        begun = 0
        epoch = 0
        while epoch < 6:
            skipper.begin(epoch)
            for step, _ in enumerate(loader, begun):
                ids = loader.last_samples
                skipper.weigh(_losses(ids) * torch.from_numpy(1.0 + epoch * (ids % 7 == 0)))
                weights = skipper.weights(ids).tolist()
                consumed += [(epoch, *each) for each in zip(ids.tolist(), weights, strict=True)]
                if stop == (epoch, step):
                    state = {key: value.clone() for key, value in skipper.state().items()}
                    where = loader.state_dict()
                    loader, begun = _loader(), step + 1
                    skipper = dlio.SampleSkipper(loader, 6, 0.5, seed=3, easy=math.inf)
                    loader.load_state_dict(where)
                    skipper.load_state(state)
                    break
            else:
                epoch, begun = epoch + 1, 0
                continue
            stop = None
        return consumed

    whole = trained(None)
    assert 4 * N < len(whole) < 6 * N
    for stop in ((0, 3), (1, 0), (2, 5), (4, 1)):
        assert trained(stop) == whole


def test_losses_of_another_shape_or_data_set_are_refused() -> None:
    with _loader() as loader:
        skipper = dlio.SampleSkipper(loader, 5)
        skipper.begin(0)
        next(iter(loader))
        with pytest.raises(UsageError, match="reduction='none'"):
            skipper.weigh(torch.tensor(0.5))
        other = {**skipper.state(), "scores": torch.zeros(N + 1, dtype=torch.uint8)}
        with pytest.raises(UsageError, match=f"losses of {N + 1} samples"):
            skipper.load_state(other)
    with _loader(workers=0) as loader:
        next(iter(loader))
        with pytest.raises(UsageError, match="num_workers=1 or more"):
            dlio.SampleSkipper(loader, 5).weigh(torch.zeros(8))
    with pytest.raises(UsageError, match="give the loader seed=, and no sampler"):
        dlio.SampleSkipper(dlio.DataLoader(list(range(9)), 2), 5)


def test_waiting_losses_are_recorded_in_time() -> None:
    """The loop has more batches than may wait at a time."""
    with _loader(1) as loader:
        skipper = dlio.SampleSkipper(loader, 5)
        skipper.begin(0)
        for _ in loader:
            skipper.weigh(_losses(loader.last_samples))
        assert (skipper.state()["seen"].numpy() > 0).all()
        assert list(chain(skipper.state())) == ["scores", "table", "epoch", "seen"]
