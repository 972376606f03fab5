"""A network, its training steps and its exchange, for checks on real ranks."""

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from dlio.comm import Communicator, world
from dlio.exchange import Exchange, buckets, parse_exchange, start_exchange
from dlio.exchange.buckets import trainable

FEATURES = 250
BATCH = 4
_BUCKET_BYTES: Final = 1 << 18
"""A fourth of the default, for networks with a fourth of the weights."""


class Net(nn.Module):
    """A net with three buckets of parameters in the programs that `run` runs.

    One layer is never used, one is frozen, and one parameter belongs to the net itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 300)
        self.unused = nn.Linear(20, 20)
        self.second = nn.Linear(300, 350)
        self.scale = nn.Parameter(torch.ones(350))
        self.frozen = nn.Linear(350, 350)
        self.last = nn.Linear(350, 5)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        logits: torch.Tensor = self.last(torch.tanh(self.frozen(out)))
        return logits


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max())


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def parameters_of(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def make_optimizer(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(parameters_of(net), lr=0.1)


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return inputs, torch.randint(0, 5, (count,), generator=generator)


def train_step(
    net: nn.Module,
    exchange: Exchange,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    planned: int,
    ranks: int,
) -> None:
    """Make one training step as the trainer does."""
    exchange.before_backward(len(inputs), planned)
    optimizer.zero_grad(set_to_none=True)
    if len(inputs):
        losses = nn.functional.cross_entropy(net(inputs), labels, reduction="sum")
        losses.div(planned / ranks).backward()  # type: ignore[no-untyped-call]
    exchange.before_step()
    optimizer.step()
    exchange.after_step()


def identical(net: nn.Module, comm: Communicator) -> bool:
    raw = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())
    return len({*comm.allgather(hashlib.sha256(raw).hexdigest())}) == 1


def started(
    name: str, model: nn.Module, comm: Communicator, seed: int = 0, pretend_nodes: int | None = None
) -> Exchange:
    """Start an exchange for a model. Collective."""
    spec = parse_exchange(name)
    return start_exchange(spec, trainable(model), model.modules(), comm, seed, pretend_nodes)


def run(checks: Mapping[str, Callable[[Communicator], None]]) -> None:
    """Run the checks that the command line names, on this rank."""
    torch.set_num_threads(1)
    buckets.BUCKET_BYTES = _BUCKET_BYTES
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        checks[name](world())
        print(f"kept {name}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE"):  # Else they name the world of torchrun's ranks.
            del os.environ[name]
        assert world().size == 1  # The former world is closed.
        assert not [thread.name for thread in threading.enumerate() if "dlio" in thread.name]
