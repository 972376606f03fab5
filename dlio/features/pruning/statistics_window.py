"""The window of statistics of the current model, and the time that sampling costs."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dlio.features.pruning.eager_steps import EagerSteps
from dlio.features.pruning.input_statistics import Collector, Statistics
from dlio.features.pruning.neuron_groups import NeuronGroup


class StatisticsWindow:
    """Statistics since the last cut, taken once per step. Owns the Collector and its hooks.

    Args:
        every: steps between two samplings.
        optimizer: its step is where gradients are sampled, unless `look` was called before.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[NeuronGroup],
        every: int,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._model, self._every = model, every
        self._collector = Collector(model, groups, every)
        self._looks_before, self._seconds_before = 0, 0.0
        self._looked = False
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._eager = EagerSteps()
        self._eager.choose(self._collector.is_due)

    @property
    def paused(self) -> bool:
        """True while nothing is sampled."""
        return self._collector.closed

    @property
    def looks_before(self) -> int:
        """Steps sampled in earlier windows."""
        return self._looks_before

    @property
    def looks(self) -> int:
        """Steps sampled in all windows."""
        return self._looks_before + self._collector.looks

    @property
    def seconds(self) -> float:
        """Time spent sampling in all windows."""
        return self._seconds_before + self._collector.seconds

    def look(self) -> None:
        """Sample the gradients of this step now, instead of at the optimizer's step."""
        self._collector.step()
        self._looked = True

    def step_ends(self) -> None:
        """Let the next step be sampled."""
        self._looked = False
        self._eager.choose(self._collector.is_due)

    def statistics(self) -> Statistics:
        """Statistics of this rank."""
        return self._collector.statistics()

    def restart(self, groups: Sequence[NeuronGroup]) -> None:
        """Begin a new window for the groups of the model as it is now."""
        self._collector.close()
        self._seconds_before += self._collector.seconds
        self._looks_before += self._collector.looks
        self._collector = Collector(self._model, groups, self._every)
        self._eager.choose(self._collector.is_due)

    def pause(self) -> None:
        """Stop sampling until `restart`."""
        self._collector.close()
        self._eager.choose(False)

    def close(self) -> None:
        """Remove all hooks."""
        self._hook.remove()
        self.pause()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's window so far, for a checkpoint."""
        return self._collector.state()

    def load_state(self, looks_before: int, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved window; an empty `state` begins a new one."""
        self._looks_before = looks_before
        if state:
            self._collector.load_state(state)
            self._eager.choose(self._collector.is_due)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._looked:
            # With a fused optimizer, torch's scaler leaves unscaling to the optimizer.
            scale = getattr(optimizer, "grad_scale", None)
            self._collector.step(1.0 if scale is None else scale)
