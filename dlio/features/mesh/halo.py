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


def _swapped(
    tensor: torch.Tensor,
    slab: Slab,
    first: int,
    given: Sequence[Interval | None],
    taken: Sequence[Interval | None],
    traffic: RankGroup,
) -> list[torch.Tensor | None]:
    """Return the intervals that this rank takes of each rank, its own included. Collective.

    `first` is the index of the tensor's first element along the dimension of `slab`; each rank gets
    the interval in `given`.
    """
    axis, me = slab.dimension, slab.rank
    parts = [
        None if part is None else tensor.narrow(axis, part[0] - first, part[1] - part[0])
        for part in given
    ]
    shapes = [
        None if part is None or rank == me else _resized(tensor.shape, axis, part[1] - part[0])
        for rank, part in enumerate(taken)
    ]
    own, parts[me] = parts[me], None
    received = traffic.swap(parts, shapes, tensor.dtype)
    received[me] = own
    return [None if piece is None else piece.to(tensor.device) for piece in received]


class _Fetch(torch.autograd.Function):
    """This rank's part, grown or shrunk to another interval, of which each rank has its own."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, slab: Slab, wanted: Sequence[Interval], traffic: RankGroup
    ) -> torch.Tensor:
        given = [_overlap(each, slab.own) for each in wanted]
        taken = [_overlap(wanted[slab.rank], slab.bounds(rank)) for rank in range(slab.ranks)]
        ctx.slab, ctx.first, ctx.traffic = slab, wanted[slab.rank][0], traffic
        ctx.given, ctx.taken = given, taken
        received = _swapped(local, slab, slab.own[0], given, taken, traffic)
        pieces = [piece for piece in received if piece is not None]
        return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, slab.dimension)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slab: Slab = ctx.slab
        axis, (start, _) = slab.dimension, slab.own
        received = _swapped(gradient, slab, ctx.first, ctx.taken, ctx.given, ctx.traffic)
        own = gradient.new_zeros(_resized(gradient.shape, axis, slab.length))
        for part, piece in zip(ctx.given, received, strict=True):
            if piece is not None:
                own.narrow(axis, part[0] - start, part[1] - part[0]).add_(piece)
        return own, None, None, None


def _resized(shape: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    sides = list(shape)
    sides[axis] = length
    return tuple(sides)


class _SumOver(torch.autograd.Function):
    """The sum over ranks of a tensor, of its gradient, or of both; the other one stays."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, traffic: RankGroup, forward: bool, backward: bool
    ) -> torch.Tensor:
        ctx.traffic, ctx.sums = traffic, backward
        return traffic.total(values) if forward else values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.traffic.total(gradient) if ctx.sums else gradient, None, None, None


def fetch(
    local: torch.Tensor, slab: Slab, wanted: Sequence[Interval], traffic: RankGroup
) -> torch.Tensor:
    """Return the elements `wanted[slab.rank]` of a dimension. Collective over the ranks of `slab`.

    `local` is this rank's part. The interval of each rank is within the dimension and not empty.

    Raises CommTimeout if another rank does not answer in time.
    """
    if all(interval == slab.bounds(rank) for rank, interval in enumerate(wanted)):
        return local
    out: torch.Tensor = cast("Any", _Fetch).apply(local, slab, wanted, traffic)
    return out


def sum_over(
    values: torch.Tensor, traffic: RankGroup, *, forward: bool = True, backward: bool = True
) -> torch.Tensor:
    """Return the sum over ranks of a tensor of one shape, whose gradient is the sum of the ranks'
    gradients. Collective.

    With `forward=False` the tensor itself is returned: ranks have it alike, and use it in parts.
    With `backward=False` the gradient stays: ranks use the sum alike. The two are adjoint.

    Raises CommTimeout if another rank does not answer in time.
    """
    if traffic.comm.size == 1:
        return values
    out: torch.Tensor = cast("Any", _SumOver).apply(values, traffic, forward, backward)
    return out
