"""Layers whose weights the ranks of an axis share: each rank has a part of the matrix.

A linear layer cut by columns computes a part of its outputs, one cut by rows takes a part of its
inputs and needs a sum over ranks. A pair of both has one sum in the forward pass and one in the
backward pass (Megatron-LM, arXiv 1909.08053). A layer on its own is cut by columns, and its outputs
are gathered. Attention is a pair: its heads are columns.

Parameters in parts are plain tensors of the part's shape, so that exchanges, optimizers, averages
and hooks treat them as any others; only sums over all weights and saved states need the whole. All
else is alike on the ranks that share a layer. For torch's DTensor see `tensor_parallel`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.nn.utils import get_total_norm

from dlio.comm import Communicator
from dlio.errors import UsageError
from dlio.exchange.buckets import broadcast_tensors
from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.halo import fetch, sum_over
from dlio.features.mesh.slab import Slab

# Which layers ranks can share

Kind = Literal["columns", "rows", "gathered", "heads"]
"""`columns` and `rows` are the first and second layer of a pair, `gathered` is a linear layer on
its own, `heads` an attention."""
_LARGE: Final = 65_536
"""Weights from which a linear layer on its own is cut: the messages of smaller ones cost more."""
_POINTWISE: Final = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Identity),
    nn.Dropout,
)
"""Layers between those of a pair, which work on parts as on the whole; dropout if it drops none."""
_FUNCTIONS: Final = (functional.relu, functional.gelu)


def plan_parts(model: nn.Module, ranks: int) -> dict[str, tuple[Kind, nn.Module]]:
    """Return the layers to cut, by name, with how to cut them. Pure.

    Raises UsageError if there are none.
    """
    modules = list(model.modules())
    used = Counter(id(each) for module in modules for each in module.parameters(recurse=False))
    placed = Counter(id(child) for module in modules for child in module._modules.values())

    def own(layer: nn.Module) -> bool:
        """True if it has one place in the model, and no other layer uses its parameters."""
        return placed[id(layer)] <= 1 and all(used[id(each)] == 1 for each in layer.parameters())

    names = {module: name for name, module in model.named_modules()}
    plan: dict[nn.Module, Kind] = {}
    for module in modules:
        for first, second in _pairs(module):
            both = own(first) and own(second) and first not in plan and second not in plan
            if both and first.out_features % ranks == 0:
                plan[first], plan[second] = "columns", "rows"
        for attention in _attentions(module):
            if own(attention) and attention.num_heads % ranks == 0:
                plan[attention] = "heads"
    for module in modules:
        if type(module) is not nn.Linear or module in plan or not own(module):
            continue
        if module.weight.numel() >= _LARGE and module.out_features % ranks == 0:
            plan[module] = "gathered"
    if not plan:
        raise UsageError(
            f"--mesh model={ranks}: the model has no layer that {ranks} ranks can share: heads of "
            f"nn.TransformerEncoderLayer, or linear layers of {_LARGE:,} weights or more, whose "
            f"outputs are a multiple of {ranks}; give another --model or number of ranks"
        )
    return {names[module]: (kind, module) for module, kind in plan.items()}


def _pairs(module: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """Yield linear layers, of which the second takes the first one's outputs and nothing else."""
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        first, second, between = module.linear1, module.linear2, module.activation
        pointwise = between in _FUNCTIONS or type(between) in _POINTWISE
        if pointwise and not _drops(module.dropout) and type(first) is nn.Linear is type(second):
            yield first, second
    if type(module) is nn.Sequential:
        kept = [each for each in module if type(each) not in _POINTWISE or _drops(each)]
        for one, other in itertools.pairwise(kept):
            if type(one) is nn.Linear is type(other):
                yield one, other


def _attentions(module: nn.Module) -> Iterator[nn.MultiheadAttention]:
    """Yield those attentions of a layer of torch's transformers that can be cut by heads."""
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        for each in module.children():
            if type(each) is nn.MultiheadAttention and not (
                each.dropout
                or not each._qkv_same_embed_dim
                or each.bias_k is not None
                or each.add_zero_attn
            ):
                yield each


def _drops(layer: object) -> bool:
    return isinstance(layer, nn.Dropout) and layer.p > 0


# Their forward and backward passes
#
# Inputs of a layer are alike on all ranks, and so are the outputs of a pair, of a gathered layer
# and of attention. The gradient of a tensor that ranks have alike is a sum over them, that of a sum
# is alike.


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


class _ColumnLinear(nn.Linear):
    """A linear layer of which each rank computes a part of the outputs."""

    ranks: RankGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: (..., inputs) -> (..., outputs / ranks)
        return functional.linear(sum_over(x, self.ranks, forward=False), self.weight, self.bias)


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
        out = sum_over(functional.linear(x, self.weight), self.ranks, backward=False)
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
        entered = [sum_over(each, self.ranks, forward=False) for each in given[: 1 if same else 3]]
        q, k, v = (
            functional.linear(x, weight, bias).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for x, weight, bias in zip(
                entered * 3 if same else entered, weights, biases, strict=True
            )
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        values = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        whole = functional.linear(values.transpose(1, 2).flatten(2), self.out_proj.weight)
        whole = sum_over(whole, self.ranks, backward=False)
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
        """Return the terms added to the scores of this rank's heads; (n, heads, words, words)."""
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


# The parts that ranks have


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How a tensor is cut into equal parts."""

    dimension: int
    blocks: int = 1
    """Matrices along the dimension, each of which is cut: 3 for query, key and value in one."""

    def fits(self, whole: torch.Tensor, ranks: int) -> bool:
        """True if ranks can have equal parts of a tensor."""
        extent = whole.shape[self.dimension] if whole.ndim > self.dimension else 0
        return extent > 0 and extent % (self.blocks * ranks) == 0

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return a copy of a rank's part."""
        blocks = self._blocks(whole)
        each = blocks.shape[self.dimension + 1] // ranks
        part = blocks.narrow(self.dimension + 1, rank * each, each)
        return self._flat(part).clone(memory_format=torch.contiguous_format)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the whole of all ranks' parts, in their order."""
        return self._flat(torch.cat(list(map(self._blocks, parts)), self.dimension + 1))

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor, or of a part, with a dimension more: that of the blocks."""
        before, after = tensor.shape[: self.dimension], tensor.shape[self.dimension + 1 :]
        return tensor.reshape(*before, self.blocks, -1, *after)

    def _flat(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.flatten(self.dimension, self.dimension + 1)


class LayerParts:
    """The part of a `RankLayout` in which the ranks of the axis `model` have parts of layers;
    `comm` is the caller's."""

    def __init__(self, comm: Communicator) -> None:
        self._ranks = RankGroup(comm)
        self.cuts: dict[str, TensorSplit] = {}
        """By name of each parameter in parts."""
        self.notes: list[str] = []
        """Remarks on the model, for the report."""

    @torch.no_grad()
    def cut_layers(self, model: nn.Module) -> None:
        """Leave this rank's parts of a model's layers, in place.

        The ranks' models are alike before. Hooks, optimizers and copies come later.

        Raises UsageError if no layer can be cut.
        """
        comm, total = self._ranks.comm, sum(each.numel() for each in model.parameters())
        if comm.size == 1:
            return
        cut = 0
        for name, (kind, layer) in plan_parts(model, comm.size).items():
            layer.__class__ = _CLASSES[kind]  # Its name, buffers and hooks stay.
            cast("_ColumnLinear", layer).ranks = self._ranks
            for own, how in _CUTS[kind].items():
                if (parameter := _parameter(layer, own)) is None:
                    continue
                cut += parameter.numel()
                parameter.data = how.part(parameter.data, comm.rank, comm.size)
                self.cuts[f"{name}.{own}" if name else own] = how
        for module in model.modules():
            # torch's fused forms of these layers take whole weights.
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
        share = 100 * cut / total
        self.notes.append(
            f"{comm.size} ranks share {len(self.cuts)} tensors, {share:.0f} % of the weights"
        )

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, or of a state of its shape."""
        comm, cut = self._ranks.comm, self.cuts.get(name)
        if cut is None or not cut.fits(whole, comm.size):
            return whole
        return cut.part(whole, comm.rank, comm.size)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of a parameter, or of a state of its shape, on its device. Collective
        over the ranks along the axis."""
        if name not in self.cuts or not part.ndim:
            return part
        comm, own = self._ranks.comm, part.detach()
        others = [rank != comm.rank for rank in range(comm.size)]
        received = self._ranks.swap(
            [own if other else None for other in others],
            [tuple(own.shape) if other else None for other in others],
            own.dtype,
        )
        parts = [own if each is None else each.to(own.device) for each in received]
        return self.cuts[name].join(parts)

    @torch.no_grad()
    def align(self, model: nn.Module) -> None:
        """Copy the first rank's whole parameters and buffers to the others, if these differ.

        They are alike as long as ranks compute alike: kernels of a device that are not
        deterministic, or random numbers of a model that are not torch's, make them differ. `notes`
        says so, once. Collective over the ranks along the axis.
        """
        if not self.cuts:
            return
        comm = self._ranks.comm
        whole = [value for name, value in model.state_dict().items() if name not in self.cuts]
        own = _flat(whole)
        digests = comm.allgather(xxhash.xxh3_64_hexdigest(own.numpy().tobytes()))
        if len(set(digests)) == 1:
            return
        broadcast_tensors(whole, comm)
        first = _flat(whole)
        away = max(comm.allgather(float((own - first).norm() / (1e-30 + first.norm()))))
        if len(self.notes) == 1:
            self.notes.append(
                "ranks that share layers computed other weights for what they have whole, away by "
                f"{away:.1e} of their norm: they go on with the first one's after each epoch"
            )

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of all gradients, the same on all ranks of the axis. Collective there."""
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        norm = get_total_norm([each for name, each in named if name not in self.cuts])
        if not self.cuts:
            return norm
        of_parts = get_total_norm([each for name, each in named if name in self.cuts])
        like = named[-1][1] if named else norm
        squares = self._ranks.total(of_parts.to(like.device, torch.float64).square().reshape(1))
        return (norm.to(squares).square() + squares[0]).sqrt().to(like.dtype)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1).to("cpu", torch.float64) for each in tensors])


def _parameter(layer: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, last = name.rpartition(".")
    return cast("nn.Parameter | None", getattr(layer.get_submodule(owner), last))


_BY_COLUMNS: Mapping[str, TensorSplit] = {"weight": TensorSplit(0), "bias": TensorSplit(0)}
_CUTS: Mapping[Kind, Mapping[str, TensorSplit]] = {
    "columns": _BY_COLUMNS,
    "gathered": _BY_COLUMNS,
    "rows": {"weight": TensorSplit(1)},
    "heads": {
        "in_proj_weight": TensorSplit(0, 3),
        "in_proj_bias": TensorSplit(0, 3),
        "out_proj.weight": TensorSplit(1),
    },
}
