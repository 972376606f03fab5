"""Accuracy on held-out data of the mean of all ranks' models."""

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.loader.dataloader import DataLoader
from dlio.train.model import normalised
from dlio.train.precision import Precision
from dlio.train.pruning.copies import bare_copy

__all__ = ["Evaluator"]


class Evaluator:
    """Evaluate models on held-out data.

    Make it before hooks are added to the model: it evaluates in a copy.

    Args:
        model: the model, on its device.
        loader: batches of the held-out data; images uint8 (n, 3, height, width), labels (n,).
        comm: ranks that share the held-out data.
    """

    def __init__(
        self, model: nn.Module, loader: DataLoader, precision: Precision, comm: Communicator
    ) -> None:
        self._model = copy.deepcopy(model)
        self._loader, self._precision, self._comm = loader, precision, comm

    def reshape(self, model: nn.Module) -> None:
        """Adopt the shapes of a model that was cut."""
        self._model = bare_copy(model)

    @torch.no_grad()
    def accuracy(self, state: Mapping[str, torch.Tensor], device: torch.device) -> float:
        """Share of right answers, over all ranks, of a model with this state dict. Collective."""
        self._model.load_state_dict(state)
        self._model.eval()
        counts = np.zeros(2, np.int64)
        self._loader.set_epoch(0)
        for images, labels in self._loader:
            if len(images):
                with self._precision.casting():
                    answers = self._model(normalised(images, device)).argmax(1).cpu()
                counts += ((answers == labels).sum().item(), len(labels))
        self._comm.wait([self._comm.iallreduce(counts)], "the accuracy")
        return float(counts[0] / max(1, counts[1]))
