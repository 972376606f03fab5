"""Networks whose training takes as long as an accelerator would, most of it asleep.

Ranks that share cores then do not slow each other, and one of them can be slow.
"""

import time

import torch
from torch import nn

from dlio.train.model import make_model


class PacedNetwork(nn.Module):
    """A network whose forward pass in training sleeps for a time for each sample before it
    computes."""

    def __init__(self, network: nn.Module, sample_s: float) -> None:
        super().__init__()
        self.network = network
        self._sample_s = sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (n, 3, size, size) -> (n, classes)
        if self.training:
            time.sleep(self._sample_s * len(x))
        logits: torch.Tensor = self.network(x)
        return logits


def paced_network(
    classes: int, image_size: int, model: str = "resnet", sample_ms: float = 1.0, slow: float = 1.0
) -> nn.Module:
    """Return a paced network for `dlio train --model`: a `model` as for that option, which sleeps
    so many milliseconds for each sample, on the last rank `slow` times as long."""
    from dlio.comm import world

    comm = world()
    is_last = comm.rank == comm.size - 1
    return PacedNetwork(
        make_model(model, classes, image_size), 1e-3 * sample_ms * (slow if is_last else 1.0)
    )
