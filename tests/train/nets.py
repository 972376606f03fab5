"""Models and callbacks that tests name on the command line, as users do."""

import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path

import torch
from torch import nn

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport


def mlp(classes: int, image_size: int, width: int = 8) -> nn.Module:
    """Make an MLP without batch norm and dropout: it trains the same on any number of ranks."""
    pixels = 3 * image_size * image_size
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, width), nn.Tanh(), nn.Linear(width, classes)
    )


def dropping(classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(mlp(classes, image_size, 16), nn.Dropout(0.2))


def tied(classes: int, image_size: int) -> nn.Module:
    """Make an MLP two layers of which have the same weights."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(mlp(16, image_size, 16), first, second, nn.Linear(16, classes))


def louder(classes: int, image_size: int) -> nn.Module:
    """Make an MLP whose gradients are 64 times as large on all ranks but the first."""
    first = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
    return _Louder(mlp(classes, image_size), 1.0 if first else 2.0**6)


class _Louder(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self._factor = inner, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x)
        return logits.float() * self._factor


def exploding(classes: int, image_size: int, at: int) -> nn.Module:
    """Make an MLP whose outputs are NaN at one training step."""
    return _Exploding(mlp(classes, image_size), at)


class _Exploding(nn.Module):
    def __init__(self, inner: nn.Module, at: int) -> None:
        super().__init__()
        self.inner, self._left = inner, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x)
        if not self.training:
            return logits
        self._left -= 1
        return logits * float("nan") if self._left == 0 else logits


def no_module(classes: int) -> list[int]:
    return [classes]


class Log(Callback):
    """Append a line to PATH.<rank> for each step of the optimizer.

    A line has the step's number, epoch, samples and learning rate. It is written at once, so that
    it survives a kill.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def after_step(self, run: Run) -> None:
        line = json.dumps(
            [
                run.updates,
                run.epoch_number,
                run.loader.last_samples.tolist(),
                run.optimizer.param_groups[0]["lr"],
            ]
        )
        with open(f"{self._path}.{run.comm.rank}", "a", encoding="utf-8") as file:
            file.write(line + "\n")


class Spoil(Callback):
    """Remove a run's folder of checkpoints, and tell the run to end."""

    def after_step(self, run: Run) -> None:
        if run.updates == 3:
            shutil.rmtree("c")
            os.kill(os.getpid(), signal.SIGTERM)


class Stop(Callback):
    """End a run after its first epoch, as a user's own rule may do."""

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        Path("seen.txt").write_text(f"{report.epoch} {os.getpid()}", encoding="utf-8")
        run.stop("enough")


class Moment(Callback):
    """Imports a module after the second step, for `signals_at`."""

    def after_step(self, run: Run) -> None:
        if run.updates == 2:
            importlib.util.find_spec("moment_of_step")
