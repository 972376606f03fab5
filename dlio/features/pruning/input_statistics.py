"""Statistics of neurons, collected from the layers that read them during training.

The sources are the inputs of these layers in some forward passes, and the gradients of their
weights. Summed over a batch, a neuron's output times the gradient of the loss with respect to it
equals weight times gradient summed over the weights that read the neuron. First-order scores
therefore need only weights and gradients, and no stored activations.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.features.pruning.model_wrappers import without_compiler
from dlio.features.pruning.neuron_groups import NeuronGroup
from dlio.util.closable import Closable

# Statistics
_ROWS: Final = ("total", "squares", "zeros", "score")
_PEAKS: Final = ("high", "low")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class InputMoments:
    """Statistics of one layer's inputs; arrays of shape (channels,)."""

    count: float
    """Number of values per channel."""
    steps: float
    """Number of steps with gradients."""
    total: Array
    """Sum of the values."""
    squares: Array
    """Sum of the squared values."""
    zeros: Array
    """Number of values that were exactly 0."""
    score: Array
    """Absolute first-order change of the loss without the channel, summed over steps."""
    high: Array
    """Greatest value; -inf if there was none."""
    low: Array
    """Least value; inf if there was none."""

    @property
    def mean(self) -> Array:
        """Mean value of each channel."""
        return self.total / max(1.0, self.count)

    @property
    def rms(self) -> Array:
        """Root mean square of each channel."""
        return np.sqrt(self.squares / max(1.0, self.count))

    @property
    def dead(self) -> Array:
        """Share of values that were exactly 0."""
        return self.zeros / max(1.0, self.count)

    @property
    def loss(self) -> Array:
        """Mean score per step."""
        return self.score / max(1.0, self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Moments by the name of the consuming layer.

    Ranks merge them by adding `sums` and taking the elementwise maximum of `peaks`: float64 arrays
    over all layers, of the same length on every rank.
    """

    moments: Mapping[str, InputMoments]

    def sums(self) -> Array:
        """Counts and sums of all layers in one array."""
        return np.concatenate(
            [np.zeros(0)]
            + [
                np.concatenate([[m.count, m.steps], *(getattr(m, row) for row in _ROWS)])
                for m in self.moments.values()
            ]
        )

    def peaks(self) -> Array:
        """Greatest values and negated least values of all layers in one array."""
        parts = [part for m in self.moments.values() for part in (m.high, -m.low)]
        return np.concatenate([np.zeros(0), *parts])

    def reduced(self, sums: Array, peaks: Array) -> "Statistics":
        """Return the statistics that belong to reduced `sums` and `peaks`."""
        after: dict[str, InputMoments] = {}
        at, top = 0, 0
        for name, m in self.moments.items():
            size = len(m.total)
            count, steps = sums[at : at + 2].tolist()
            rows = sums[at + 2 : at + 2 + len(_ROWS) * size].reshape(len(_ROWS), size)
            high, low = peaks[top : top + size], -peaks[top + size : top + 2 * size]
            after[name] = InputMoments(count, steps, rows[0], rows[1], rows[2], rows[3], high, low)
            at, top = at + 2 + len(_ROWS) * size, top + 2 * size
        return Statistics(after)


@dataclass(slots=True, eq=False)
class _LayerSums:
    """Running sums and peaks of one layer, on its device."""

    count: int = 0
    steps: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, other: "_LayerSums") -> None:
        self.count += other.count
        self.steps += other.steps
        for row, values in other.sums.items():
            (_raise if row in _PEAKS else _add)(self, row, values)


class Collector(Closable):
    """Collect statistics with hooks, from construction until `close`; a context manager.

    Samples one step in `every`, the first samples of its batch, and only layers in training mode:
    about so many `values` of each layer's input. A step with numbers that are not finite is ignored
    altogether. The widths of the layers must not change meanwhile: after a cut, close the collector
    and make another one with the new groups.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[NeuronGroup],
        every: int = 16,
        values: int = 1 << 17,
    ) -> None:
        self.step_count = 0
        self.looks = 0
        """Steps that have been sampled."""
        self.seconds = 0.0
        """Time that this thread has spent sampling."""
        self._every = max(1, every)
        self._values = values
        names = {member.module: member.dim for group in groups for member in group.consumers}
        self._layers = {name: (model.get_submodule(name), dim) for name, dim in names.items()}
        self._seen = {name: _LayerSums() for name in names}
        self._fresh = {name: _LayerSums() for name in names}
        """Statistics of the step being sampled."""
        self._handles = [
            module.register_forward_pre_hook(self._hook(name))
            for name, (module, _) in self._layers.items()
        ]

    def close(self) -> None:
        """Remove the hooks; the statistics stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._handles

    @property
    def is_due(self) -> bool:
        """True if the next step is sampled."""
        return not self.closed and self.step_count % self._every == 0

    @torch.no_grad()
    def step(self, scale: float | torch.Tensor = 1.0) -> None:
        """Take a step's gradients, which are too large by the loss `scale`.

        Call it before they are clipped or used. Does nothing after `close`.
        """
        if self.closed:
            return
        if self.step_count % self._every == 0:
            began = time.perf_counter()
            self.looks += 1
            for name, (module, dim) in self._layers.items():
                weight = module.get_parameter("weight")
                if weight.grad is not None:
                    product = weight.detach() * weight.grad
                    others = [d for d in range(product.ndim) if d != dim]
                    _add(self._fresh[name], "score", (product.sum(others) / scale).abs())
                    self._fresh[name].steps += 1
            self._take_fresh()
            self.seconds += time.perf_counter() - began
        self.step_count += 1

    def statistics(self) -> Statistics:
        """Statistics of this rank since the last `reset`."""
        return Statistics({name: self._moments(name) for name in self._layers})

    def reset(self) -> None:
        """Discard the statistics and begin a new window."""
        self._seen = {name: _LayerSums() for name in self._layers}
        self._fresh = {name: _LayerSums() for name in self._layers}

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's window so far, for a checkpoint; later steps may overwrite the tensors."""
        tensors = {"steps": torch.tensor([self.step_count, self.looks])}
        for name, seen in self._seen.items():
            tensors[f"{name}/counts"] = torch.tensor([seen.count, seen.steps])
            tensors |= {f"{name}/{row}": value for row, value in seen.sums.items()}
        return tensors

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the state of another collector of the same groups."""
        self.step_count, self.looks = state["steps"].tolist()
        self.reset()
        for name, seen in self._seen.items():
            seen.count, seen.steps = state[f"{name}/counts"].tolist()
            device = self._layers[name][0].get_parameter("weight").device
            for row in (*_ROWS, *_PEAKS):
                if f"{name}/{row}" in state:
                    seen.sums[row] = state[f"{name}/{row}"].to(device, copy=True)

    def _take_fresh(self) -> None:
        """Add the sampled step to the window if all its numbers are finite."""
        sampled, self._fresh = self._fresh, {name: _LayerSums() for name in self._layers}
        sums = [value for fresh in sampled.values() for value in fresh.sums.values()]
        # x - x is 0, or NaN if x is not finite; one transfer for all layers.
        if sums and torch.stack([(value - value).sum().double() for value in sums]).sum() != 0:
            return
        for name, fresh in sampled.items():
            self._seen[name].take(fresh)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        mine = self._layers[name][0]

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.compiler.is_compiling():
                return  # Sampled steps run uncompiled: see `StatisticsWindow`.
            if module is not mine:
                return  # A deep copy of the model shares its hooks.
            if module.training and self.step_count % self._every == 0 and args:
                began = time.perf_counter()
                self._look(name, module, args[0])
                self.seconds += time.perf_counter() - began

        return look

    @torch.no_grad()
    def _look(self, name: str, module: nn.Module, inputs: torch.Tensor) -> None:
        seen = self._fresh[name]
        values = inputs.detach()
        if isinstance(module, nn.Linear):
            channel = values.ndim - 1
        else:
            channel = values.ndim - module.get_parameter("weight").ndim + 1
        if channel > 0:
            row = max(1, values.numel() // max(1, len(values)))
            values = values[: max(4, self._values // row)]
        if values.numel() == 0:
            return
        if values.dtype != torch.float32:
            values = values.float()
        others = [d for d in range(values.ndim) if d != channel]
        size = values.shape[channel]
        seen.count += values.numel() // size
        if not others:
            values, others = values.unsqueeze(0), [0]
        _add(seen, "total", values.sum(others))
        _add(seen, "squares", values.square().sum(others))
        # The fastest way to count zeros: torch vectorises sign, abs and sum.
        _add(seen, "zeros", values.numel() // size - values.sign().abs_().sum(others).double())
        _raise(seen, "high", values.amax(others))
        _raise(seen, "low", -values.amin(others))

    def _moments(self, name: str) -> InputMoments:
        module, dim = self._layers[name]
        seen = self._seen[name]
        size = module.get_parameter("weight").shape[dim]

        def array(row: str, empty: float = 0.0) -> Array:
            if row not in seen.sums:
                return np.full(size, empty)
            return seen.sums[row].cpu().double().numpy()

        rows = [array(row) for row in _ROWS]
        high, low = array("high", -np.inf), -array("low", -np.inf)
        count, steps = float(seen.count), float(seen.steps)
        return InputMoments(count, steps, rows[0], rows[1], rows[2], rows[3], high, low)


def _add(seen: _LayerSums, row: str, values: torch.Tensor) -> None:
    """Add to the sums, in double precision if the device supports it."""
    kind = torch.float32 if values.device.type == "mps" else torch.float64
    if row in seen.sums:
        seen.sums[row] += values
    else:
        seen.sums[row] = values.to(kind, copy=True)


def _raise(seen: _LayerSums, row: str, values: torch.Tensor) -> None:
    before = seen.sums.get(row)
    seen.sums[row] = values if before is None else torch.maximum(before, values)


# The window of the model as it is now


class StatisticsWindow:
    """Statistics since the last cut, taken once per step. Owns the Collector and its hooks.

    Gradients are sampled at the optimizer's step, unless `look` was called before. Steps that are
    sampled run uncompiled: compiled graphs do not call hooks that were added to layers later.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[NeuronGroup],
        every: int,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._model, self._every = model, every
        self.collector = Collector(model, groups, every)
        self.looks_before, self._seconds_before = 0, 0.0
        """Steps sampled, and seconds spent, in earlier windows."""
        self._looked = False
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._eager: AbstractContextManager[object] | None = None
        self._choose_compiler()

    @property
    def paused(self) -> bool:
        """True while nothing is sampled."""
        return self.collector.closed

    @property
    def looks(self) -> int:
        """Steps sampled in all windows."""
        return self.looks_before + self.collector.looks

    @property
    def seconds(self) -> float:
        """Time spent sampling in all windows."""
        return self._seconds_before + self.collector.seconds

    def look(self) -> None:
        """Sample the gradients of this step now, instead of at the optimizer's step."""
        self.collector.step()
        self._looked = True

    def step_ends(self) -> None:
        """Let the next step be sampled."""
        self._looked = False
        self._choose_compiler()

    def restart(self, groups: Sequence[NeuronGroup]) -> None:
        """Begin a new window for the groups of the model as it is now."""
        self.collector.close()
        self._seconds_before += self.collector.seconds
        self.looks_before += self.collector.looks
        self.collector = Collector(self._model, groups, self._every)
        self._choose_compiler()

    def pause(self) -> None:
        """Stop sampling until `restart`."""
        self.collector.close()
        self._choose_compiler()

    def close(self) -> None:
        """Remove all hooks."""
        self._hook.remove()
        self.pause()

    def load_state(self, looks_before: int, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved window; an empty `state` begins a new one."""
        self.looks_before = looks_before
        if state:
            self.collector.load_state(state)
            self._choose_compiler()

    def _choose_compiler(self) -> None:
        """Run uncompiled from now on if the next step is sampled, else compiled."""
        if self.collector.is_due and self._eager is None:
            self._eager = without_compiler()
            self._eager.__enter__()
        elif not self.collector.is_due and self._eager is not None:
            stance, self._eager = self._eager, None
            stance.__exit__(None, None, None)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._looked:
            # With a fused optimizer, torch's scaler leaves unscaling to the optimizer.
            scale = getattr(optimizer, "grad_scale", None)
            self.collector.step(1.0 if scale is None else scale)
