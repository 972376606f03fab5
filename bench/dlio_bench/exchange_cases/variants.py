"""A training step with an exchange around it, without one, and an exchange without computing."""

import time
from collections.abc import Callable
from functools import partial
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
        torch.manual_seed(0)
        if network not in NETWORKS:
            raise UsageError(f"network {network}: choose {', '.join(NETWORKS)}")
        make, sample = NETWORKS[network]
        self.model = make()
        generator = torch.Generator().manual_seed(rank)
        self._labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
        self._inputs = torch.randn(batch_size, *sample, generator=generator)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._parameters = list(self.model.parameters())
        self.step(None)
        gradients = (parameter.grad for parameter in self._parameters)
        self._gradients = [each.clone() for each in gradients if each is not None]
        self.bytes = 4 * sum(each.numel() for each in self._gradients)
        """Bytes of all gradients as float32."""

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
        """Forward, backward, step; with another model in place of the own one, such as DDP around
        it, and another optimizer."""
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


def nodes_for(exchange: str, nodes: int, ranks: int) -> int:
    """On how many nodes an exchange believes its ranks to be: `gossip` is measured between ranks,
    which is what it is between nodes."""
    return nodes if exchange.startswith("hierarchical") else ranks


# Networks to train


CLASSES: Final = 40
IMAGE_SIZE: Final = 64


def perceptron() -> nn.Sequential:
    """A million parameters in a few buckets, which cost next to nothing to compute."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, CLASSES))


NETWORKS: Final[dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "resnet50": (resnet50, (3, IMAGE_SIZE, IMAGE_SIZE)),
    "small": (partial(SmallResNet, CLASSES, IMAGE_SIZE), (3, IMAGE_SIZE, IMAGE_SIZE)),
    "perceptron": (perceptron, (512,)),
}
"""Networks of 25.6, 1.2 (the trainer's) and 1.1 million parameters, and shapes of their samples."""
