"""The skipping of samples in a run of `dlio train`."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from dlio.features.skipping.skip_rule import EASY, SHARE
from dlio.features.skipping.skipper import SampleSkipper
from dlio.features.skipping.skipping_feature import SkippingOptions
from dlio.train.feature_hooks import FeatureHooks, FeatureRun, SavedFeature


class SkippingHooks(FeatureHooks):
    """Chooses each epoch's samples, and weighs their losses."""

    def __init__(self, options: SkippingOptions, run: FeatureRun) -> None:
        self._options = options

    def connected(self, run: FeatureRun, batches: int) -> None:
        share = self._options.skip_share
        self._skipper = SampleSkipper(
            run.loader,
            run.config.optimizer.epochs,
            share or SHARE,
            seed=run.config.data.seed,
            easy=EASY if share is None else math.inf,
        )

    def choose_samples(self, run: FeatureRun, epoch: int) -> int:
        self._skipper.begin(epoch)
        return self._skipper.samples

    def weigh(self, losses: torch.Tensor, samples: npt.NDArray[np.int64]) -> torch.Tensor:
        # Samples that are often skipped count more when they are not.
        weights = self._skipper.weights(samples).to(losses.device, non_blocking=True)
        self._skipper.record(losses, samples)
        return weights

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: each for name, each in self._skipper.state().items() if name != "seen"}

    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        return {"seen": self._skipper.state()["seen"]}

    def restore(self, saved: SavedFeature) -> None:
        if not saved.tensors:
            return
        # Each sample's loss is known to the one rank that has trained on it.
        seen = torch.zeros(self._skipper.total, dtype=torch.uint8)
        for each in saved.taken_over("seen"):
            seen += each
        self._skipper.load_state({**saved.tensors, "seen": seen})

    def close(self) -> None:
        self._skipper.close()
