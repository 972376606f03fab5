"""The ranks of a run that share samples or layers (`--mesh data=2,space=2`)."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
import xxhash

from dlio.comm import Communicator
from dlio.comm.job_nodes import find_nodes
from dlio.data.reader import Reader
from dlio.data.schema import Schema
from dlio.errors import UsageError
from dlio.features.mesh.layer_parts import LayerParts
from dlio.features.mesh.mesh_axes import parse_axes
from dlio.features.mesh.mesh_feature import MeshOptions
from dlio.features.mesh.rank_mesh import Mesh
from dlio.features.mesh.slab import Slab, longest_dimension
from dlio.features.mesh.split_tensor import gather
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.storage.mount import Mount
from dlio.train.array_fields import array_fields, is_arrays, is_table
from dlio.train.config import TrainConfig
from dlio.train.feature_hooks import FeatureHooks, FeatureRun
from dlio.train.rank_layout import RankLayout
from dlio.train.tasks.task_base import Convert, TrainingTask

_HEIGHT: Final = -2
"""Dimension in which pictures are cut: they are decoded whole."""


class MeshLayout(RankLayout):
    """A run whose ranks along one axis of a mesh have the same samples; owns the mesh.

    They share the samples in one of two ways, see the derived classes; `shuffle` is `--shuffle`.
    """

    def __init__(self, mesh: Mesh, axis: str, comm: Communicator, shuffle: str) -> None:
        super().__init__(comm)
        self.mesh = self.data_mesh = mesh
        self.data, self.sharers = mesh.along("data"), mesh.along(axis)
        self.counts = self.sharers.rank == 0
        self._shuffle = shuffle

    def machines(self, mounted: Mount) -> int:
        return find_nodes(self.comm).machines  # The data set knows the ranks of `data` alone.

    def check_order(self, mounted: Mount) -> None:
        if self._shuffle == "global":
            return
        # The mode `batch` follows the places where tiers hold samples.
        nodes = mounted.nodes.node_of.tobytes() + mounted.placement.home.tobytes()
        digests = self.sharers.allgather(xxhash.xxh3_64_hexdigest(nodes))
        if len(set(digests)) > 1:
            raise UsageError(
                f"--shuffle {self._shuffle}: ranks that share samples have tiers on different "
                "nodes: give --shuffle global, or start these ranks on one node"
            )

    def close(self) -> None:
        self.mesh.close()


class SampleSlabs(MeshLayout):
    """Ranks along `space` that have a part of each sample, and the whole model."""

    cuts_samples = True

    def __init__(self, mesh: Mesh, comm: Communicator, shuffle: str, target: str | None) -> None:
        super().__init__(mesh, "space", comm, shuffle)
        self._target = target
        self._slabs: dict[Dataset, tuple[Slab, Schema]] = {}

    def open(
        self,
        path: str,
        reader: Reader,
        options: Mapping[str, object],
        places: Mapping[str, object],
    ) -> Dataset:
        """Open a data set; of arrays, this rank reads its part of the longest dimension alone."""
        schema = reader.schema
        if is_table(schema):
            raise UsageError(
                f"--mesh {self.mesh.axes}: ranks share arrays and pictures, and {path} is a "
                "table: leave space= out"
            )
        if not is_arrays(schema):
            return super().open(path, reader, options, places)
        reader.close()
        given: dict[str, Any] = {**options, **places}
        fields = array_fields(path, schema, self._target)
        cut = [fields.input, *([fields.target] if fields.is_map else [])]
        dimension = longest_dimension(fields.sides)
        data, slab = self.mesh.open(path, dimension=dimension, fields=cut, **given)
        self._slabs[data] = slab, schema
        return data

    def schema(self, data: Dataset) -> Schema:
        return self._slabs[data][1] if data in self._slabs else super().schema(data)

    def payload_bytes(self, data: Dataset) -> int:
        mine = super().payload_bytes(data)
        return int(sum(self.sharers.allgather(mine))) if data in self._slabs else mine

    def converter(self, task: TrainingTask, data: Dataset) -> Convert:
        convert = super().converter(task, data)
        slab = self._slabs[data][0] if data in self._slabs else None

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if slab is None:
                return self.mesh.cut(tensor, _HEIGHT)
            return self.mesh.split(tensor, slab)

        def parts(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = convert(batch, device)
            # Dense targets have one for each element, so that ranks have parts of them, too.
            return part(inputs), part(targets) if task.is_dense else targets

        return parts

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather(tensor)


class LayerShares(LayerParts, MeshLayout):
    """Ranks along `model` that have whole samples, and parts of layers."""

    def __init__(self, mesh: Mesh, comm: Communicator, shuffle: str) -> None:
        MeshLayout.__init__(self, mesh, "model", comm, shuffle)
        LayerParts.__init__(self, self.sharers)
        self.replicas = self.data


def make_layout(options: MeshOptions, config: TrainConfig, comm: Communicator) -> RankLayout:
    """Return the layout of a run with `--mesh`. Collective.

    Raises UsageError for axes that do not fit the number of ranks.
    """
    assert options.mesh is not None
    axes, shuffle = parse_axes(options.mesh, comm.size), config.batches.shuffle
    slabs, shares = axes.size("space") > 1, axes.size("model") > 1
    if not slabs and not shares:
        return RankLayout(comm)
    # Averages of running statistics follow in each evaluation, see `Worker.mean_state`.
    is_sync = config.labels().get("batch_norm") == "--batch-norm sync"
    norm: Literal["sync", "local"] = "sync" if is_sync else "local"
    mesh = Mesh(options.mesh, batch_norm=norm, comm=comm)
    if slabs:
        return SampleSlabs(mesh, comm, shuffle, config.model.target)
    return LayerShares(mesh, comm, shuffle)


class MeshHooks(FeatureHooks):
    """The ranks that share samples compute each pass together."""

    def __init__(self, options: MeshOptions, run: FeatureRun) -> None:
        self._axes = options.mesh
        self.together = isinstance(run.layout, MeshLayout)

    def end_epoch(self, run: FeatureRun) -> None:
        if isinstance(run.layout, LayerShares):
            run.layout.align(run.model)

    def facts(self) -> str | None:
        return self._axes
