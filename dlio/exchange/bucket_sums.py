"""The buckets of an exchange of gradients, and the sum of each over all ranks."""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dlio.comm.progress_thread import ProgressThread
from dlio.exchange.buckets import Bucket, Named, in_buckets
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.compress.quantised_allreduce import TAGS
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.paths import Path
from dlio.exchange.sums import load_states, states_of

_FIRST_TAG: Final = 1


class BucketSums:
    """Buckets of parameters, each summed over all ranks once per backward.

    Sums start in the order of buckets on all ranks, whatever order gradients arrive in. All buckets
    are summed: a rank does not know which parameters the backward of another one has reached.

    With the gradients travel, for each parameter, whether this rank has one of it, and the rank's
    weight. Without a compressor these are a bucket's last elements; they must be exact, so with a
    compressor they travel alone, as `flags` and the caller's weight.

    Args:
        named: parameters; one rank has no buckets.
        place: where the buckets lie, and how they are summed.
        progress: told when messages are under way.
    """

    def __init__(
        self,
        named: Named,
        setting: ExchangeContext,
        place: BufferPlacement,
        progress: ProgressThread,
    ) -> None:
        self.carries_weight = setting.spec.compressor is None
        self._keeps = setting.recovery is not None
        """Keep each step's sums until the next one's are complete, for ranks that lack them."""
        # A rank that is left alone goes on as before: a loss is scaled by the ranks at first.
        groups = in_buckets(named) if setting.comm.size > 1 or self._keeps else []
        self._progress = progress
        extras = [len(each) + 1 if self.carries_weight else 0 for each in groups]
        self.buckets = [place.for_gradients(*each) for each in zip(groups, extras, strict=True)]
        self._paths: list[Path] = [
            place.path_of(bucket, extra, _FIRST_TAG + number * TAGS)
            for number, (bucket, extra) in enumerate(zip(self.buckets, extras, strict=True))
        ]
        self._position = {
            parameter: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        self._begin_step()

    def _begin_step(self) -> None:
        self._missing = [set(bucket.parameters) for bucket in self.buckets]
        """By bucket, parameters whose gradient has not been copied into it."""
        self._started = 0
        """Buckets started so far: those before this number."""
        self._begun: set[int] = set()
        """Buckets whose sum has begun."""
        self.interrupted = False
        """True if sums have begun and a loss has made them void: begin all again."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of buckets."""
        return list(self._position)

    def add(self, parameter: nn.Parameter, factor: float) -> bool:
        """Copy a gradient into its bucket, times `factor`.

        Returns False if its bucket has been started: the gradient is then the second one of this
        backward, and the sum of both is taken at the end.
        """
        number = self._position[parameter][0]
        if number < self._started:
            return False
        self._copy(parameter, factor)
        self._missing[number].discard(parameter)
        return True

    def start_complete(self, weight: float) -> None:
        """Start the next buckets that are complete, and drive those under way."""
        while self._started < len(self.buckets) and not self._missing[self._started]:
            self._start(self._started, (), weight, factor=1.0)
            self._started += 1
        for path in self._paths[: self._started]:
            if not path.advance():
                break

    def flags(self) -> list[float]:
        """Return 1 for each parameter that this rank has a gradient of, in the order of buckets."""
        return [float(parameter.grad is not None) for parameter in self._position]

    def start_rest(self, weight: float, factor: float) -> None:
        """Start those of the buckets that have not been started; all after `interrupted`."""
        again, self.interrupted = self.interrupted, False
        for number, bucket in enumerate(self.buckets):
            if again:
                self._start(number, bucket.parameters, weight, factor)
            elif number >= self._started:
                self._start(number, self._missing[number], weight, factor)
        for path in self._paths:
            path.begin()

    def reset(self, undo: bool) -> None:
        """Drop all sums under way, which a loss has interrupted; see `Sum.reset`.

        Args:
            undo: nobody has the sums of this step; otherwise they are about to be received.
        """
        for number, path in enumerate(self._paths):
            path.reset(undo and number in self._begun)
        self.interrupted = undo and bool(self._begun)

    def arrays(self, last: bool) -> list[npt.NDArray[np.float32]]:
        """Return the memory of the sums: of this step, or of the last one."""
        return [(bucket.before if last else bucket.flat).numpy() for bucket in self.buckets]

    def wait(self) -> None:
        """Return once all buckets hold their sums."""
        for path in self._paths:
            path.wait()

    @torch.no_grad()
    def take(self, weight: torch.Tensor | None, scale: float) -> None:
        """Write the means into `.grad`, and begin the next step.

        A parameter that no rank has a gradient of gets none.

        Args:
            weight: sums over ranks of the weight and of `flags`, also on the device; None if each
                bucket has its own.
            scale: factor of the means.
        """
        first = 1
        for bucket in self.buckets:
            count = len(bucket.parameters)
            if weight is None:
                flags, total = bucket.flat[-count - 1 : -1], bucket.flat[-1]
            else:
                flags, total = weight[first : first + count], weight[0]
            self._take(bucket, flags, total, scale)
            first += count
        if self._keeps:
            for bucket in self.buckets:
                bucket.swap()
        self._begin_step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the residuals and the compressors' memories."""
        return states_of(self._paths)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        load_states(self._paths, state)

    def statistics(self) -> dict[str, float]:
        """Totals of `messages` and `bytes` sent."""
        each = [path.statistics() for path in self._paths]
        return {key: sum(counts[key] for counts in each) for key in ("messages", "bytes")}

    @property
    def own_s(self) -> float:
        """Seconds that the host has waited for its own device."""
        return sum(path.statistics().get("own_s", 0.0) for path in self._paths)

    def close(self) -> None:
        for path in self._paths:
            path.close()

    def _start(
        self, number: int, uncopied: Iterable[nn.Parameter], weight: float, factor: float
    ) -> None:
        bucket = self.buckets[number]
        for parameter in uncopied:
            self._copy(parameter, factor)
        if self.carries_weight:
            with torch.no_grad():
                bucket.flat[-1] = weight
                bucket.flat[-1 - len(bucket.parameters) : -1] = 1
                for place, parameter in enumerate(reversed(bucket.parameters)):
                    if parameter.grad is None:
                        bucket.flat[-2 - place] = 0
        self._begun.add(number)
        self._paths[number].start()
        self._progress.go()

    @torch.no_grad()
    def _copy(self, parameter: nn.Parameter, factor: float) -> None:
        number, place = self._position[parameter]
        view = self.buckets[number].views[place]
        if parameter.grad is None:
            view.zero_()
            return
        view.copy_(parameter.grad)
        if factor != 1.0:
            view.mul_(factor)

    @staticmethod
    def _take(bucket: Bucket, flags: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        """Write the means of a bucket into `.grad`.

        Args:
            flags: number of ranks with a gradient of each parameter.
            total: sum of the ranks' weights.
        """
        factor: float | torch.Tensor
        if total.device.type != "cpu":
            factor = scale / total.clamp(min=1e-12)  # Without waiting for the device.
        else:
            factor = scale / max(float(total), 1e-12)
        for place, (parameter, view) in enumerate(
            zip(bucket.parameters, bucket.views, strict=True)
        ):
            if parameter.grad is None:
                if not float(flags[place]):
                    continue
                parameter.grad = torch.empty_like(parameter)
            if (parameter.grad.dtype, parameter.grad.device) == (view.dtype, view.device):
                torch.mul(view, factor, out=parameter.grad)
            else:
                parameter.grad.copy_(view * factor)
