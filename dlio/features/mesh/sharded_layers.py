"""The forward and backward passes of layers in parts: see `layer_parts`.

Inputs of a layer are alike on all ranks, and so are the outputs of a pair, of a gathered layer and
of attention. `_Enter` and `_Sum` are each other's adjoint: the gradient of a tensor that ranks have
alike is a sum over them, that of a sum is alike.
"""

from typing import Any, Final, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.halo import fetch
from dlio.features.mesh.layer_plan import Kind
from dlio.features.mesh.slab import Slab


class _Enter(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of what their parts give."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.ranks.total(gradient), None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' terms, which all have then."""

    @staticmethod
    def forward(_ctx: Any, values: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        return ranks.total(values)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All ranks' parts of the last dimension, which all have then."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        comm = ranks.comm
        ctx.slab = slab = Slab(values.shape[-1] * comm.size, -1, comm.rank, comm.size)
        return fetch(values, slab, [(0, slab.extent)] * slab.ranks, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, _ = ctx.slab.own
        return gradient.narrow(-1, first, ctx.slab.length), None


def _enter(values: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", _Enter).apply(values, ranks))


def _sum(values: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", _Sum).apply(values, ranks))


class _ColumnLinear(nn.Linear):
    """A linear layer of which each rank computes a part of the outputs."""

    ranks: RankGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (..., inputs) -> (..., outputs / ranks)
        return functional.linear(_enter(x, self.ranks), self.weight, self.bias)


class _GatheredLinear(_ColumnLinear):
    """The same with the whole output: (..., outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = cast("Any", _Gather).apply(super().forward(x), self.ranks)
        return whole


class _RowLinear(nn.Linear):
    """A linear layer that takes a part of the inputs on each rank."""

    ranks: RankGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (..., inputs / ranks) -> (..., outputs)
        out = _sum(functional.linear(x, self.weight), self.ranks)
        return out if self.bias is None else out + self.bias


class _HeadAttention(nn.MultiheadAttention):
    """Attention of which each rank has some of the heads; it returns no weights.

    Its masks are those of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.
    """

    ranks: RankGroup

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # query: (n, words, width), or (words, n, width) unless `batch_first`; out like query
        batched = query.dim() == 3
        given = [query, key, value]
        if not batched:
            given = [each.unsqueeze(0) for each in given]
        elif not self.batch_first:
            given = [each.transpose(0, 1) for each in given]
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        # One sum of gradients if they are one tensor, as in self-attention.
        same = query is key is value
        entered = [_enter(each, self.ranks) for each in given[: 1 if same else 3]]
        q, k, v = (
            functional.linear(x, weight, bias).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for x, weight, bias in zip(
                entered * 3 if same else entered, weights, biases, strict=True
            )
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        values = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        values = values.transpose(1, 2).flatten(2)
        whole = _sum(functional.linear(values, self.out_proj.weight), self.ranks)
        if self.out_proj.bias is not None:
            whole = whole + self.out_proj.bias
        if not batched:
            whole = whole.squeeze(0)
        elif not self.batch_first:
            whole = whole.transpose(0, 1)
        return whole, None

    def _mask(
        self, mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor
    ) -> torch.Tensor | None:
        """Return what is added to the scores of this rank's heads; (n, heads, words, words)."""
        total: torch.Tensor | None = None
        if mask is not None:
            total = _added(mask, query.dtype)
            if total.dim() == 3:  # (n x heads, words, words)
                comm, heads = self.ranks.comm, query.shape[1]
                total = total.view(-1, self.num_heads, *total.shape[1:])
                total = total.narrow(1, comm.rank * heads, heads)
        if padding is not None:
            padded = _added(padding, query.dtype).view(-1, 1, 1, padding.shape[-1])
            total = padded if total is None else total + padded
        return total


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as numbers that are added to scores; True stands for one that is left out."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


_CLASSES: Final[dict[Kind, type[nn.Module]]] = {
    "columns": _ColumnLinear,
    "gathered": _GatheredLinear,
    "rows": _RowLinear,
    "heads": _HeadAttention,
}


def share_layer(layer: nn.Module, kind: Kind, ranks: RankGroup) -> None:
    """Have a layer compute as one of which each rank has a part, in place.

    Its name, buffers and hooks stay. Its parameters become parts separately.
    """
    layer.__class__ = _CLASSES[kind]
    cast("_ColumnLinear", layer).ranks = ranks
