"""The part that a feature takes in a run: an object whose methods the trainer calls.

The order is a promise, because results have to be the same bit by bit:

    make                   the model is on its device; optimizer and exchange do not exist yet
    connected              the exchange exists, and has added its own hooks to the model
    wrapped                the function that runs the model is chosen
    begin                  all parts of the run exist; a saved state is restored afterwards
    restore_shape          before the model and the optimizer are restored
    restore                after everything else is restored
    prepare                an epoch begins, or is continued; again for a copy that is evaluated
    choose_samples         its counters have not been reset
    begin_epoch            they have been
      groups               a batch is cut into groups, which are computed one by one
      begin_group
        before_forward
        weigh              between the forward and the backward pass
      end_group
      before_step          the exchange has summed gradients
      gradients_final      they are unscaled, and not clipped yet
      after_update         after the optimizer and the exchange have stepped
      after_step           before callbacks; may cut the model
    end_epoch              all of its steps are done
    measure                before the ranks' measurements are gathered
    compared               after they were gathered, and the model was evaluated
    report
    save
    close

Where several features act at one point, they do so in the order of `FeatureSpec.order`. Methods
that are marked as collective are called on all ranks together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.loader.dataloader import DataLoader
from dlio.plan.rank_shares import RankShares
from dlio.train.callbacks.callback_base import Run
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import find_features, load_place
from dlio.train.rank_layout import RankLayout
from dlio.train.report import RankEpoch
from dlio.train.step_clock import StepClock
from dlio.train.tasks.task_base import Outputs, TrainingTask
from dlio.util.whole_files import remove_file


class FeatureRun(Run, Protocol):
    """One rank of a run as features see it; implemented by the trainer's `Worker`."""

    task: TrainingTask
    layout: RankLayout
    is_found: bool
    """True if a state is restored next, so that the ranks' models need not be alike."""
    samples: int
    """Samples of this epoch, over all ranks."""
    held_out: DataLoader | None
    """Batches of the data that the run evaluates on."""
    clock: StepClock
    """Times this rank's steps; emptied after `measure`."""

    @property
    def global_batch(self) -> int:
        """Samples of one batch, over all ranks."""

    @property
    def shares(self) -> RankShares:
        """The samples that each rank takes of a whole step."""


@dataclass(frozen=True, slots=True)
class SavedFeature:
    """The state of a feature that is restored, on any number of ranks."""

    facts: Any
    """Its `facts`; None if the state was saved without it."""
    tensors: Mapping[str, torch.Tensor]
    """Its `weights` and `shared_tensors`, and this rank's `own_tensors`; the last are missing if
    the number of ranks has changed."""
    taken_over: Callable[[str], Iterable[torch.Tensor]]
    """Returns a tensor, by its name in `own_tensors`, of each saved rank whose part this one
    continues."""


class FeatureHooks:
    """A feature in one rank of a run. These methods do nothing; a feature has those that it needs.

    It is made from the feature's record, before the run's exchange and optimizer exist.
    """

    sums_gradients = False
    """True if the feature sums gradients over ranks in place of the exchange, which then knows one
    rank alone: it implements `groups` and `statistics`, and writes the sums in `before_step`."""
    has_weights = False
    """True if the feature has `weights`."""
    together = False
    """True if the ranks compute each pass together, also on empty batches."""

    def __init__(self, options: Any, run: FeatureRun) -> None:
        """Take part in a run. Collective."""

    def connected(self, run: FeatureRun, batches: int) -> None:
        """Adapt to the exchange; a rank has so many batches in an epoch. Collective."""

    def wrapped(
        self, run: FeatureRun, model: Callable[[torch.Tensor], Outputs]
    ) -> Callable[[torch.Tensor], Outputs]:
        """Return the function that runs the model in training, in place of `model`."""
        return model

    def begin(self, run: FeatureRun) -> None:
        """Begin, when all parts of the run exist. Collective."""

    def prepare(self, model: nn.Module, epoch: int) -> None:
        """Prepare a model, in training or a copy for evaluation, for an epoch."""

    def span(self, epoch: int) -> range | None:
        """Return the epochs of this epoch's schedule of the learning rate; None to leave it."""

    def choose_samples(self, run: FeatureRun, epoch: int) -> int | None:
        """Choose an epoch's samples: call the loader's `set_epoch`, and return the number of
        samples over all ranks; return None to leave them to others. Collective."""

    def begin_epoch(self, run: FeatureRun, epoch: int) -> None:
        """Begin an epoch, or the rest of it, at `run.position`."""

    def groups(self, count: int, planned: int) -> Sequence[slice]:
        """Return the groups, computed one by one, of this rank's samples of a planned global
        batch."""
        return [slice(0, count)]

    def begin_group(self, run: FeatureRun, group: slice, planned: int) -> None:
        """Begin one of `groups`."""

    def end_group(self, samples: int) -> None:
        """End a group of so many samples, after its backward pass."""

    def before_forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Run before the forward pass on a batch or a group; both have shape (n, ...)."""

    def weigh(self, losses: torch.Tensor, samples: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Return factors of the losses (n,) of samples, given by index; None to leave them as they
        are."""

    def before_step(self, planned: int) -> None:
        """Run when the exchange has summed the gradients of `planned` samples. Collective."""

    def gradients_final(self) -> None:
        """Run before gradients are clipped."""

    def after_update(self, updates: int) -> None:
        """Run when the optimizer has made `updates` steps since the run began."""

    def after_step(self, run: FeatureRun) -> None:
        """Run before the callbacks' `after_step`; may cut the model and call `run.reshaped`.
        Collective."""

    def end_epoch(self, run: FeatureRun) -> None:
        """Run after the last step of an epoch, before the ranks are compared. Collective."""

    def measure(self) -> Any:
        """Return this rank's measurements of the epoch for `compared`, as JSON types; they are
        the feature's value in `RankEpoch.features`."""

    def compared(
        self, run: FeatureRun, everyone: Sequence[RankEpoch], accuracy: float | None
    ) -> None:
        """Take in the ranks' measurements of an epoch, the same on all ranks, and the held-out
        accuracy."""

    def report(self) -> Mapping[str, object]:
        """Return the feature's fields in the report of the finished epoch, as JSON types."""
        return {}

    def statistics(self) -> dict[str, float]:
        """Return totals of the sums over ranks; for features that sum gradients."""
        raise NotImplementedError

    def averaged(
        self, model: nn.Module, mean: Mapping[str, torch.Tensor], comm: Communicator
    ) -> None:
        """Change the mean of the state of `model` over the ranks that have the same parameters, on
        the host, in place. Collective."""

    def evaluated(self) -> nn.Module | None:
        """Return the model to evaluate and to save; None for the one that is trained."""

    def facts(self) -> Any:
        """Return the state apart from tensors, as JSON types, equal on all ranks; None for none."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return tensors that change only in optimizer steps, equal on all ranks whose models are.

        Restored on another number of ranks, they become their mean over the saved ranks.
        """
        return {}

    def shared_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the rest of the state that is equal on all ranks."""
        return {}

    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the rest of the state, of this rank."""
        return {}

    def restore_shape(self, run: FeatureRun, facts: Any) -> None:
        """Give the model the shape that it was saved with, by the saved facts; None if there are
        none.

        Collective.
        """

    def restore(self, saved: SavedFeature) -> None:
        """Continue from a saved state. Collective."""

    def save(self, path: str) -> None:
        """Write files that belong to the weights that were saved at `path`; on rank 0 alone."""

    def close(self) -> None:
        """Release the feature's resources. Collective."""


class ActiveFeatures:
    """The features of a run that are on, in their order, with the hooks of each."""

    def __init__(self, config: TrainConfig, run: FeatureRun) -> None:
        self._run = run
        self.hooks: list[FeatureHooks] = []
        self.by_prefix: dict[str, FeatureHooks] = {}
        """By the prefix of their tensors' names in saved states."""
        for feature, options in config.active():
            kind = cast(type[FeatureHooks], load_place(feature.hooks_of(options)))
            hooks = kind(options, run)
            self.by_prefix[feature.prefix or feature.name] = hooks
            self.hooks.append(hooks)

    @property
    def summing(self) -> FeatureHooks | None:
        """The feature that sums gradients in place of the exchange, if there is one."""
        return next((each for each in self.hooks if each.sums_gradients), None)

    @property
    def together(self) -> bool:
        """True if the ranks compute each pass together, also on empty batches."""
        return any(each.together for each in self.hooks)

    def wrapped(
        self, model: Callable[[torch.Tensor], Outputs]
    ) -> Callable[[torch.Tensor], Outputs]:
        """Return the function that runs the model in training."""
        for each in self.hooks:
            model = each.wrapped(self._run, model)
        return model

    def prepare(self, model: nn.Module, epoch: int) -> None:
        """Prepare a model, in training or a copy for evaluation, for an epoch."""
        for each in self.hooks:
            each.prepare(model, epoch)

    def span(self, epoch: int) -> range | None:
        """Return the epochs of this epoch's schedule, if a feature chooses them; otherwise None."""
        spans = (each.span(epoch) for each in self.hooks)
        return next((span for span in spans if span is not None), None)

    def choose_samples(self, epoch: int) -> int | None:
        """Return the number of an epoch's samples, if a feature chooses them; otherwise None."""
        chosen = [each.choose_samples(self._run, epoch) for each in self.hooks]
        return next((count for count in chosen if count is not None), None)

    def evaluated(self, model: nn.Module) -> nn.Module:
        """Return the model to evaluate and to save."""
        for each in self.hooks:
            if (chosen := each.evaluated()) is not None:
                return chosen
        return model

    def save(self, path: str) -> None:
        """Write or remove files that belong to the weights that have been saved at `path`."""
        for feature in find_features():
            for ending in feature.files:
                remove_file(path + ending)
        for each in self.hooks:
            each.save(path)

    def report(self) -> dict[str, Any]:
        """Return the features' fields in the report of the finished epoch."""
        fields: dict[str, Any] = {}
        for feature in find_features():
            fields |= feature.epoch_fields
        for each in self.hooks:
            fields |= each.report()
        return fields


def layout_of(config: TrainConfig, comm: Communicator) -> RankLayout:
    """Return the layout of a run's ranks: a feature's, or that of ranks which share nothing.
    Collective.

    Raises UsageError for options that do not fit the number of ranks.
    """
    for feature, options in config.active():
        if feature.layout:
            layout: RankLayout = load_place(feature.layout)(options, config, comm)
            return layout
    return RankLayout(comm)
