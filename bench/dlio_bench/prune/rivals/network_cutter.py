"""The base of callbacks that cut a network while it trains, and write its sizes."""

from collections.abc import Mapping
from typing import TypedDict

import torch

from dlio.features.pruning.group_search import find_groups
from dlio.features.pruning.model_size import count_parameters
from dlio.features.pruning.model_surgery import apply
from dlio.features.pruning.neuron_groups import Indices, NeuronGroup
from dlio.features.pruning.removal_plan import RemovalPlan
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.report import EpochReport
from dlio.util.whole_files import write_json


class Size(TypedDict):
    """Size of the network at the end of an epoch."""

    parameters: int
    widths: list[int]
    """Neurons of each group, in the model's order."""


class NetworkCutter(Callback):
    """Cut a network, its optimizer and its exchange on all ranks alike.

    Args:
        sizes: file to write, a list of a `Size` per epoch.
    """

    def __init__(self, sizes: str) -> None:
        self._path = sizes
        self._sizes: list[Size] = []
        self.groups: tuple[NeuronGroup, ...] = ()
        """Groups of the network as it is."""
        self.example = torch.zeros(0)
        """Input of the network; shape (2, 3, side, side)."""

    def begins(self, run: Run) -> None:
        side = run.config.model.image_size
        self.example = torch.zeros(2, 3, side, side)
        self.groups = find_groups(run.model, self.example).groups

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        widths = [group.width for group in self.groups]
        self._sizes.append({"parameters": count_parameters(run.model), "widths": widths})
        if run.comm.rank == 0:
            write_json(self._path, self._sizes)

    def cut(self, run: Run, keep: Mapping[str, Indices]) -> None:
        """Keep these neurons, by group; groups that are missing stay whole. Call it on all ranks
        with the same neurons."""
        plan = RemovalPlan(dict(keep))
        applied = apply(
            run.model, self.groups, plan, [run.optimizer], aligned=(run.exchange.reshape,)
        )
        if applied.cuts:
            self.groups = applied.groups
            run.reshaped()
