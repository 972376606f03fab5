"""The mesh of ranks: axes of different samples, of shared samples and of shared weights."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator, world
from dlio.comm.survival.recovery import recovery_of
from dlio.data.chunks import chunked_of
from dlio.data.reader import Reader
from dlio.data.reader_contract import abilities_of
from dlio.errors import UsageError
from dlio.exchange.distribute import ExchangeHandle, connect
from dlio.exchange.exchange_spec import parse_exchange
from dlio.exchange.rank_group import RankGroup
from dlio.features.mesh.mesh_axes import AXES, parse_axes
from dlio.features.mesh.slab import Slab, longest_dimension
from dlio.features.mesh.split_tensor import SplitTensor, join
from dlio.features.mesh.tensor_sharing import TensorSharing
from dlio.loader.dataset import Dataset, open_dataset
from dlio.util.arguments import PathText, one_of
from dlio.util.closable import Closable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REPLICAS = ("data", "space")
"""Axes whose ranks have the same weights."""


class Mesh(Closable):
    """All ranks, arranged along axes; exported as `dlio.Mesh`. Collective; so is `close`.

    - `data`: each rank has samples of its own; gradients are averaged.
    - `space`: the ranks have a slab of each sample; see `open` and `split`.
    - `model`: the ranks have parts of layers; see `dlio.features.mesh.tensor_parallel`.

    Ranks are numbered in the order of the axes, the last one fastest: with `data=2,space=2`, ranks
    0 and 1 share samples. Put the axis that communicates most last, so that it is within a node.

    Args:
        axes: `"data=2,space=2"`, or sizes by name. Without `data`, the ranks that the others leave
            are along `data`.
        batch_norm: `sync` normalises by the samples of all ranks, as one process would; `local` by
            those of the ranks that share samples.
        comm: all ranks; those of the job by default.

    Raises UsageError if the axes do not fit the number of ranks.
    """

    def __init__(
        self,
        axes: str | Mapping[str, int],
        *,
        batch_norm: str = "sync",
        comm: Communicator | None = None,
    ) -> None:
        one_of("batch_norm", batch_norm, ("sync", "local"))
        whole = world() if comm is None else comm
        self.axes = parse_axes(axes, whole.size)
        """Names and sizes of the axes."""
        if recovery_of(whole) is not None and whole.size > 1:
            raise UsageError(
                "a mesh needs all of its ranks, and these may go on without some: leave "
                "--fault-tolerance out"
            )
        self.rank, self.ranks = whole.rank, whole.size
        self.place = self.axes.place(whole.rank)
        """This rank's coordinate along each axis."""
        self._whole = whole
        self._comms: dict[tuple[str, ...], Communicator] = {}
        for names in (*[(name,) for name in AXES], _REPLICAS):
            self._comms[names] = whole.split(self.axes.group(whole.rank, names))
        self._space = RankGroup(self._comms["space",].dup())
        self._norm = self._space
        if batch_norm == "sync" and self.axes.size("data") > 1:
            self._norm = RankGroup(self._comms[_REPLICAS].dup())

    def __repr__(self) -> str:
        return f"dlio.Mesh({str(self.axes)!r}, rank {self.rank} at {self.place})"

    def barrier(self) -> None:
        """Return once all ranks of the mesh have called it. Collective."""
        self._whole.barrier()

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 if the mesh does not have it."""
        return self.axes.size(axis)

    def along(self, axis: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one along an axis alone.

        Owned by the mesh; duplicate it for messages of your own.
        """
        return self._comms[one_of("axis", axis, AXES),]

    def data_ranks(self) -> Communicator:
        """Return the ranks that share the data; a loader with `mesh=` asks for them."""
        return self._comms["data",]

    def slab(self, extent: int, dimension: int) -> Slab:
        """Return this rank's part of a dimension of samples.

        Args:
            extent: elements of the whole dimension.
            dimension: counted from the last one, which is -1.

        Raises UsageError if there are fewer elements than ranks along `space`.
        """
        space = self._comms["space",]
        return Slab(extent, dimension, space.rank, space.size)

    def split(self, local: torch.Tensor, slab: Slab) -> SplitTensor:
        """Return this rank's part of a batch as a tensor that the ranks along `space` share.

        A model then computes on it what it would compute on the whole batch. The gradient of a
        loss is right for `distribute`: the mean over all ranks of `data` and `space`.

        Args:
            local: the part, such as a batch of `open`'s data set.
        """
        return join(local, TensorSharing(slab, self._space, self._norm))

    def cut(self, whole: torch.Tensor, dimension: int) -> SplitTensor:
        """Return this rank's part of a batch that each rank along `space` has whole.

        For samples that cannot be read in parts, such as decoded pictures; `split` is for others.

        Args:
            dimension: counted from the last one, which is -1.

        Raises UsageError if there are fewer elements than ranks along `space`.
        """
        slab = self.slab(_extent(tuple(whole.shape), dimension, "the batch"), dimension)
        first, _ = slab.own
        return self.split(whole.narrow(dimension, first, slab.length).contiguous(), slab)

    def open(
        self,
        path: PathText | Sequence[PathText],
        *,
        dimension: int | None = None,
        fields: Sequence[str] | None = None,
        **options: object,
    ) -> tuple[Dataset, Slab]:
        """Open a data set of which this rank reads its slab of every sample alone.

        Returns (data set, slab). Give the loader `mesh=` this mesh, so that the ranks that share
        samples get the same ones.

        Args:
            path: arrays of which row i is sample i (HDF5, Zarr, NumPy); or files that are one
                sample each (class folders, or with `samples="files"`), all of one shape.
            dimension: the one to cut, counted from the last one, which is -1; by default the
                longest one of the largest field.
            fields: the fields to cut; by default all that have this dimension in this extent.
            options: as for `dlio.open`.

        Raises UsageError for samples that cannot be cut so, SourceError as `dlio.open`.
        """
        given: dict[str, Any] = options
        with open_dataset(path, **{**given, "tiers": "none"}) as whole:
            are_files = abilities_of(whole.reader).files_are_samples
            shapes = _shapes_of_files(whole.reader) if are_files else _shapes(whole.reader)
        if not shapes:
            raise UsageError(
                f"{path}: samples have no arrays of one shape for all, so that ranks cannot share "
                "them: name the arrays after ::, or leave space= out of the mesh"
            )
        largest = max(shapes, key=lambda name: math.prod(shapes[name]))
        axis = longest_dimension(shapes[largest]) if dimension is None else dimension
        slab = self.slab(_extent(shapes[largest], axis, largest), axis)
        if slab.ranks == 1:
            return open_dataset(path, **given), slab
        if are_files:
            return self._open_files(path, slab, shapes[largest], given), slab
        cut = fields
        if cut is None:
            fits = {name: len(s) >= -axis and s[axis] == slab.extent for name, s in shapes.items()}
            cut = [name for name, fit in fits.items() if fit]
        missing = [name for name in cut if name not in shapes]
        if missing:
            raise UsageError(
                f"fields= names {missing[0]!r}, which is not an array of one shape in {path}: "
                f"choose from {', '.join(shapes)}"
            )
        select = {name: slab.select(shapes[name]) for name in cut}
        return open_dataset(path, select=select, **given), slab

    def _open_files(
        self, path: Any, slab: Slab, shape: tuple[int, ...], options: Mapping[str, Any]
    ) -> Dataset:
        """Open files that are one sample each: their slabs are patches on a grid."""
        if slab.extent % slab.ranks:
            raise UsageError(
                f"{path}: {slab.ranks} ranks share dimension {slab.dimension} of files that are "
                f"one sample each, and its extent of {slab.extent} is not a multiple: choose "
                "another dimension=, or store the samples as rows of one array"
            )
        sides: list[int | None] = [None] * len(shape)
        sides[slab.dimension] = slab.length
        stride = [slab.length] * len(sides)
        data = open_dataset(path, patch=sides, patch_stride=stride, **options)
        return data.chosen(np.arange(slab.rank, len(data), slab.ranks))

    def distribute(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        exchange: str = "allreduce",
        *,
        seed: int = 0,
    ) -> ExchangeHandle:
        """Train one model together, as `dlio.distribute` does. Collective.

        Ranks that have the same weights average gradients: over `data`, where each has samples of
        its own, and over `space`, where the ranks' gradients are parts of one sum. Losses are means
        over the rank's samples, and ranks have equally many; if not, see `weigh`.

        Args:
            exchange: as in `dlio train --exchange`; one that averages gradients if ranks share
                samples.

        Raises UsageError for an exchange that cannot work, and for parameters in parts.
        """
        spec = parse_exchange(exchange)
        if self.size("space") > 1 and spec.payload != "gradient":
            raise UsageError(
                f"exchange={exchange!r} averages weights, and ranks that share samples need each "
                "other's gradients: choose allreduce or another exchange of gradients"
            )
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise UsageError(
                "the model has parameters of torch's DTensor: average their gradients by "
                "dlio.features.mesh.average_gradients(mesh, optimizer), or give "
                "fully_shard the mesh's axis data"
            )
        return connect(
            model,
            optimizer,
            spec,
            seed=seed,
            pretend_nodes=None,
            are_alike=False,
            follow_steps=True,
            comm=self._comms[_REPLICAS],
        )

    def weigh(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """Return a loss that counts in proportion to the samples of this rank. Collective.

        For batches of different sizes along `data`, such as the last one of an epoch. In contrast
        to `ExchangeHandle.weigh` it is right for batch normalisation over these ranks as well.

        Args:
            loss: a mean over the rank's samples.
            samples: the number of them.
        """
        data = self._comms["data",]
        total = np.array([samples], np.int64)
        data.wait([data.iallreduce(total)], "the number of samples")
        return loss * (samples * data.size / max(1, int(total[0])))

    def device_mesh(self, device: str = "cpu") -> "DeviceMesh":
        """Return torch's mesh of the same axes and ranks, for DTensor and FSDP2. Collective.

        Args:
            device: type of device, `cpu` or `cuda`.

        Raises UsageError unless torch.distributed is initialised with these ranks.
        """
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise UsageError(
                "torch's DTensor needs torch.distributed: call "
                "torch.distributed.init_process_group() first, in ranks of torchrun or dlio run"
            )
        here = distributed.get_rank(), distributed.get_world_size()
        if here != (self.rank, self.ranks):
            raise UsageError(
                f"this is rank {self.rank} of {self.ranks}, and rank {here[0]} of {here[1]} for "
                "torch.distributed: start both with the same ranks"
            )
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device, self.axes.sizes, mesh_dim_names=self.axes.names)

    def statistics(self) -> dict[str, int]:
        """Totals of this rank: `messages` and `bytes` sent to ranks that share its samples."""
        return {"messages": self._space.messages, "bytes": self._space.bytes}

    def close(self) -> None:
        """Release the communicators. Collective; after the last pass of any model."""
        if self._norm is not self._space:
            self._norm.comm.close()
        self._space.comm.close()
        for comm in self._comms.values():
            comm.close()
        self._comms = {}


def _shapes(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the fields that are arrays of one shape in all samples."""
    return {
        name: tuple(size for size in kind.shape if size is not None)
        for name, kind in reader.schema.kinds.items()
        if kind.fixed and kind.shape
    }


def _shapes_of_files(reader: Reader) -> dict[str, tuple[int, ...]]:
    """Return the same for files that are one sample each."""
    shapes = {
        name: {array.shape for array in arrays} for name, arrays in chunked_of([reader]).items()
    }
    return {name: own.pop() for name, own in shapes.items() if len(own) == 1}


def _extent(shape: tuple[int, ...], dimension: int, name: str) -> int:
    if not -len(shape) <= dimension < 0:
        raise UsageError(
            f"dimension={dimension}: the shape of {name} is {shape}; count from the last one, "
            "which is -1"
        )
    return shape[dimension]
