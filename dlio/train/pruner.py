"""Pruning in `dlio train`: what `dlio.Apoptosis` is told of a run, and what a run tells of it."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dlio.train.config import TrainConfig
from dlio.train.cut import Cut
from dlio.train.exchange.distribute import Distributed
from dlio.train.precision import Precision
from dlio.train.pruning.apoptosis import Apoptosis, Round
from dlio.train.pruning.model_size import count_parameters, flops_per_sample, parameters_by_layer
from dlio.train.pruning.pace import TOLERANCE
from dlio.train.pruning.pruned_layout import PrunedLayout

_BATCHES: Final = 4
"""That a probe is made of: the last ones before a round."""
_MOST: Final = 256
"""Samples of them."""
_EXAMPLES: Final = 2


class Pruner:
    """One rank's. Owns the Apoptosis; `close` is collective.

    Args:
        steps: of the optimizer, in the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Distributed,
        precision: Precision,
        steps: int,
    ) -> None:
        self._precision = precision
        self._batches: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_BATCHES)
        self._cuts: Sequence[Cut] = []
        self._told = 0
        """Rounds that have been reported."""
        generator = torch.Generator().manual_seed(0)
        size = config.image_size
        self.apoptosis = Apoptosis(
            model,
            optimizer,
            example=torch.randn(_EXAMPLES, 3, size, size, generator=generator),
            probe=self._probe,
            exchange=exchange,
            steps=steps,
            tolerance=TOLERANCE if config.prune_tolerance is None else config.prune_tolerance,
            on_cut=(self._was_cut,),
        )
        self._flops_at_first = flops_per_sample(model, self.apoptosis.example)
        self._flops = 0, self._flops_at_first
        """Of which layout's version, and how many."""

    def close(self) -> None:
        self.apoptosis.close()

    def saw(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """A batch as the model gets it, which a round that is near is tried with."""
        if len(images) and self.apoptosis.due(_BATCHES):
            self._batches.append((images, labels))

    def step(self) -> Sequence[Cut]:
        """After each step of the optimizer; what has been cut out of the model. Collective."""
        self._cuts = []
        if self.apoptosis.due():
            self.apoptosis.step()
            self._batches.clear()
        else:
            self.apoptosis.step()
        return self._cuts

    def report(self) -> dict[str, Any]:
        """What the model is now, and what has been done since the last report."""
        apoptosis, model = self.apoptosis, self.apoptosis.model
        rounds, self._told = apoptosis.rounds[self._told :], len(apoptosis.rounds)
        if self._flops[0] != apoptosis.layout.version:
            flops = flops_per_sample(model, apoptosis.example)
            self._flops = apoptosis.layout.version, flops
        return {
            "parameters": count_parameters(model),
            "parameters_at_first": apoptosis.parameters_at_first,
            "layers": parameters_by_layer(model),
            "flops_per_sample": self._flops[1],
            "flops_at_first": self._flops_at_first,
            "rounds": [_plain(each) for each in rounds],
            "undone": sum(bool(each.undone) for each in rounds),
            "statistics": apoptosis.overhead(),
            "stopped": apoptosis.stopped,
            "left_alone": [str(each) for each in apoptosis.found.left_alone],
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.apoptosis.state_dict(), "told": self._told, "batches": len(self._batches)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's, beside the model's."""
        found = {f"window/{name}": each for name, each in self.apoptosis.tensors().items()}
        for number, (images, labels) in enumerate(self._batches):
            found[f"images/{number}"], found[f"labels/{number}"] = images, labels
        return found

    def take_layout(self, state: Mapping[str, Any]) -> None:
        """Before weights are loaded. Collective."""
        self.apoptosis.take_layout(PrunedLayout.from_json(state["layout"]))

    def load_state_dict(
        self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """After they have been.

        Args:
            tensors: this rank's; empty on another number of ranks.
        """
        window = {
            name.removeprefix("window/"): each
            for name, each in tensors.items()
            if name.startswith("window/")
        }
        self.apoptosis.load_state_dict(state, window)
        self._told = int(state["told"])
        self._batches.clear()
        device = next(self.apoptosis.model.parameters()).device
        number = 0
        while f"images/{number}" in tensors:
            images = tensors[f"images/{number}"].to(device)
            images = images.contiguous(memory_format=torch.channels_last)
            self._batches.append((images, tensors[f"labels/{number}"].to(device)))
            number += 1

    def _was_cut(self, cuts: Sequence[Cut]) -> None:
        self._cuts = cuts

    def _probe(self, model: nn.Module) -> tuple[float, float]:
        """(sum of losses, samples) of the last batches."""
        if not self._batches:
            return 0.0, 0.0
        images = torch.cat([images for images, _ in self._batches])[-_MOST:]
        labels = torch.cat([labels for _, labels in self._batches])[-_MOST:]
        if len(images) < _EXAMPLES:
            return 0.0, 0.0  # Batch norms cannot tell anything of one.
        with self._precision.casting():
            losses = cross_entropy(model(images), labels, reduction="sum")
        return float(losses), float(len(images))


def _plain(done: Round) -> dict[str, Any]:
    return {**asdict(done), "undone": list(done.undone)}
