"""The ranks of a run that share samples or layers (`--mesh data=2,space=2`)."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

import torch
import xxhash

from dlio.comm import Communicator
from dlio.comm.job_nodes import find_nodes
from dlio.comm.single import SingleCommunicator
from dlio.data.reader import Reader
from dlio.data.schema import Schema
from dlio.errors import UsageError
from dlio.features.mesh.layer_parts import LayerParts
from dlio.features.mesh.mesh_axes import parse_axes
from dlio.features.mesh.rank_mesh import Mesh
from dlio.features.mesh.slab import Slab, longest_dimension
from dlio.loader.contract import BatchData
from dlio.loader.dataset import Dataset
from dlio.storage.mount import Mount
from dlio.train.array_fields import array_fields
from dlio.train.config import TrainConfig

Convert = Callable[[BatchData, torch.device], tuple[torch.Tensor, torch.Tensor]]
"""See `dlio.train.tasks.task_base`."""

_HEIGHT: Final = -2
"""Dimension in which pictures are cut: they are decoded whole."""


class SampleSharing:
    """Which ranks have samples of their own, and which share each sample; owns the mesh.

    The ranks along `space` have a part of each sample, those along `model` have whole samples, and
    parts of layers. Without `--mesh`, or without these axes, each rank has samples of its own.
    Collective; so is `close`.

    Raises UsageError for axes that do not fit the number of ranks.
    """

    def __init__(self, config: TrainConfig, comm: Communicator) -> None:
        self._config, self._comm = config, comm
        self.mesh: Mesh | None = None
        """None if no ranks share samples."""
        self.data = comm
        """The ranks that have samples of their own; owned by others."""
        self.replicas = comm
        """The ranks that have the same parameters as this one; owned by others."""
        self._sharers: Communicator = SingleCommunicator()
        """The ranks that have the same samples as this one; owned by others."""
        self.cuts_samples = False
        self.parts = LayerParts(self._sharers)
        """The parts of layers that this rank has: none without an axis `model`."""
        self._slabs: dict[Dataset, tuple[Slab, Schema]] = {}
        self.axes = config.ranks.mesh
        """As `--mesh` names them."""
        if self.axes is None:
            return
        axes = parse_axes(self.axes, comm.size)
        if axes.size("space") * axes.size("model") == 1:
            return
        # Averages of running statistics follow in each evaluation, see `Worker.mean_state`.
        is_sync = config.labels().get("batch_norm") == "--batch-norm sync"
        norm: Literal["sync", "local"] = "sync" if is_sync else "local"
        self.mesh = Mesh(self.axes, batch_norm=norm, comm=comm)
        self.data = self.mesh.along("data")
        self.cuts_samples = axes.size("space") > 1
        self._sharers = self.mesh.along("space" if self.cuts_samples else "model")
        if not self.cuts_samples:
            self.replicas = self.data
            self.parts = LayerParts(self._sharers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> bool:
        """True on one of the ranks that share samples: its sums count in reports."""
        return self._sharers.rank == 0

    def open(self, path: str, reader: Reader, options: Mapping[str, object]) -> Dataset:
        """Open a data set of arrays, of which this rank reads its slab alone.

        The slab is a part of the longest spatial dimension.

        Args:
            reader: of whole samples; closed here.
            options: as for `dlio.open`.

        Raises UsageError for samples that cannot be cut so.
        """
        assert self.mesh is not None
        given: dict[str, Any] = dict(options)
        schema = reader.schema
        reader.close()
        fields = array_fields(path, schema, self._config.model.target)
        cut = [fields.input, *([fields.target] if fields.is_map else [])]
        dimension = longest_dimension(fields.sides)
        data, slab = self.mesh.open(path, dimension=dimension, fields=cut, **given)
        self._slabs[data] = slab, schema
        return data

    def schema(self, data: Dataset) -> Schema:
        """Return the schema of a data set's whole samples."""
        return self._slabs[data][1] if data in self._slabs else data.reader.schema

    def payload_bytes(self, data: Dataset) -> int:
        """Return the bytes of a data set, over the ranks that read slabs of it. Collective."""
        mine = int(data.reader.sizes.sum())
        if data not in self._slabs:
            return mine
        return int(sum(self._sharers.allgather(mine)))

    def machines(self, mounted: Mount) -> int:
        """Return the number of hosts of all ranks. Collective."""
        return mounted.nodes.machines if self.mesh is None else find_nodes(self._comm).machines

    def check_order(self, mounted: Mount) -> None:
        """Raise UsageError if ranks that share samples would get them in other orders. Collective.

        The mode `batch` follows the places where tiers hold samples.
        """
        if self.mesh is None or self._config.batches.shuffle == "global":
            return
        nodes = mounted.nodes.node_of.tobytes() + mounted.placement.home.tobytes()
        digests = self._sharers.allgather(xxhash.xxh3_64_hexdigest(nodes))
        if len(set(digests)) > 1:
            raise UsageError(
                f"--shuffle {self._config.batches.shuffle}: ranks that share samples have tiers on "
                "different nodes: give --shuffle global, or start these ranks on one node"
            )

    def converter(self, convert: Convert, data: Dataset, is_dense: bool) -> Convert:
        """Return the conversion of a data set's batches; inputs are parts if ranks share samples.

        Args:
            convert: the task's.
            is_dense: there is a target for each element, so that targets are parts, too.
        """
        mesh = self.mesh
        if mesh is None or not self.cuts_samples:
            return convert
        slab = self._slabs[data][0] if data in self._slabs else None

        def part(tensor: torch.Tensor) -> torch.Tensor:
            return mesh.cut(tensor, _HEIGHT) if slab is None else mesh.split(tensor, slab)

        def parts(batch: BatchData, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = convert(batch, device)
            return part(inputs), part(targets) if is_dense else targets

        return parts

    def close(self) -> None:
        """Release the mesh. Collective; after the last pass of the model."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
