"""A model whose weights name the samples that they were trained on; runs inside ranks.

Each optimizer step has a parameter of its own, with an entry for each sample. A sample's gradient
is its weight in the loss, at its own entry of the parameter of the step under way, whatever the
loss is: so the entries of a parameter that are not 0 are the samples that the step took. The module
asks dlio for nothing but the number of the step, and knows no ledger.

Samples are pictures of one shade, whose channels are the digits of their number.
"""

import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport

STEPS = 96
"""Optimizer steps that have a parameter."""
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0"))
FOLDER = Path(os.environ.get("NAMED_FOLDER", "."))
SAMPLES = int(os.environ.get("NAMED_SAMPLES", "48"))
PAUSE_S = float(os.environ.get("NAMED_PAUSE_S", "0.03"))
MEAN, DEVIATION = (0.485, 0.456), (0.229, 0.224)
SHADES, FIRST_SHADE = 16, 8
STEP = struct.Struct("<qd")


def shades(number: int) -> tuple[int, int]:
    """Return the red and the green of a sample's picture."""
    return FIRST_SHADE + number // 15 * SHADES, FIRST_SHADE + number % 15 * SHADES


def numbers_of(images: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the samples of normalised pictures (n, 3, height, width)."""
    digits = []
    for channel, (mean, deviation) in enumerate(zip(MEAN, DEVIATION, strict=True)):
        shade = images[:, channel].double().mean((1, 2)) * deviation + mean
        digits.append(((shade * 255 - FIRST_SHADE) / SHADES).round().long())
    return digits[0] * 15 + digits[1]


class _Named(torch.autograd.Function):
    """Logits of 0, whose gradient becomes that of the samples' own entries."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, classes: int, step: int, *rows: Any) -> Any:
        ctx.numbers, ctx.step, ctx.rows = numbers, step, rows
        return torch.zeros(len(numbers), classes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = [torch.zeros_like(row) for row in ctx.rows]
        # The gradient of logits of 0 is the sample's weight times (1 / classes - target).
        each = gradients[0].abs().sum(1).to(rows[0].dtype)
        rows[ctx.step].index_add_(0, ctx.numbers, each)
        return None, None, None, *rows


class Names(nn.Module):
    """The model; `current` is the number of the step under way."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        rows = [torch.zeros(SAMPLES) for _ in range(STEPS)]
        self.rows = nn.ParameterList(map(nn.Parameter, rows))
        self.classes = classes
        self.run: Run | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        numbers = numbers_of(images)
        if not self.training:
            # A held-out metric that depends on all weights, and on the sample.
            total = torch.stack([row.sum() for row in self.rows]).sum()
            scores = total * (1 + numbers)
            return torch.stack([scores, -scores], 1).float()
        step = self.run.updates if self.run is not None else 0
        apply: Any = _Named.apply
        logits: torch.Tensor = apply(numbers, self.classes, step, *self.rows)
        return logits


def make(classes: int) -> nn.Module:
    """Make the model, for --model."""
    return Names(classes)


class Witness(Callback):
    """Writes for the killer and the count: the rank's process, its steps and its weights."""

    def begins(self, run: Run) -> None:
        model = run.model
        assert isinstance(model, Names)
        model.run = run
        write(f"process-{RANK}", f"{os.getpid()}\n".encode())

    def after_step(self, run: Run) -> None:
        rate = run.optimizer.param_groups[0]["lr"]
        with open(FOLDER / f"steps-{RANK}", "ab") as file:
            file.write(STEP.pack(run.updates, rate))
        time.sleep(PAUSE_S)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        weights = torch.stack([row.detach() for row in run.model.parameters()])
        write(f"weights-{report.epoch}-{RANK}", weights.double().numpy().tobytes())
        value = report.metrics.get("loss")
        write(f"held-out-{report.epoch}-{RANK}", repr(value).encode())


def write(name: str, content: bytes) -> None:
    """Write a file of this rank whole, or not at all."""
    part = FOLDER / f".{name}.{os.getpid()}"
    part.write_bytes(content)
    part.rename(FOLDER / name)
