"""The base class of callbacks, and the view of a run that they get."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.comm.survival.recovery import MeasuredLoss
from dlio.exchange.cut import TensorCut
from dlio.exchange.distribute import ExchangeHandle
from dlio.loader.dataloader import DataLoader
from dlio.train.compute_device import Precision
from dlio.train.config import TrainConfig
from dlio.train.report import EpochReport, RunReport


class Run(Protocol):
    """One rank of a training run as callbacks see it; implemented by the trainer's `Worker`."""

    config: TrainConfig
    comm: Communicator
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    loader: DataLoader
    exchange: ExchangeHandle
    epoch_number: int
    """Number of the epoch, from 0."""
    position: int
    """Samples of the epoch's order that all ranks have trained on."""
    steps: int
    """Batches of each rank in an epoch of all samples."""
    updates: int
    """Optimizer steps since the run began."""
    last_loss: torch.Tensor
    """Sum of losses of this rank's last batch; a scalar on the device."""
    gradient_norm: torch.Tensor | None
    """Norm of the last step's gradients before clipping; None without --clip and --nan."""

    @property
    def history(self) -> Sequence[EpochReport]:
        """Reports of all finished epochs, including those before the run was resumed."""

    @property
    def losses(self) -> Sequence[MeasuredLoss]:
        """Losses of ranks since the run began (--fault-tolerance)."""

    @property
    def changes(self) -> Sequence[MeasuredLoss]:
        """Ranks that joined or left on purpose since the run began."""

    def reshaped(self, cuts: Sequence[TensorCut] = ()) -> None:
        """Adapt to cut tensors of the model. Call it on all ranks."""

    def stop(self, reason: str) -> None:
        """End the run after this epoch. Call it on all ranks."""


class Callback:
    """Base class whose methods do nothing. Every rank has its own and makes the same calls.

    A callback is a context manager: entered before the first epoch, and left at the end of the run,
    also after an error.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begins(self, run: Run) -> None:
        """Run before the first step, after a checkpoint has been restored."""

    def before_step(self, run: Run) -> bool:
        """Run before each optimizer step; return False to leave the step out.

        Gradients are final: clipped, and averaged over ranks if the exchange averages gradients.
        """
        return True

    def after_step(self, run: Run) -> None:
        """Run after each optimizer step, while the gradients still exist."""

    def reshaped(self, run: Run, cuts: Sequence[TensorCut]) -> None:
        """Run after neurons were removed from the model.

        `cut.of(tensor)` cuts a tensor of the former shape of the parameter `cut.name`.
        """

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        """Run after each epoch and its evaluation; `run.stop` ends the run."""

    def add_results(self, report: RunReport) -> None:
        """Add results of the callback to the report of a finished run."""
