"""What neurons do, seen where other layers read them, while training goes on.

All is taken from layers that read neurons: their inputs, in some forward passes, and their weights'
gradients. The sum over a batch of a neuron's output times the loss's gradient by it is, to the last
digit that counts, the sum of weight times gradient over the weights that read it, so first-order
scores cost one look at weights and keep no activations.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.train.pruning.groups import Group

_ROWS: Final = ("total", "squares", "zeros", "score")
_PEAKS: Final = ("high", "low")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Of the inputs of one layer; arrays of shape (channels,)."""

    count: float
    """How many values of each channel were seen."""
    steps: float
    """How many steps' gradients."""
    total: Array
    squares: Array
    zeros: Array
    """How many values were exactly 0."""
    score: Array
    """Per step, by how much the loss would change to first order without the channel, as an
    absolute value; summed over steps."""
    high: Array
    """The greatest value seen; -inf where none was."""
    low: Array

    @property
    def mean(self) -> Array:
        return self.total / max(1.0, self.count)

    @property
    def variance(self) -> Array:
        return np.maximum(0.0, self.squares / max(1.0, self.count) - self.mean**2)

    @property
    def rms(self) -> Array:
        """The root of the mean square."""
        return np.sqrt(self.squares / max(1.0, self.count))

    @property
    def dead(self) -> Array:
        """The share of values that were exactly 0."""
        return self.zeros / max(1.0, self.count)

    @property
    def loss(self) -> Array:
        """The mean score of a step."""
        return self.score / max(1.0, self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Moments by the name of the layer that reads. Ranks add `sums` and take the greater of
    `peaks`; both are float64, one array for all layers, of one length on every rank."""

    moments: Mapping[str, Moments]

    def sums(self) -> Array:
        """Counts and sums of all layers."""
        return np.concatenate(
            [np.zeros(0)]
            + [
                np.concatenate([[m.count, m.steps], *(getattr(m, row) for row in _ROWS)])
                for m in self.moments.values()
            ]
        )

    def peaks(self) -> Array:
        """Greatest values, and least ones with their sign turned, of all layers."""
        parts = [part for m in self.moments.values() for part in (m.high, -m.low)]
        return np.concatenate([np.zeros(0), *parts])

    def reduced(self, sums: Array, peaks: Array) -> "Statistics":
        """These moments with what all ranks together have in place of one's own."""
        after: dict[str, Moments] = {}
        at, top = 0, 0
        for name, m in self.moments.items():
            size = len(m.total)
            count, steps = sums[at : at + 2].tolist()
            rows = sums[at + 2 : at + 2 + len(_ROWS) * size].reshape(len(_ROWS), size)
            high, low = peaks[top : top + size], -peaks[top + size : top + 2 * size]
            after[name] = Moments(count, steps, rows[0], rows[1], rows[2], rows[3], high, low)
            at, top = at + 2 + len(_ROWS) * size, top + 2 * size
        return Statistics(after)


def merge(several: Sequence[Statistics]) -> Statistics:
    """What several ranks have seen together. Pure; layers and their order are the first one's.

    Raises ValueError for none, or of other layers.
    """
    if len({tuple(each.moments) for each in several}) != 1:
        raise ValueError("statistics of the same layers, and of one rank at least, can be merged")
    sums = np.sum([each.sums() for each in several], axis=0)
    return several[0].reduced(sums, np.max([each.peaks() for each in several], axis=0))


@dataclass(slots=True, eq=False)
class _Seen:
    """Sums so far, on the layer's device."""

    count: int = 0
    steps: int = 0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, other: "_Seen") -> None:
        self.count += other.count
        self.steps += other.steps
        for row, values in other.sums.items():
            (_raise if row in _PEAKS else _add)(self, row, values)


class Collector:
    """Gathers statistics by hooks from its making until `close`; a context manager.

    It looks at one step in `every`, at the first samples of a batch, about `values` numbers a
    layer, and only while the layer is training. A step with numbers that are not finite counts
    nowhere. Layers keep their widths meanwhile: after a cut, close it and make another one with the
    groups that there are then.

    Args:
        every: steps from one look to the next.
        values: of a layer's input that a look takes, roughly.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        every: int = 16,
        values: int = 1 << 17,
    ) -> None:
        self.step_count = 0
        self.looks = 0
        """Steps that have been looked at."""
        self.seconds = 0.0
        """That this thread has been busy with looking."""
        self._every = max(1, every)
        self._values = values
        names = {member.module: member.dim for group in groups for member in group.consumers}
        self._layers = {name: (model.get_submodule(name), dim) for name, dim in names.items()}
        self._seen = {name: _Seen() for name in names}
        self._fresh = {name: _Seen() for name in names}
        """Of the step that is being looked at."""
        self._handles = [
            module.register_forward_pre_hook(self._hook(name))
            for name, (module, _) in self._layers.items()
        ]

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks away; what was gathered stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def closed(self) -> bool:
        return not self._handles

    @torch.no_grad()
    def step(self, scale: float | torch.Tensor = 1.0) -> None:
        """A step's gradients are there, neither clipped nor used. Nothing once it is closed.

        Args:
            scale: that gradients are larger by, as those of a scaled loss are.
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
        """What has been gathered on this rank."""
        return Statistics({name: self._moments(name) for name in self._layers})

    def reset(self) -> None:
        """Begin a window of its own."""
        self._seen = {name: _Seen() for name in self._layers}
        self._fresh = {name: _Seen() for name in self._layers}

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's window so far, for a checkpoint; later steps may overwrite it."""
        found = {"steps": torch.tensor([self.step_count, self.looks])}
        for name, seen in self._seen.items():
            found[f"{name}/counts"] = torch.tensor([seen.count, seen.steps])
            found |= {f"{name}/{row}": value for row, value in seen.sums.items()}
        return found

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from another one's, of the same groups."""
        self.step_count, self.looks = state["steps"].tolist()
        self.reset()
        for name, seen in self._seen.items():
            seen.count, seen.steps = state[f"{name}/counts"].tolist()
            device = self._layers[name][0].get_parameter("weight").device
            for row in (*_ROWS, *_PEAKS):
                if f"{name}/{row}" in state:
                    seen.sums[row] = state[f"{name}/{row}"].to(device, copy=True)

    def _take_fresh(self) -> None:
        """What the step has shown is part of the window, if all of it is finite."""
        looked, self._fresh = self._fresh, {name: _Seen() for name in self._layers}
        sums = [value for fresh in looked.values() for value in fresh.sums.values()]
        # A difference to itself is 0 or no number; one transfer for all layers.
        if sums and torch.stack([(value - value).sum().double() for value in sums]).sum() != 0:
            return
        for name, fresh in looked.items():
            self._seen[name].take(fresh)

    def _hook(self, name: str) -> Any:
        mine = self._layers[name][0]

        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module is not mine:
                return  # A copy of the model's has its hooks.
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
        # Of all ways to count, the one that torch does with vector instructions.
        _add(seen, "zeros", values.numel() // size - values.sign().abs_().sum(others).double())
        _raise(seen, "high", values.amax(others))
        _raise(seen, "low", -values.amin(others))

    def _moments(self, name: str) -> Moments:
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
        return Moments(count, steps, rows[0], rows[1], rows[2], rows[3], high, low)


def _add(seen: _Seen, row: str, values: torch.Tensor) -> None:
    """To sums in double precision, where the device has it."""
    kind = torch.float32 if values.device.type == "mps" else torch.float64
    if row in seen.sums:
        seen.sums[row] += values
    else:
        seen.sums[row] = values.to(kind, copy=True)


def _raise(seen: _Seen, row: str, values: torch.Tensor) -> None:
    """To the greatest values so far."""
    before = seen.sums.get(row)
    seen.sums[row] = values if before is None else torch.maximum(before, values)
