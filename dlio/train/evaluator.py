"""Metrics on held-out data of the mean of all ranks' models."""

import copy
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from dlio.loader.dataloader import DataLoader
from dlio.train.compute_device import Precision
from dlio.train.model_copies import bare_copy
from dlio.train.rank_layout import RankLayout
from dlio.train.tasks.task_base import Outputs, TrainingTask, batch_size


class Evaluator:
    """Evaluate models on held-out data.

    Make it before hooks are added to the model, which is on its device: it evaluates in a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        task: TrainingTask,
        loader: DataLoader,
        precision: Precision,
        layout: RankLayout,
    ) -> None:
        """Raises UsageError if the task cannot use the held-out data."""
        self._model = copy.deepcopy(model)
        self._task, self._convert = task, layout.converter(task, loader.data)
        self._loader, self._precision, self._layout = loader, precision, layout

    def reshape(self, model: nn.Module) -> None:
        """Adopt the shapes of a model that was cut."""
        self._model = bare_copy(model)

    @torch.no_grad()
    def metrics(
        self,
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        prepare: Callable[[nn.Module], object] = lambda model: model,
    ) -> dict[str, float | None]:
        """Return the metrics, over all ranks, of a model with this state dict; None for one that is
        not finite or not defined. Collective.

        `prepare` is called with the model in evaluation before it gets samples.
        """
        self._model.load_state_dict(state)
        self._model.eval()
        prepare(self._model)
        objective = self._task.objective
        sums = np.zeros(objective.sum_count, np.int64)
        self._loader.set_epoch(0)
        for batch in self._loader:
            if batch_size(batch):
                inputs, targets = self._convert(batch, device)
                with self._precision.casting():
                    outputs = self._model(inputs)
                sums += objective.sums(self._whole(outputs), self._layout.gather(targets))
        comm = self._layout.data
        comm.wait([comm.iallreduce(sums)], "the metrics")
        metrics = objective.metrics(sums)
        return {name: value if math.isfinite(value) else None for name, value in metrics.items()}

    def _whole(self, outputs: Outputs) -> Outputs:
        """Return the outputs of whole samples. Collective."""
        if isinstance(outputs, tuple):
            return tuple(map(self._layout.gather, outputs))
        return self._layout.gather(outputs)
