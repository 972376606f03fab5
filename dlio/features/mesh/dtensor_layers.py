"""Layers whose weights the ranks of an axis share, by torch's DTensor.

A pair of linear layers, the first cut by columns and the second by rows, needs one sum over ranks
in the forward pass and one in the backward pass (Megatron-LM, arXiv 1909.08053). Attention is such
a pair: the heads of query, key and value are columns.

Gradients of weights in parts are of this rank's part. `average_gradients` averages them, and those
of whole weights, over the axis `data`.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.exchange.distribute import parameters_of
from dlio.features.mesh.rank_mesh import Mesh
from dlio.util.closable import Closable

Cut = Literal["column", "row"]


def tensor_parallel(
    model: nn.Module, plan: Mapping[str, Cut], mesh: Mesh, device: str = "cpu"
) -> nn.Module:
    """Cut linear layers into the parts of the ranks along `model`, in place. Collective.

    The ranks' models are alike before, such as by one seed. Parameters become DTensors, which
    `full_tensor()` returns whole.

    Args:
        plan: by name of the layer, `*` for any part of it, such as `{"*.query": "column",
            "*.out": "row"}`. `column` cuts the outputs, which a layer of `row` takes.
        device: type of device, `cpu` or `cuda`.

    Returns the model. Raises UsageError for names of no linear layer, and sizes that the ranks do
    not divide.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    size = mesh.size("model")
    if size == 1:
        return model
    styles: dict[str, ParallelStyle] = {}
    linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    for pattern, cut in plan.items():
        names = [name for name in linear if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                f"tensor_parallel: no linear layer is called {pattern!r}: the model has "
                f"{', '.join(list(linear)[:20]) or 'none'}"
            )
        if cut not in ("column", "row"):
            raise UsageError(f"tensor_parallel: {pattern!r}: choose column or row, not {cut!r}")
        for name in names:
            count = linear[name].out_features if cut == "column" else linear[name].in_features
            if count % size:
                raise UsageError(
                    f"tensor_parallel: {name} has {count} {cut}s, which {size} ranks do not divide"
                )
            styles[name] = ColwiseParallel() if cut == "column" else RowwiseParallel()
    return parallelize_module(model, mesh.device_mesh(device)["model"], styles)


class AveragedGradients(Closable):
    """Averages gradients over the axis `data` before each step of an optimizer.

    In contrast to `Mesh.distribute`, parameters may be DTensors, and sums begin when backward has
    ended.
    """

    def __init__(self, mesh: Mesh, optimizer: torch.optim.Optimizer) -> None:
        self._comm = mesh.data_ranks().dup()
        self._optimizer = optimizer
        self.bytes = 0
        """Bytes of gradients that this rank has averaged."""
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._average())

    def close(self) -> None:
        """Leave later steps alone. Collective over the ranks along `data`."""
        self._hook.remove()
        self._comm.close()

    @torch.no_grad()
    def _average(self) -> None:
        if self._comm.size == 1:
            return
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in (parameter.grad for parameter in parameters_of(self._optimizer)):
            if gradient is not None:
                wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
                is_part = hasattr(gradient, "to_local")  # It shares the gradient's memory.
                part = cast("Any", gradient).to_local() if is_part else gradient
                by_type.setdefault(wide, []).append(part)
        for wide, tensors in by_type.items():
            flat = torch.cat([each.reshape(-1).to("cpu", wide) for each in tensors])
            self._comm.wait([self._comm.iallreduce(flat.numpy())], "the other ranks' gradients")
            flat /= self._comm.size
            self.bytes += flat.nbytes
            means = torch.split(flat, [each.numel() for each in tensors])
            for each, mean in zip(tensors, means, strict=True):
                each.copy_(mean.view(each.shape))


def average_gradients(mesh: Mesh, optimizer: torch.optim.Optimizer) -> AveragedGradients:
    """Average gradients over the ranks along `data` before each step of an optimizer. Collective.

    For models with parts of `tensor_parallel`; losses are means over the rank's samples.
    """
    return AveragedGradients(mesh, optimizer)
