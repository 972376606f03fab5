"""A model whose ranks end in the middle of a step, at a place that the environment chooses.

`ENDS='{"1": ["kill", 5, 0]}'` ends rank 1 in its fifth forward pass (place -1) or in the backward
that follows, when the gradient of parameter number 0, 1, ... in backward's order is ready.
"""

import ctypes
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
    elif how == "loop":
        while True:
            pass
    elif how == "held":
        ctypes.PyDLL(None).sleep(600)  # It does not release Python's lock.
    raise RuntimeError("a bug of this rank alone")


class Ending(nn.Module):
    """Three layers of more than a bucket each."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        width = 512
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, classes),
        )
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


class Change(Callback):
    """Changes a bit of one rank's weights and of its optimizer's state after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        if run.updates == self.step and os.environ["OMPI_COMM_WORLD_RANK"] == str(self.rank):
            weights = next(run.model.parameters())
            weights.view(torch.int32)[0, 0] ^= 1
            run.optimizer.state[weights]["momentum_buffer"][0, 0] += 1


class Slow(Callback):
    """Sleeps in each step of one rank."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def after_step(self, run: Run) -> None:
        if os.environ["OMPI_COMM_WORLD_RANK"] == str(self.rank):
            time.sleep(self.seconds)


def make(classes: int, image_size: int) -> nn.Module:
    return Ending(3 * image_size * image_size, classes)
