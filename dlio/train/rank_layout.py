"""The ranks of a run: which have samples of their own, and which the same parameters."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from dlio.comm import Communicator
from dlio.comm.data_ranks import RankMesh
from dlio.data.reader import Reader
from dlio.data.schema import Schema
from dlio.loader.dataset import Dataset, open_dataset
from dlio.storage.mount import Mount
from dlio.train.tasks.task_base import Convert, TrainingTask


class RankLayout:
    """A run whose ranks have samples of their own, and the whole model each.

    A feature can bring a layout in which ranks share samples or layers; see `FeatureSpec.layout`.
    All methods are collective then, over the ranks that share something. The communicator of all
    ranks is the caller's.
    """

    counts = True
    """True on one of the ranks that have the same samples: its sums count in reports."""
    cuts_samples = False
    """True if ranks have parts of samples, and layers that know it."""
    data_mesh: RankMesh | None = None
    """Tells loaders which ranks `data` are; None if they are all."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        """All ranks."""
        self.data = comm
        """The ranks that have samples of their own, one of each group that shares them."""
        self.replicas = comm
        """The ranks that have the same parameters as this one."""
        self.notes: list[str] = []
        """Remarks for the report."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(
        self,
        path: str,
        reader: Reader,
        options: Mapping[str, object],
        places: Mapping[str, object],
    ) -> Dataset:
        """Open a data set, of which this rank may read parts of samples alone; options as
        `dlio.open`.

        The reader is of whole samples, and is owned by the data set, or closed. The path and
        `places`, the options by which the reader was opened (split and replicas), are for a layout
        that opens it again.

        Raises UsageError for samples that cannot be shared as the layout wants.
        """
        given: dict[str, Any] = dict(options)
        return open_dataset(reader, **given)

    def schema(self, data: Dataset) -> Schema:
        """Return the schema of a data set's whole samples."""
        return data.reader.schema

    def payload_bytes(self, data: Dataset) -> int:
        """Return the bytes of a data set's whole samples."""
        return int(data.reader.sizes.sum())

    def machines(self, mounted: Mount) -> int:
        """Return the number of hosts of all ranks."""
        return mounted.nodes.machines

    def check_order(self, mounted: Mount) -> None:
        """Raise UsageError if ranks that share samples would get them in other orders."""

    def converter(self, task: TrainingTask, data: Dataset) -> Convert:
        """Return the conversion of a data set's batches, to what this rank has of them."""
        return task.converter(data)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the outputs or targets of whole samples, of which this rank may have parts."""
        return tensor

    def cut_layers(self, model: nn.Module) -> None:
        """Leave this rank's parts of a model's layers, in place.

        The ranks' models are alike before. Hooks, optimizers and copies come later.

        Raises UsageError if no layer can be cut.
        """

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, or of a state of its shape."""
        return whole

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of a parameter, or of a state of its shape, on its device."""
        return part

    def part_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state dict with this rank's parts of whole parameters."""
        return {name: self.part(name, value) for name, value in state.items()}

    def gradient_norm(self, model: nn.Module) -> torch.Tensor:
        """Return the norm of all gradients of the whole model, the same on all ranks that share
        it."""
        return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def close(self) -> None:
        """Release what the layout owns; after the last pass of the model."""
