"""The largest entries, one in 32, sent as the mean of their sign (Dryden et al., "Communication
quantization for data-parallel training of deep neural networks", MLHPC 2016)."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.train.exchange.compress.sparse import order_statistic

_REACH: Final = 2.0**15


class Adaptive:
    """The level is an order statistic of a sample of a tensor's entries, another one each step.

    So that v - q is exact for the smallest entries sent, too: where their mean is more than twice
    the level, only those beyond half the mean are sent, as at most twice their smallest. That
    takes a distribution with a tail as heavy as that of 1/v^3, or single entries far beyond all.
    """

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def level(self, tensor: int, sample: npt.NDArray[np.float32], ratio: float) -> float:
        return order_statistic(sample, ratio)

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        mean = float(sizes.mean(dtype=np.float64))
        least = max(level, float(sizes.max()) / _REACH)
        if mean > 2 * least:
            least = mean / 2
        if least > level:
            sizes = sizes[sizes >= least]
            mean = float(sizes.mean(dtype=np.float64))
        return least, min(mean, 2 * float(sizes.min()))
