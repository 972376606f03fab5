"""The largest entries, one in 32, each sent as the mean of those with the same sign (Dryden et al.,
"Communication quantization for data-parallel training of deep neural networks", MLHPC 2016)."""

import numpy as np
import numpy.typing as npt

from dlio.exchange.compress.sparse import mean_beyond, order_statistic


class AdaptiveLevel:
    """A rule whose level is an order statistic of a tensor's entries, estimated from a new random
    sample at each step."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def level(self, tensor: int, sample: npt.NDArray[np.float32], ratio: float) -> float:
        return order_statistic(sample, ratio)

    def cut(self, sizes: npt.NDArray[np.float32], level: float) -> tuple[float, float]:
        return mean_beyond(sizes, level)
