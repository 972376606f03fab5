"""The contract of an exchange, split by the places in a training step where it acts.

    before_backward, weigh, hold      gradients are about to be computed
    backward
    before_step                       gradients are about to be used
    the optimizer's step
    after_step                        weights have changed
    finish                            weights are about to be used

Every exchange is an `Exchange`. Each further protocol adds the calls of one place, and an exchange
implements only those at which it acts:

| | `allreduce` etc. | `gossip`, `noloco` | the same, nodes | `asgd` | `local-sgd`, `diloco` |
|---|---|---|---|---|---|
| `Exchange` | x | x | x | x | x |
| `GradientExchange` | x | | x | | |
| `PreStepExchange` | x | x | x | x | |
| `PostStepExchange` | | x | x | x | x |
| `DeferredExchange` | | x | x | | x |
| `JoinsBeforeUse` | | x | x | | |

Callers hold a `dlio.exchange.exchange_factory.ExchangeCalls`, which has all calls and skips those
that its exchange does not implement.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dlio.exchange.cut import TensorCut


@runtime_checkable
class Exchange(Protocol):
    """Keeps the ranks' models together. The caller that creates it closes it.

    It owns its communicator and the hooks that it registers; one thread uses it.
    `dlio.testing.ExchangeTests` checks these promises.
    """

    alike: bool
    """True if all ranks have bit-identical weights after every step."""

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        """Adapt to parameters that have been cut in the same way on all ranks. Collective.

        Buckets are rebuilt; residuals, averages and momenta are cut with their parameters. Call it
        between two steps, after `finish`, at the same step on all ranks.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that later steps depend on besides weights; call it between two steps.

        The tensors are on the host, and later steps may overwrite them. Entries named `owed/...`
        are residuals: their sum over ranks matters. All others are valid only for the same number
        of ranks.
        """

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present, after weights were loaded."""

    def statistics(self) -> dict[str, float]:
        """Totals since the start: `wait_s` seconds spent waiting, `messages` and `bytes` sent."""

    def close(self) -> None:
        """Remove all hooks and close the communicator. Collective."""


@runtime_checkable
class GradientExchange(Protocol):
    """An exchange that averages gradients during backward."""

    def before_backward(self, samples: int, planned: int) -> None:
        """Announce a backward whose loss is a sum, divided by `planned / ranks`.

        The averaged gradients are then those of the global batch, however unevenly its samples are
        shared.

        Args:
            samples: samples of the global batch on this rank; 0 if it runs no backward.
            planned: samples of the global batch on all ranks.
        """

    def weigh(self, samples: float) -> None:
        """Announce a backward whose loss is the mean over `samples` samples of this rank."""

    def hold(self, held: bool) -> None:
        """While held, leave gradients local, to accumulate several backwards.

        The next backward that is not held, or the step, averages their sum.
        """


@runtime_checkable
class PreStepExchange(Protocol):
    """An exchange that acts before the optimizer's step."""

    def before_step(self) -> None:
        """Return once gradients are final on all ranks, and weights may change."""


@runtime_checkable
class PostStepExchange(Protocol):
    """An exchange that acts on changed weights."""

    def after_step(self) -> None:
        """Exchange weights, or start to, after the optimizer has changed them."""


@runtime_checkable
class DeferredExchange(Protocol):
    """An exchange whose messages continue after `after_step`."""

    def finish(self) -> None:
        """Complete all messages under way: weights are then as the next step uses them."""


@runtime_checkable
class JoinsBeforeUse(Protocol):
    """An exchange that completes a bucket just before a module's forward uses it."""

    def watch(self, module: nn.Module) -> None:
        """Add a module that was created after the exchange and uses its parameters."""
