"""What is done with gradients or weights between ranks, selected by one word.

An exchange has three places in a training step: while backward makes gradients, before the
optimizer's step, and after it. It owns a communicator of its own, and the hooks that it sets.
"""

from typing import Final, Protocol

from torch import nn

from dlio.comm import Communicator
from dlio.errors import UsageError

NAMES: Final = ("allreduce", "gossip")


class Exchange(Protocol):
    """Keeps the ranks' models together. Owner: the trainer, which closes it.

    The trainer divides each rank's summed loss by `planned / ranks`, where `planned` is the
    number of samples in the step's global batch; so gradients, averaged over ranks, are those of
    the global batch, however unevenly its samples are shared.
    """

    def before_backward(self, samples: int, planned: int) -> None:
        """A step begins: this rank has `samples` of the global batch's `planned`."""

    def before_step(self) -> None:
        """Gradients are final, here and on the other ranks, when this returns."""

    def after_step(self) -> None:
        """The optimizer has changed the weights."""

    def finish(self) -> None:
        """Join what is under way: weights are as they will be used next."""

    def statistics(self) -> dict[str, float]:
        """Since the beginning: `wait_s` seconds spent waiting, `messages`, `bytes` sent."""

    def close(self) -> None:
        """Remove hooks, give the communicator back. Collective."""


def make_exchange(name: str, model: nn.Module, comm: Communicator, seed: int) -> Exchange:
    """Raises UsageError for a name that is not in NAMES. Collective."""
    from dlio.train.exchange.allreduce import Allreduce
    from dlio.train.exchange.gossip import Gossip

    if name == "allreduce":
        return Allreduce(model, comm.dup())
    if name == "gossip":
        return Gossip(model, comm.dup(), seed)
    raise UsageError(f"--exchange {name}: choose one of {', '.join(NAMES)}")
