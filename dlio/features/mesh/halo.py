"""Parts of tensors between ranks, in forward and backward passes.

Each function has an adjoint that communicates as well: every rank computes the gradient of the sum
of all ranks' losses. Ranks run the same layers in the same order, so that messages pair up.

Tensors of other devices pass through the host.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.slab import Interval, Slab


def _overlap(one: Interval, other: Interval) -> Interval | None:
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first < last else None


class _Fetch(torch.autograd.Function):
    """This rank's part, grown or shrunk to another interval, of which each rank has its own."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, slab: Slab, wanted: Sequence[Interval], traffic: RankGroup
    ) -> torch.Tensor:
        ctx.slab, ctx.wanted, ctx.traffic = slab, wanted, traffic
        axis, (start, _) = slab.dimension, slab.own
        mine = wanted[slab.rank]
        parts: list[torch.Tensor | None] = [None] * slab.ranks
        shapes: list[tuple[int, ...] | None] = [None] * slab.ranks
        for rank in range(slab.ranks):
            if rank == slab.rank:
                continue
            if (part := _overlap(wanted[rank], slab.own)) is not None:
                parts[rank] = local.narrow(axis, part[0] - start, part[1] - part[0])
            if (part := _overlap(mine, slab.bounds(rank))) is not None:
                shapes[rank] = _resized(local.shape, axis, part[1] - part[0])
        received = traffic.swap(parts, shapes, local.dtype)
        pieces = []
        for rank, piece in enumerate(received):
            if rank == slab.rank and (part := _overlap(mine, slab.own)) is not None:
                pieces.append(local.narrow(axis, part[0] - start, part[1] - part[0]))
            elif piece is not None:
                pieces.append(piece.to(local.device))
        if len(pieces) == 1:
            return pieces[0].clone()
        return torch.cat(pieces, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slab: Slab = ctx.slab
        axis, (start, _) = slab.dimension, slab.own
        mine = ctx.wanted[slab.rank]
        parts: list[torch.Tensor | None] = [None] * slab.ranks
        shapes: list[tuple[int, ...] | None] = [None] * slab.ranks
        for rank in range(slab.ranks):
            if rank == slab.rank:
                continue
            if (part := _overlap(mine, slab.bounds(rank))) is not None:
                parts[rank] = gradient.narrow(axis, part[0] - mine[0], part[1] - part[0])
            if (part := _overlap(ctx.wanted[rank], slab.own)) is not None:
                shapes[rank] = _resized(gradient.shape, axis, part[1] - part[0])
        received = ctx.traffic.swap(parts, shapes, gradient.dtype)
        own = gradient.new_zeros(_resized(gradient.shape, axis, slab.length))
        for rank, piece in enumerate(received):
            part = _overlap(ctx.wanted[rank], slab.own)
            if part is None:
                continue
            if rank == slab.rank:
                piece = gradient.narrow(axis, part[0] - mine[0], part[1] - part[0])
            if piece is not None:
                own.narrow(axis, part[0] - start, part[1] - part[0]).add_(piece.to(own.device))
        return own, None, None, None


def _resized(shape: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    sides = list(shape)
    sides[axis] = length
    return tuple(sides)


class _SumOver(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, traffic: RankGroup) -> torch.Tensor:
        ctx.traffic = traffic
        return traffic.total(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.traffic.total(gradient), None


def fetch(
    local: torch.Tensor, slab: Slab, wanted: Sequence[Interval], traffic: RankGroup
) -> torch.Tensor:
    """Return the elements `wanted[slab.rank]` of a dimension. Collective over the ranks of `slab`.

    Args:
        local: this rank's part; its length along `slab.dimension` is `slab.length`.
        wanted: the interval of each rank, within the dimension and not empty.

    Raises CommTimeout if another rank does not answer in time.
    """
    if all(interval == slab.bounds(rank) for rank, interval in enumerate(wanted)):
        return local
    out: torch.Tensor = cast("Any", _Fetch).apply(local, slab, wanted, traffic)
    return out


def sum_over(values: torch.Tensor, traffic: RankGroup) -> torch.Tensor:
    """Return the sum over ranks of a tensor of one shape. Collective.

    Raises CommTimeout if another rank does not answer in time.
    """
    if traffic.comm.size == 1:
        return values
    out: torch.Tensor = cast("Any", _SumOver).apply(values, traffic)
    return out
