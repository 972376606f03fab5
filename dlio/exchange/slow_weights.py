"""NoLoCo's outer optimizer (arXiv 2506.10911): Nesterov momentum over pairs of ranks.

A rank keeps slow weights, from which it trains for a period. With the fast weights f and the slow
weights s of this rank and its partner j, the paper's step is

    v <- a v + b mean(f - s) - g (s - mean(s)),    s <- s + v,

where means are over the pair, and g between a and 2 + a keeps the ranks together. Here g = b, so
that the slow weights of the partner cancel out:

    v <- a v + b (mean(f) - s),    s <- s + v.

Only fast weights travel: half of the bytes.
"""

import torch


class SlowWeights:
    """Slow weights of one bucket, and their momentum.

    Args:
        weights: the weights at the beginning; shape (entries,). Copied.
        rate: b above.
        momentum: a above.
    """

    def __init__(self, weights: torch.Tensor, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self.slow = weights.clone()
        self.velocity = torch.zeros_like(weights)

    def step(self, mean: torch.Tensor) -> None:
        """Move the slow weights towards the fast ones, and write them into `mean`.

        Args:
            mean: of the fast weights of a pair of ranks; shape (entries,).
        """
        mean -= self.slow
        self.velocity.mul_(self._momentum).add_(mean, alpha=self._rate)
        self.slow += self.velocity
        mean.copy_(self.slow)
