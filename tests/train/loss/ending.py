"""A model whose ranks end in the middle of a step, at a place that the environment chooses.

`ENDS='{"1": ["kill", 5, 0]}'` ends rank 1 in its fifth forward pass (place -1) or in the backward
that follows, when the gradient of parameter number 0, 1, ... in backward's order is ready.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    elif how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    raise RuntimeError("a bug of this rank alone")


class Ending(nn.Module):
    """A model of which some ranks end.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        self.how, self.step, self.place = json.loads(os.environ.get("ENDS", "{}")).get(
            rank, ["", 0, 0]
        )
        self.passes = 0
        parameters = list(reversed(list(self.parameters())))
        if self.how and self.place >= 0:
            parameters[self.place].register_post_accumulate_grad_hook(self._ready)

    def _ready(self, _: torch.Tensor) -> None:
        if self.passes == self.step:
            _end(self.how)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            if self.how and self.place < 0 and self.passes == self.step:
                _end(self.how)
        logits: torch.Tensor = self.layers(images)
        return logits


class Digest(Callback):
    """Writes a digest of the weights of each epoch and rank."""

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in run.model.parameters())
        name = f"weights-{report.epoch}-{os.environ['OMPI_COMM_WORLD_RANK']}"
        Path(name).write_text(hashlib.sha256(weights).hexdigest(), encoding="ascii")


def make(classes: int, image_size: int) -> nn.Module:
    """Three layers of more than a bucket each."""
    pixels, width = 3 * image_size * image_size, 512
    layers = [nn.Flatten(), nn.Linear(pixels, width), nn.Tanh()]
    layers += [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)]
    return Ending(nn.Sequential(*layers))


def make_noisy(classes: int, image_size: int) -> nn.Module:
    """Layers that depend on the order of samples, on the batch and on random numbers."""
    pixels, width = 8 * image_size * image_size, 256
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    layers += [nn.Dropout(0.3), nn.Linear(pixels, width), nn.Tanh()]
    layers += [nn.Dropout(0.5), nn.Linear(width, classes)]
    return Ending(nn.Sequential(*layers))
