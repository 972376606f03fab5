"""Connect `dlio.Apoptosis` to a run of `dlio train`: probe, reports and checkpoints."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.exchange.cut import TensorCut
from dlio.features.pruning.apoptosis import Apoptosis, ApoptosisState
from dlio.features.pruning.model_size import count_parameters, flops_per_sample, parameters_by_layer
from dlio.features.pruning.model_surgery import PrunedLayout
from dlio.features.pruning.pruned_file import save_layout
from dlio.features.pruning.pruning_feature import PruningOptions
from dlio.features.pruning.pruning_pace import TOLERANCE, Schedule
from dlio.features.pruning.pruning_report import PruningReport
from dlio.train.feature_hooks import FeatureHooks, FeatureRun, SavedFeature
from dlio.train.report import RankEpoch

_BATCHES: Final = 4
"""Number of batches in a probe: the last ones before a round."""
_MOST: Final = 256
"""Most samples in a probe."""
_EXAMPLES: Final = 2
_EVERY: Final = 2
"""Steps between two samplings with --prune-target: its only round is best early."""
_IMAGE_DIMENSIONS: Final = 4


class PrunerState(ApoptosisState):
    """Facts of a saved state, as JSON types; see `PruningHooks.facts`."""

    told: int
    """Number of rounds reported so far."""
    batches: int
    """Number of batches in the probe."""


class PruningHooks(FeatureHooks):
    """The pruning of one rank. Owns the Apoptosis."""

    def __init__(self, options: PruningOptions, run: FeatureRun) -> None:
        self._options, self._precision, self._task = options, run.precision, run.task
        self._batches: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_BATCHES)
        self._cuts: list[TensorCut] = []
        """Cuts of the last step."""
        self._reported = 0
        """Number of rounds reported so far."""

    def connected(self, run: FeatureRun, batches: int) -> None:
        config, generator = run.config.optimizer, torch.Generator().manual_seed(0)
        model = run.model
        self.apoptosis = Apoptosis(
            model,
            run.optimizer,
            example=run.task.example(_EXAMPLES, generator)[0],
            probe=self._probe,
            exchange=run.exchange,
            steps=config.epochs * math.ceil(batches / config.accumulate),
            schedule=_schedule(self._options),
            on_cut=(self._cuts.extend,),
        )
        self._flops_at_first = flops_per_sample(model, self.apoptosis.example)
        self._flops = 0, self._flops_at_first
        """(version of the layout, FLOPs per sample)."""

    def begin(self, run: FeatureRun) -> None:
        if run.held_out is None and run.comm.rank == 0:
            print(
                "without --val, pruning cannot check held-out accuracy: it relies on the loss of "
                "the last batches",
                flush=True,
            )

    def begin_epoch(self, run: FeatureRun, epoch: int) -> None:
        options = run.config.optimizer
        per_step = run.global_batch * options.accumulate
        later = options.epochs - epoch - 1
        left = math.ceil((run.samples - run.position) / per_step)
        self.apoptosis.expect(left + later * math.ceil(run.samples / per_step))

    def before_forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        # Kept for the probe if a round is near.
        if len(inputs) and self.apoptosis.due(_BATCHES):
            self._batches.append((inputs, targets))

    def gradients_final(self) -> None:
        self.apoptosis.look()

    def after_step(self, run: FeatureRun) -> None:
        self._cuts.clear()
        is_due = self.apoptosis.due()
        self.apoptosis.step()
        if is_due:
            self._batches.clear()
        if self._cuts:
            run.reshaped(list(self._cuts))

    def compared(
        self, run: FeatureRun, everyone: Sequence[RankEpoch], accuracy: float | None
    ) -> None:
        if accuracy is not None:
            _, correct, samples = np.sum([rank["sums"] for rank in everyone], axis=0).tolist()
            # With --skip-samples, right answers are weighted, and may be more than the samples.
            self.apoptosis.held_out(accuracy, min(1.0, correct / max(1.0, samples)))

    def report(self) -> Mapping[str, object]:
        return {"pruning": self._report()}

    def _report(self) -> PruningReport:
        """Size of the model now, and the rounds since the last report."""
        apoptosis, model = self.apoptosis, self.apoptosis.model
        rounds, self._reported = apoptosis.rounds[self._reported :], len(apoptosis.rounds)
        if self._flops[0] != apoptosis.layout.version:
            flops = flops_per_sample(model, apoptosis.example)
            self._flops = apoptosis.layout.version, flops
        return {
            "parameters": count_parameters(model),
            "parameters_at_first": apoptosis.parameters_at_first,
            "layers": parameters_by_layer(model),
            "flops_per_sample": self._flops[1],
            "flops_at_first": self._flops_at_first,
            "rounds": [each.to_json() for each in rounds],
            "undone": sum(bool(each.undone) for each in rounds),
            "statistics": apoptosis.overhead(),
            "stopped": apoptosis.stopped,
            "left_alone": [str(each) for each in apoptosis.found.left_alone],
        }

    def facts(self) -> PrunerState:
        state = self.apoptosis.state_dict()
        return {**state, "told": self._reported, "batches": len(self._batches)}

    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        # The window of statistics, and the batches of the probe.
        tensors = {f"window/{name}": each for name, each in self.apoptosis.tensors().items()}
        for number, (images, labels) in enumerate(self._batches):
            tensors[f"images/{number}"], tensors[f"labels/{number}"] = images, labels
        return tensors

    def restore_shape(self, run: FeatureRun, facts: PrunerState | None) -> None:
        if facts is not None:
            self.apoptosis.take_layout(PrunedLayout.from_json(facts["layout"]))
            run.reshaped()

    def restore(self, saved: SavedFeature) -> None:
        state: PrunerState | None = saved.facts
        if state is None:
            return
        tensors = saved.tensors
        window = {
            name.removeprefix("window/"): each
            for name, each in tensors.items()
            if name.startswith("window/")
        }
        self.apoptosis.load_state_dict(state, window)
        self._reported = int(state["told"])
        self._batches.clear()
        device = next(self.apoptosis.model.parameters()).device
        number = 0
        while f"images/{number}" in tensors:
            images = tensors[f"images/{number}"].to(device)
            if images.ndim == _IMAGE_DIMENSIONS:
                images = images.contiguous(memory_format=torch.channels_last)
            self._batches.append((images, tensors[f"labels/{number}"].to(device)))
            number += 1

    def save(self, path: str) -> None:
        save_layout(path, self.apoptosis.layout)

    def close(self) -> None:
        self.apoptosis.close()

    def _probe(self, model: nn.Module) -> tuple[float, float]:
        """Return (sum of losses, number of samples) of the last batches."""
        if not self._batches:
            return 0.0, 0.0
        images = torch.cat([images for images, _ in self._batches])[-_MOST:]
        labels = torch.cat([labels for _, labels in self._batches])[-_MOST:]
        if len(images) < _EXAMPLES:
            return 0.0, 0.0  # A batch norm in training mode needs two samples.
        with self._precision.casting():
            losses = self._task.objective.losses(model(images), labels).sum()
        return float(losses), float(len(images))


def _schedule(options: PruningOptions) -> Schedule:
    if options.prune_target is not None:
        return Schedule(target=options.prune_target, begin=0.0, every=_EVERY)
    return Schedule(TOLERANCE if options.prune_tolerance is None else options.prune_tolerance)
