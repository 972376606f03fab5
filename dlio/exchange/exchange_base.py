"""The contract of an exchange: the calls of a training step.

    before_backward, weigh, hold      gradients are about to be computed
    backward
    before_step                       gradients are about to be used
    the optimizer's step
    after_step                        weights have changed
    finish                            weights are about to be used

An exchange overrides the calls of the places where it acts; the others do nothing:

| | `allreduce` etc. | `gossip`, `noloco` | the same, nodes | `asgd` | `local-sgd`, `diloco` |
|---|---|---|---|---|---|
| `before_backward`, `weigh`, `hold` | x | | x | | |
| `take_assigned`, `settle_assigned`, `expect_changes` | x | | x | | |
| `before_step` | x | x | x | x | |
| `after_step` | | x | x | x | x |
| `finish` | | x | x | | x |
| `watch` | | x | x | | |
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dlio.comm.survival.recovery import Recovery
from dlio.exchange.cut import TensorCut
from dlio.exchange.peer_steps import PeerSteps


class Exchange:
    """Keeps the ranks' models together. The caller that creates it closes it.

    It owns its communicator and the hooks that it registers; one thread uses it.
    `dlio.testing.ExchangeTests` checks these promises.
    """

    alike = False
    """True if all ranks have bit-identical weights after every step."""
    peer_steps: PeerSteps | None = None
    """The steps of other ranks that have reached this one; None if all ranks step together."""
    reports_to: Recovery | None = None
    """Learns whose samples the steps have used. Set for the exchange of a training loop, not for
    the exchanges that it is made of: these would report the same steps again."""

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """Ranks, by their numbers when the job began, whose samples the last step has used.

        None if that is not settled yet; a later step then settles it for all steps since.
        """
        return ()

    def before_backward(self, samples: int, planned: int) -> None:
        """Announce a backward whose loss is a sum over `samples` of the global batch, 0 if this
        rank runs none, divided by `planned / ranks`, with the samples of all ranks.

        The averaged gradients are then those of the global batch, however unevenly its samples are
        shared.
        """

    def weigh(self, samples: float) -> None:
        """Announce a backward whose loss is the mean over `samples` samples of this rank."""

    def hold(self, held: bool) -> None:
        """While held, leave gradients local, to accumulate several backwards.

        The next backward that is not held, or the step, averages their sum.
        """

    def take_assigned(self) -> None:
        """Average gradients that are in place without a backward, before they are clipped."""

    def expect_changes(self) -> None:
        """Have the next step look for means that are changed in place: each rank may add a gradient
        of its own to them, which no backward has made."""

    def settle_assigned(self) -> None:
        """Average those of earlier batches, before `weigh` has later ones count otherwise: ranks
        add them up in place, and send them at the step else. Collective."""

    def before_step(self) -> None:
        """Return once gradients are final on all ranks, and weights may change."""

    def after_step(self) -> None:
        """Exchange weights, or start to, after the optimizer has changed them."""
        self._report_contributors()

    def finish(self) -> None:
        """Complete all messages under way: weights are then as the next step uses them."""

    def watch(self, module: nn.Module) -> None:
        """Add a module that was created after the exchange and uses its parameters."""

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        """Adapt to parameters that have been cut in the same way on all ranks. Collective.

        Buckets are rebuilt; residuals, averages and momenta are cut with their parameters. Call it
        between two steps, after `finish`, at the same step on all ranks.
        """
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that later steps depend on besides weights; call it between two steps.

        The tensors are on the host, and later steps may overwrite them. Entries named `owed/...`
        are residuals: their sum over ranks matters. All others are valid only for the same number
        of ranks.
        """
        raise NotImplementedError

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`, or the entries of it that are present, after weights were loaded."""
        raise NotImplementedError

    def join(self) -> None:
        """Begin without the steps of another rank, whose weights and state this one has got."""

    def statistics(self) -> dict[str, float]:
        """Totals since the start: `wait_s` seconds spent waiting, `messages` and `bytes` sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove all hooks and close the communicator. Collective."""
        raise NotImplementedError

    def _report_contributors(self) -> None:
        if self.reports_to is not None and (contributors := self.contributors) is not None:
            self.reports_to.commit_step(contributors)


class PeerExchange(Exchange):
    """An exchange in which ranks step without waiting for all others."""

    peer_steps: PeerSteps
    _recovery: Recovery | None

    @property
    def contributors(self) -> tuple[int, ...]:
        """Members that go on; the steps of lost ones count up to `Recovery.last_counted`."""
        return () if self._recovery is None else self._recovery.membership.members
