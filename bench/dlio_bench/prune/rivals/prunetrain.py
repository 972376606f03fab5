"""PruneTrain (Lym et al., arXiv 1901.09290): group lasso from the start, and periodic cuts."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.features.pruning.neuron_groups import GroupMember, Indices, NeuronGroup
from dlio.train.callbacks.callback_base import Run
from dlio.train.report import EpochReport
from dlio_bench.prune.rivals.network_cutter import NetworkCutter

_MULTIPLE: Final = 8


class PruneTrain(NetworkCutter):
    """Lasso on the weights of each input and each output channel; cut channels that reach zero.

    The lasso's part of each step is a proximal one, which reaches zero exactly, where the authors
    add its gradient and cut below a threshold. The size of the batch stays.

    Args:
        sizes: see `NetworkCutter`.
        ratio: share of the lasso in the first loss; the authors take 0.2 to 0.25.
        every: epochs between two cuts.
    """

    def __init__(self, sizes: str, ratio: float = 0.25, every: int = 1) -> None:
        super().__init__(sizes)
        self._ratio, self._every, self._penalty = ratio, every, 0.0

    def begins(self, run: Run) -> None:
        super().begins(run)
        classes = [each.out_features for each in run.model.modules() if isinstance(each, nn.Linear)]
        total = sum(
            float(norms(run.model, member).sum())
            for group in self.groups
            for member in (*group.producers, *group.consumers)
        )
        first_loss = math.log(classes[-1])
        self._penalty = self._ratio / (1 - self._ratio) * first_loss / total

    @torch.no_grad()
    def after_step(self, run: Run) -> None:
        settings = run.optimizer.param_groups[0]
        step = settings["lr"] * self._penalty / (1 - settings.get("momentum", 0.0))
        for group in self.groups:
            for member in (*group.producers, *group.consumers):
                shrink(run.model, member, step)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        if (report.epoch + 1) % self._every == 0:
            keep = {group.name: remaining(run.model, group) for group in self.groups}
            self.cut(run, {name: left for name, left in keep.items() if len(left)})
        super().epoch_ends(run, report)


def norms(model: nn.Module, member: GroupMember) -> torch.Tensor:
    """Norm of each neuron's weights on one side of one layer; shape (width,)."""
    weight = model.get_submodule(member.module).get_parameter("weight").detach()
    rows = weight.movedim(member.dim, 0).flatten(1).square().sum(1)
    channels = torch.from_numpy(member.channels).to(rows.device)
    return rows[channels].sum(1).sqrt()


def shrink(model: nn.Module, member: GroupMember, step: float) -> None:
    """Shorten each neuron's weights by `step`, to zero at least."""
    weight = model.get_submodule(member.module).get_parameter("weight")
    factors = (1 - step / norms(model, member).clamp(min=1e-30)).clamp(min=0)
    each = torch.ones(weight.shape[member.dim], device=weight.device)
    each[torch.from_numpy(member.channels).to(weight.device)] = factors[:, None]
    weight.mul_(each.view([-1 if dim == member.dim else 1 for dim in range(weight.ndim)]))


def remaining(model: nn.Module, group: NeuronGroup, multiple: int = _MULTIPLE) -> Indices:
    """Return the neurons that stay: all that some producer computes and some consumer reads.

    Rounded up to a multiple by the largest of the others; `multiple` at least.
    """
    made = _largest(model, group.producers)
    read = _largest(model, group.consumers)
    alive = np.minimum(made, read)
    count = max(multiple, -(-int((alive > 0).sum()) // multiple) * multiple)
    order = np.argsort(-alive, kind="stable")[: min(count, group.width)]
    return np.sort(order).astype(np.int64)


def _largest(model: nn.Module, members: Sequence[GroupMember]) -> npt.NDArray[np.float32]:
    largest = torch.stack([norms(model, member) for member in members]).amax(0)
    return largest.cpu().numpy().astype(np.float32)
