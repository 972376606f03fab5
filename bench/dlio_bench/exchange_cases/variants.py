"""A training step with an exchange around it, without one, and an exchange without computing."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.comm import Communicator, Request, world
from dlio.errors import UsageError
from dlio.exchange.asgd import Asgd
from dlio.exchange.distribute import ExchangeHandle, distribute
from dlio.train.networks.resnet import SmallResNet, resnet50

_TIMEOUT_S: Final = 60.0
_TURN_S: Final = 2e-4


class OneBatchTraining:
    """A network that is trained on one batch, again and again; the same weights on all ranks."""

    def __init__(self, network: str, batch_size: int, rank: int) -> None:
        self.model = make(network)
        self._inputs, self._labels = batch(network, batch_size, seed=rank)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._parameters = list(self.model.parameters())
        self.step(None)
        self._gradients = [_gradient(parameter).clone() for parameter in self._parameters]

    @property
    def bytes(self) -> int:
        """Bytes of all gradients as float32."""
        return 4 * sum(parameter.numel() for parameter in self._parameters)

    def distribute(self, exchange: str, nodes: int | None = None) -> ExchangeHandle:
        """Start an exchange, to be passed to `step` and `alone`. Collective."""
        return distribute(
            self.model, self._optimizer, exchange, pretend_nodes=nodes, follow_steps=False
        )

    def step(
        self,
        exchange: ExchangeHandle | None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Forward, backward, step.

        Args:
            model: called in place of the model, such as DDP around it.
            optimizer: in the place of this training's own.
        """
        optimizer = optimizer or self._optimizer
        optimizer.zero_grad(set_to_none=True)
        logits = (model or self.model)(self._inputs)
        torch.autograd.backward(cross_entropy(logits, self._labels))
        if exchange is not None:
            exchange.before_step()
        optimizer.step()
        if exchange is not None:
            exchange.after_step()

    def alone(self, exchange: ExchangeHandle | None) -> None:
        """The part of `step` between ranks, with gradients that are there already; whatever of it
        goes on behind a later step is waited for."""
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._parameters, self._gradients)
        if exchange is not None:
            exchange.before_step()
            exchange.after_step()
            exchange.finish()
            for each in exchange.exchanges:
                if isinstance(each, Asgd):
                    _have_left(each, world())


def timed(work: Callable[[], None], times: int, comm: Communicator) -> float:
    """Seconds of each of some calls, of all ranks together. Collective."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(times):
        work()
    comm.barrier()
    return (time.perf_counter() - began) / times


def _have_left(exchange: Asgd, comm: Communicator) -> None:
    """Also wait for messages that a training would not wait for, to time them: all ranks'
    messages, as each leaves only when it is taken. Collective."""
    deadline = time.monotonic() + _TIMEOUT_S
    everybody: Request | None = None
    while everybody is None or not everybody.done():
        if exchange.all_left() and everybody is None:
            everybody = comm.iallreduce(np.zeros(1))
        if time.monotonic() > deadline:
            raise UsageError(f"asgd's messages have not left within {_TIMEOUT_S:g} s")
        time.sleep(_TURN_S)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def nodes_for(exchange: str, nodes: int, ranks: int) -> int:
    """On how many nodes an exchange believes its ranks to be: `gossip` is measured between ranks,
    which is what it is between nodes."""
    return nodes if exchange.startswith("hierarchical") else ranks


# Networks to train, and a batch for them


CLASSES: Final = 40
IMAGE_SIZE: Final = 64


def perceptron() -> nn.Sequential:
    """A million parameters in a few buckets, which cost next to nothing to compute."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, CLASSES))


def make(name: str, seed: int = 0) -> nn.Module:
    """`resnet50` (25.6 million parameters), `small` (the trainer's, 1.2 million), `perceptron` (1.1
    million). Raises UsageError for another name."""
    torch.manual_seed(seed)
    if name == "resnet50":
        return resnet50()
    if name == "small":
        return SmallResNet(CLASSES, IMAGE_SIZE)
    if name == "perceptron":
        return perceptron()
    raise UsageError(f"network {name}: choose resnet50, small or perceptron")


def batch(name: str, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, 64, 64), or vectors (count, 512), and labels (count,)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (512,) if name == "perceptron" else (3, IMAGE_SIZE, IMAGE_SIZE)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.randn(count, *shape, generator=generator), labels
