"""Synchronous data parallelism: gradients are summed over all ranks while backward runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd import Variable

from dlio.comm.funnel import is_foreign_thread
from dlio.comm.progress_thread import ProgressThread
from dlio.errors import PeerLost
from dlio.exchange.backward import after_backward, sends_after_backward
from dlio.exchange.bucket_sums import BucketSums
from dlio.exchange.buckets import Named
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.cut import TensorCut
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.phases import StepPhase
from dlio.exchange.round_commit import RoundCommit
from dlio.exchange.state_cuts import KeptTotals, reshape_state


@dataclass(frozen=True, slots=True)
class _GradientWeights:
    """How this rank's gradients enter the mean."""

    weight: float = 1.0
    """Weight of this rank, summed with the gradients."""
    factor: float = 1.0
    """Factor of gradients before they are summed."""
    scale: float = 1.0
    """Factor of the mean."""
    everything: bool = False
    """Take part in the average also if no backward has run here: a rank may be without samples."""


class SynchronousSgd:
    """Sums each bucket as soon as backward has computed its gradients.

    When `backward` returns, `.grad` holds the mean over all ranks, so that clipping, accumulation
    and inspection see the mean.

    A rank without samples, whose backward does not run, and a parameter that only this rank's
    backward did not reach contribute the contents of `.grad` (earlier backwards of the step), or
    zeros, and get the mean as all others do. A parameter without a gradient on any rank gets none.
    Each rank's gradients count by its weight, which travels with them.

    With a compressor the mean is not exact; the next mean includes the difference.

    `dlio.exchange.paths` says where gradients lie and how they reach other ranks.
    `wait_s` counts the waits for other ranks, not those for this rank's own device. With a GPU
    and an MPI that only the main thread may call, nothing is sent before backward returns.

    One rank has no hooks, copies nothing and sends nothing.

    Args:
        before_wait: called at the end of each backward, before waiting for other ranks.
    """

    alike = True

    def __init__(
        self, named: Named, setting: ExchangeContext, before_wait: Callable[[], None] | None = None
    ) -> None:
        self._named, self._setting, self._before_wait = named, setting, before_wait
        self._comm = comm = setting.comm
        self._progress = ProgressThread(comm)
        self._totals = KeptTotals()
        devices = [parameter.device for _, parameter in named]
        several = comm.size > 1 and len(named) > 0
        self._place = BufferPlacement(named, setting)
        self._stop_watching: Callable[[], None] | None = None
        """Set if another thread than autograd's must send."""
        if several and sends_after_backward(devices):
            self._stop_watching = after_backward(self._backward_returns)
        self._phase = StepPhase.IDLE
        self._held = False
        """Value of the last call of `hold`."""
        self._weighting = _GradientWeights()
        self._wait_s = 0.0
        self._ranks = comm.size
        """Ranks at the beginning, by which a loss is scaled."""
        self._summed_weight: npt.NDArray[np.float64]
        """The ranks' weight in the last average, and how many of them have each parameter's
        gradient, if buckets do not carry them."""
        self._weight_on_device: torch.Tensor | None = None
        """The same, if buckets travel from a device's memory."""
        self._torn = False
        """True if a rank was lost while this average's sums were under way."""
        self._make_sums()
        self._closing = RoundCommit(setting, self)

    @property
    def counted(self) -> tuple[int, ...]:
        """Members whose gradients are in the last average."""
        return self._closing.counted

    @property
    def closed(self) -> int:
        """Number of averages that this rank has."""
        return self._closing.closed

    def before_backward(self, samples: int, planned: int) -> None:
        self._weighting = _GradientWeights(
            float(samples), scale=planned / self._ranks, everything=True
        )

    def weigh(self, samples: float) -> None:
        self._weighting = _GradientWeights(samples, factor=samples)

    def hold(self, held: bool) -> None:
        self._held = held

    def before_step(self) -> None:
        phase, self._phase = self._phase, StepPhase.IDLE
        expected = phase not in (StepPhase.IDLE, StepPhase.AVERAGED)
        if phase is StepPhase.IDLE:
            expected = self._weighting.everything
        if expected and self._sums.buckets:
            self._average()

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        before, state = self._sums.buckets, self.state()
        self._totals.keep(self._sums.statistics())
        self._remove_hooks()
        self._sums.close()
        self._make_sums()
        self.load_state(reshape_state(state, before, self._sums.buckets, cuts, ("owed",)))

    def state(self) -> dict[str, torch.Tensor]:
        return self._sums.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._sums.load_state(state)

    def statistics(self) -> dict[str, float]:
        wait_s = self._wait_s + self._place.waited_s
        return {"wait_s": wait_s, **self._totals.plus(self._sums.statistics())}

    def close(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
        self._remove_hooks()
        self._sums.close()
        self._place.close()
        self._progress.close()
        self._closing.remove()
        if self._ranks > 1:
            self._comm.close()

    def _make_sums(self) -> None:
        """Create buckets of the parameters in their current shapes, and register hooks."""
        self._sums = BucketSums(self._named, self._setting, self._place, self._progress)
        self._summed_weight = np.zeros(1 + len(self._sums.parameters))
        self._hooks = []
        for parameter in self._sums.parameters:
            hooked: Any = parameter  # torch does not annotate the method.
            self._hooks.append(hooked.register_post_accumulate_grad_hook(self._gradient_ready))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        if self._held:
            self._phase = StepPhase.HELD
            return
        if self._phase not in (StepPhase.BACKWARD, StepPhase.UNSENT):
            self._phase = StepPhase.BACKWARD
            Variable._execution_engine.queue_callback(self._backward_ends)
        added = self._sums.add(parameter, self._weighting.factor)
        if added and not self._torn and not self._may_not_send():
            try:
                self._sums.start_complete(self._weighting.weight)
            except PeerLost:
                if self._setting.recovery is None:
                    raise
                self._torn = True  # The backward goes on; what is missing is sent at its end.

    def _backward_ends(self) -> None:
        """Called by autograd, in the thread that ends the backward."""
        if self._may_not_send():
            self._phase = StepPhase.UNSENT
            return
        self._average()
        self._phase = StepPhase.AVERAGED

    def _backward_returns(self) -> None:
        """Called in the thread that called `backward`."""
        if self._phase is StepPhase.UNSENT:
            self._backward_ends()

    def _may_not_send(self) -> bool:
        return self._stop_watching is not None and is_foreign_thread()

    def _average(self) -> None:
        """Start all remaining sums, wait for them, and write the means into `.grad`."""
        weighting, sums = self._weighting, self._sums
        began, own_s = time.perf_counter(), sums.own_s
        if self._before_wait is not None:
            self._before_wait()
        self._closing.close_turn()
        self._progress.rest()
        weight = None if sums.carries_weight else self._total_weight()
        sums.take(weight, weighting.scale)
        self._closing.take()
        if self._setting.recovery is not None and not self._setting.is_part:
            self._setting.recovery.commit_step(self.counted)  # A step may have several averages.
        if not self._place.host_runs_ahead:
            self._wait_s += time.perf_counter() - began - (sums.own_s - own_s)

    def sum_all(self) -> None:
        if self._torn:
            self._torn = False
            raise PeerLost("another rank was lost while backward ran")
        self._sums.start_rest(self._weighting.weight, self._weighting.factor)
        self._sums.wait()
        if not self._sums.carries_weight:
            self._sum_weights()

    def _sum_weights(self) -> None:
        group, what = self._place.group, "the number of samples"
        mine = [self._weighting.weight, *self._sums.flags()]
        if group is None:
            self._summed_weight[:] = mine
            self._comm.wait([self._comm.iallreduce(self._summed_weight)], what)
            return
        weight = torch.tensor(mine, dtype=torch.float64, device=group.device)
        group.sum(weight, what).wait()
        self._weight_on_device = weight

    def _total_weight(self) -> torch.Tensor:
        if self._weight_on_device is not None:
            return self._weight_on_device
        return torch.from_numpy(self._summed_weight)

    def reset(self, undo: bool) -> None:
        self._sums.reset(undo)

    def arrays(self, last: bool) -> list[npt.NDArray[np.generic]]:
        return [self._summed_weight, *self._sums.arrays(last)]
