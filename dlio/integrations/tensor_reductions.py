"""Reductions of the ranks' tensors, and gathering them with gradients."""

from collections.abc import Callable
from typing import Any, Final

import torch

from dlio.comm import Communicator
from dlio.comm.survival.recovery import uniform
from dlio.integrations.objects import gather_tensor

REDUCED: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mean": lambda rows: rows.mean(0),
    "avg": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0),
}
"""By name, the reduction of the rows of all ranks."""


class AllGather(torch.autograd.Function):
    """An all-gather with gradients: backward sums each tensor's gradients on its own rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        rows = uniform(comm, lambda: gather_tensor(tensor, comm))
        ctx.comm, ctx.row = comm, comm.rank
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = uniform(ctx.comm, lambda: gather_tensor(gradients[0], ctx.comm))
        return mine.sum(0)[ctx.row], None  # Ranks may have other numbers by now.
