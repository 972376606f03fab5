"""Metrics on held-out data of the mean of all ranks' models."""

import copy
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.features.mesh.split_tensor import gather
from dlio.loader.dataloader import DataLoader
from dlio.train.model_copies import bare_copy
from dlio.train.precision import Precision
from dlio.train.sample_sharing import SampleSharing
from dlio.train.tasks.task_base import Convert, Outputs, TrainingTask, batch_size


class Evaluator:
    """Evaluate models on held-out data.

    Make it before hooks are added to the model: it evaluates in a copy.

    Args:
        model: the model, on its device.
        task: knows how batches become inputs and targets, and the metrics.
        loader: batches of the held-out data.
        comm: ranks that share the held-out data.
        convert: converts its batches; the task's conversion for None.
    """

    def __init__(
        self,
        model: nn.Module,
        task: TrainingTask,
        loader: DataLoader,
        precision: Precision,
        comm: Communicator,
        convert: Convert | None = None,
    ) -> None:
        """Raises UsageError if the task cannot use the held-out data."""
        self._model = copy.deepcopy(model)
        self._task, self._convert = task, convert or task.converter(loader.data)
        self._loader, self._precision, self._comm = loader, precision, comm

    def reshape(self, model: nn.Module) -> None:
        """Adopt the shapes of a model that was cut."""
        self._model = bare_copy(model)

    @torch.no_grad()
    def metrics(
        self, state: Mapping[str, torch.Tensor], device: torch.device, epoch: int
    ) -> dict[str, float | None]:
        """Return the metrics, over all ranks, of a model with this state dict; None for one that is
        not finite or not defined. Collective.

        Args:
            epoch: number of the epoch, from 0, whose layers are evaluated if they are trained one
                by one.
        """
        self._model.load_state_dict(state)
        self._model.eval()
        self._task.begin_epoch(self._model, epoch)
        sums = np.zeros(self._task.sum_count, np.int64)
        self._loader.set_epoch(0)
        for batch in self._loader:
            if batch_size(batch):
                inputs, targets = self._convert(batch, device)
                with self._precision.casting():
                    outputs = self._model(inputs)
                sums += self._task.sums(_whole(outputs), gather(targets))
        self._comm.wait([self._comm.iallreduce(sums)], "the metrics")
        metrics = self._task.metrics(sums)
        return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _whole(outputs: Outputs) -> Outputs:
    """Return the outputs of whole samples where ranks have parts of them. Collective."""
    if isinstance(outputs, tuple):
        return tuple(map(gather, outputs))
    return gather(outputs)


def make_evaluator(
    model: nn.Module,
    task: TrainingTask,
    held_out: DataLoader | None,
    precision: Precision,
    sharing: SampleSharing,
) -> Evaluator | None:
    """Return the evaluator of a run's held-out data; None without any."""
    if held_out is None:
        return None
    data = held_out.data
    convert = sharing.converter(task.converter(data), data, task.is_dense)
    return Evaluator(model, task, held_out, precision, sharing.data, convert)
