"""The skipping of samples in a run of `dlio train`."""

import math

from dlio.features.skipping.skip_rule import EASY, SHARE
from dlio.features.skipping.skipper import SampleSkipper
from dlio.loader.dataloader import DataLoader
from dlio.train.train_options import TrainOptions


def make_skipper(config: TrainOptions, loader: DataLoader) -> SampleSkipper | None:
    """Make the skipper of `--skip-samples`; None without it. Collective."""
    if not config.skip_samples:
        return None
    share = config.skip_share or SHARE
    easy = EASY if config.skip_share is None else math.inf
    return SampleSkipper(loader, config.epochs, share, seed=config.seed, easy=easy)
