"""Layers whose weights the ranks of an axis share: each rank has a part of the matrix.

A linear layer cut by columns computes a part of its outputs, one cut by rows takes a part of its
inputs and needs a sum over ranks. A pair of both has one sum in the forward pass and one in the
backward pass (Megatron-LM, arXiv 1909.08053). A layer on its own is cut by columns, and its outputs
are gathered. Attention is a pair: its heads are columns.

Parameters in parts are plain tensors of the part's shape, so that exchanges, optimizers, averages
and hooks treat them as any others; only sums over all weights and saved states need the whole. All
else is alike on the ranks that share a layer. For torch's DTensor see `tensor_parallel`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.utils import get_total_norm

from dlio.comm import Communicator
from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.layer_plan import Kind, plan_parts
from dlio.features.mesh.sharded_layers import share_layer


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
    """The parts of a model's layers that the ranks of an axis have.

    Args:
        comm: the ranks along `model`; owned by the caller.
    """

    def __init__(self, comm: Communicator) -> None:
        self._ranks = RankGroup(comm)
        self.cuts: dict[str, TensorSplit] = {}
        """By name of each parameter in parts."""
        self.notes: list[str] = []
        """Remarks on the model, for the report."""

    @torch.no_grad()
    def cut(self, model: nn.Module) -> None:
        """Leave this rank's parts of a model's layers, in place.

        The ranks' models are alike before. Hooks, optimizers and copies come later.

        Raises UsageError if no layer can be cut.
        """
        comm, total = self._ranks.comm, sum(each.numel() for each in model.parameters())
        if comm.size == 1:
            return
        cut = 0
        for name, (kind, layer) in plan_parts(model, comm.size).items():
            share_layer(layer, kind, self._ranks)
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
        own = torch.cat([value.reshape(-1).to("cpu", torch.float64) for value in whole])
        digests = comm.allgather(xxhash.xxh3_64_hexdigest(own.numpy().tobytes()))
        if len(set(digests)) == 1:
            return
        first = own.numpy().copy()
        comm.bcast(first)
        away = float((own - torch.from_numpy(first)).norm() / (1e-30 + np.linalg.norm(first)))
        away = max(comm.allgather(away))
        if len(self.notes) == 1:
            self.notes.append(
                "ranks that share layers computed other weights for what they have whole, away by "
                f"{away:.1e} of their norm: they go on with the first one's after each epoch"
            )
        at = 0
        for value in whole:
            mine = torch.from_numpy(first[at : at + value.numel()])
            value.copy_(mine.view(value.shape))
            at += value.numel()

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
