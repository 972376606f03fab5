"""The skipping of samples in a run of `dlio train`."""

import math

from dlio.loader.dataloader import DataLoader
from dlio.train.options import TrainOptions
from dlio.train.skipping.rule import EASY, SHARE
from dlio.train.skipping.skipper import SampleSkipper


def make_skipper(config: TrainOptions, loader: DataLoader) -> SampleSkipper | None:
    """Make the skipper of `--skip-samples`; None without it. Collective."""
    if not config.skip_samples:
        return None
    share = config.skip_share or SHARE
    easy = EASY if config.skip_share is None else math.inf
    return SampleSkipper(loader, config.epochs, share, seed=config.seed, easy=easy)
