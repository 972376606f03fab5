"""What a callback is, and what it sees of a run."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import nn

from dlio.comm import Communicator
from dlio.loader.dataloader import DataLoader
from dlio.train.config import TrainConfig
from dlio.train.cut import Cut
from dlio.train.exchange.distribute import Distributed
from dlio.train.precision import Precision
from dlio.train.report import EpochReport


class Run(Protocol):
    """One rank of a training run, as callbacks see it; the trainer's `Worker`."""

    config: TrainConfig
    comm: Communicator
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    loader: DataLoader
    exchange: Distributed
    epoch_number: int
    """From 0."""
    position: int
    """Samples of the epoch's order that all ranks have trained on."""
    updates: int
    """Steps of the optimizer since the run began."""
    last_loss: torch.Tensor
    """Sum of losses of this rank's last batch; on the device."""
    gradient_norm: torch.Tensor | None
    """Of the last step, before clipping; None where nobody wants it."""

    @property
    def history(self) -> Sequence[EpochReport]:
        """Of the epochs that are over, those before a resumed run, too."""

    def reshaped(self, cuts: Sequence[Cut] = ()) -> None:
        """To be called on all ranks when tensors of the model have been cut."""

    def stop(self, reason: str) -> None:
        """End the run after this epoch. To be called on all ranks."""


class Callback:
    """Does nothing; override what is wanted. Every rank has its own, called alike.

    Entered before the first epoch, and left at the run's end, also after an error.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begins(self, run: Run) -> None:
        """Before the first step; a run that is resumed has been."""

    def before_step(self, run: Run) -> bool:
        """Gradients are final, clipped, and of all ranks where the exchange is one of gradients.
        False has the optimizer leave this step out."""
        return True

    def after_step(self, run: Run) -> None:
        """Weights have changed; gradients are there still."""

    def reshaped(self, run: Run, cuts: Sequence[Cut]) -> None:
        """Neurons have been cut out of the model: `cut.of(tensor)` does the same to a tensor that
        has the shape that the parameter `cut.name` had."""

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        """Evaluated, too. `run.stop` ends the run."""
