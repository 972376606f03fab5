"""Synchronous data parallelism: gradients are summed over all ranks while backward runs.

docs/design/gradient-path.md follows one gradient through this module.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd import Variable

from dlio.comm.funnel import is_foreign_thread
from dlio.comm.progress_thread import ProgressThread
from dlio.errors import PeerLost
from dlio.exchange.assigned_gradients import has_assigned, mark_means
from dlio.exchange.backward_end import after_backward, sends_after_backward
from dlio.exchange.buckets import Bucket, Named, gradient_type, in_buckets
from dlio.exchange.buffer_placement import BufferPlacement
from dlio.exchange.cut import TensorCut, reshape_state
from dlio.exchange.exchange_base import Exchange
from dlio.exchange.exchange_context import ExchangeContext
from dlio.exchange.quantised_allreduce import TAGS
from dlio.exchange.round_commit import RoundCommit
from dlio.exchange.sums import BucketSums

_FIRST_TAG: Final = 1
_OF_SUMS: Final = 2.0**-16
"""Factor of all weights of a sum, which cancels out of the mean, to the bit. Gradients that are
multiplied by samples would overflow sooner than those of one process, and a gradient scaler would
skip the step."""


class StepPhase(Enum):
    """A phase of one rank's step.

                      gradient, held
             +--------------------------->  HELD  <-- gradient, held --+
             |                               |                         |
             |                            gradient                     |
             |                               v                         |
           IDLE  ------- gradient ------> BACKWARD <-- gradient -- AVERAGED
             ^                            |      |                     ^
             |                            |      +-- backward ends ----+
             |                            |           (all messages)   |
             |               backward ends in a thread                 |
             |               that may not send                         |
             |                            v                            |
             |                        UNSENT ---- backward returns ----+
             |
             +--- before_step, from every phase

    Gradients that were assigned lead from IDLE to AVERAGED, or to there again, when they are taken.

    "gradient": autograd has accumulated a parameter's gradient. "backward ends": autograd's
    callback at the end of a backward. "backward returns": `Tensor.backward` returns in the thread
    that called it.

    On its way to IDLE, `before_step` averages the gradients that other ranks still expect: from
    HELD and BACKWARD always; from IDLE if this rank announced its samples by `before_backward`,
    because a rank without samples runs no backward, and the others wait for its zeros; from
    AVERAGED never.
    """

    IDLE = auto()
    """No gradient since the last step."""
    HELD = auto()
    """Gradients that no other rank has received yet."""
    BACKWARD = auto()
    """A backward is running; complete buckets are being sent."""
    UNSENT = auto()
    """The backward is over; its messages wait for the thread that may send."""
    AVERAGED = auto()
    """`.grad` holds the mean over all ranks."""


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


class SynchronousSgd(Exchange):
    """Sums each bucket as soon as backward has computed its gradients.

    When `backward` returns, `.grad` holds the mean over all ranks, so that clipping, accumulation
    and inspection see the mean.

    Sums start in the order of buckets on all ranks, whatever order gradients arrive in. All buckets
    are summed: a rank does not know which parameters the backward of another one has reached. A
    rank without samples, whose backward does not run, and a parameter that only this rank's
    backward did not reach contribute the contents of `.grad` (earlier backwards of the step), or
    zeros, and get the mean as all others do. A parameter without a gradient on any rank gets none.

    With the gradients travel, for each parameter, whether this rank has one of it, and the rank's
    weight. Without a compressor these are a bucket's last elements; they must be exact, so with a
    compressor they travel alone. With a compressor the mean is not exact; the next mean includes
    the difference.

    `wait_s` counts the waits for other ranks, not those for this rank's own device. With a GPU
    and an MPI that only the main thread may call, nothing is sent before backward returns.

    One rank has no hooks, copies nothing and sends nothing.

    Args:
        before_wait: called at the end of each backward, before waiting for other ranks.
    """

    alike = True

    def __init__(
        self, named: Named, context: ExchangeContext, before_wait: Callable[[], None] | None = None
    ) -> None:
        self._named, self._context, self._before_wait = named, context, before_wait
        self._comm = comm = context.comm
        # Open MPI moves long messages inside calls only: of allreduce over 1 Gbit/s the hooks
        # alone hide 0.65, with this thread 0.92.
        self._progress = ProgressThread(comm)
        self._sums = BucketSums()
        devices = [parameter.device for _, parameter in named]
        several = comm.size > 1 and len(named) > 0
        self._placement = BufferPlacement(named, context)
        self._stop_watching: Callable[[], None] | None = None
        """Set if another thread than autograd's must send."""
        if several and sends_after_backward(devices):
            self._stop_watching = after_backward(self._backward_returns)
        self._phase = StepPhase.IDLE
        self._held = False
        """Value of the last call of `hold`."""
        self._has_assigned = False
        """True once a step had gradients that no backward has made."""
        self._expects_changes = False
        """True if such gradients may have been added to means since the last average."""
        # A lossy weight or flag would falsify the mean of every gradient of the bucket.
        self._carries_weight = context.spec.compressor is None
        """True if each bucket carries the rank's weight and its parameters' flags."""
        self._unit = _OF_SUMS if self._carries_weight else 1.0
        """Weight of a sample."""
        self._weights = _GradientWeights(self._unit, self._unit)
        self._wait_s = 0.0
        self._ranks = comm.size
        """Ranks at the beginning, by which a loss is scaled."""
        self._values = context.values
        self._places: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=2)
        """The first bucket's buffers, and the place of the values in each."""
        self._keeps = context.recovery is not None
        """Keep each step's sums until the next one's are complete, for ranks that lack them."""
        self._summed_weight: npt.NDArray[np.float64]
        """The ranks' weight in the last average, and how many of them have each parameter's
        gradient, if buckets do not carry them."""
        self._peer_lost = False
        """True if a rank was lost while this average's sums were under way."""
        self._make_buckets()
        self._commit = RoundCommit(context, self)

    # The calls of a training loop.

    @property
    def contributors(self) -> tuple[int, ...]:
        """Ranks, by their first numbers, whose gradients are in the last average."""
        return self._commit.contributors

    @property
    def closed(self) -> int:
        """Number of averages that this rank has."""
        return self._commit.closed

    def before_backward(self, samples: int, planned: int) -> None:
        self._weights = _GradientWeights(
            samples * self._unit, self._unit, scale=planned / self._ranks, everything=True
        )

    def weigh(self, samples: float) -> None:
        now, weight = self._weights, samples * self._unit  # `dlio run` calls this for each module.
        if now.everything or now.weight != weight or now.factor != weight:
            self._weights = _GradientWeights(weight, factor=weight)

    def hold(self, held: bool) -> None:
        self._held = held

    def before_step(self) -> None:
        self.take_assigned()
        phase, self._phase = self._phase, StepPhase.IDLE
        expected = phase not in (StepPhase.IDLE, StepPhase.AVERAGED)
        if phase is StepPhase.IDLE:
            expected = self._weights.everything
        if expected and self._buckets:
            self._average()
        if self._context.takes_assigned:
            mark_means(self._parameters)

    def take_assigned(self) -> None:
        is_idle = self._phase is StepPhase.IDLE
        if self._average_assigned(looks_at_changes=is_idle or self._expects_changes):
            self._phase = StepPhase.AVERAGED
        self._expects_changes = False

    def expect_changes(self) -> None:
        self._expects_changes = True

    def settle_assigned(self) -> None:
        is_idle = self._phase is StepPhase.IDLE
        # Where backward makes all gradients, changed ones have been set to zero in place.
        self._average_assigned(looks_at_changes=is_idle and self._has_assigned)

    def _average_assigned(self, looks_at_changes: bool) -> bool:
        phase = self._phase
        if not self._context.takes_assigned or phase not in (StepPhase.IDLE, StepPhase.AVERAGED):
            return False
        is_found = has_assigned(self._parameters, looks_at_changes)
        if is_found:
            self._has_assigned |= phase is StepPhase.IDLE
            self._average()
        return is_found

    def reshape(self, cuts: Sequence[TensorCut]) -> None:
        before, state = self._buckets, self.state()
        self._remove_hooks()
        self._make_buckets()
        self.load_state(reshape_state(state, before, self._buckets, cuts, ("owed",)))

    def state(self) -> dict[str, torch.Tensor]:
        return self._sums.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._sums.load_state(state)

    def statistics(self) -> dict[str, float]:
        wait_s = self._wait_s + self._placement.waited_s
        return {**self._sums.statistics(), "wait_s": wait_s}

    def close(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
        self._remove_hooks()
        self._sums.close()
        self._placement.close()
        self._progress.close()
        self._commit.remove()
        if self._ranks > 1:
            self._comm.close()

    # Buckets and hooks.

    def _make_buckets(self) -> None:
        """Create buckets of the parameters in their current shapes, and register hooks."""
        # A rank that is left alone continues as before: a loss is scaled by the ranks at first.
        # All parameters have a bucket, also those that this rank's backward does not reach. Summed
        # by the ranks that had gradients only, buckets of the same size added different layers in
        # silence.
        groups = in_buckets(self._named) if self._comm.size > 1 or self._keeps else []
        more = 0 if self._values is None else self._values.count
        extras = [len(group) + 1 if self._carries_weight else 0 for group in groups]
        if extras and self._carries_weight:
            extras[0] += more
        self._buckets = [
            self._placement.for_gradients(group, extra)
            for group, extra in zip(groups, extras, strict=True)
        ]
        self._sums.remake(
            self._placement.make_sum(bucket, extra, _FIRST_TAG + number * TAGS)
            for number, (bucket, extra) in enumerate(zip(self._buckets, extras, strict=True))
        )
        self._parameters = [each for bucket in self._buckets for each in bucket.parameters]
        """All of them, in the order of buckets."""
        self._summed_weight = np.zeros(1 + len(self._parameters) + more)
        self._begin_step()
        self._hooks = []
        for number, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                hooked: Any = parameter  # torch does not annotate the method.
                self._hooks.append(
                    hooked.register_post_accumulate_grad_hook(
                        lambda parameter, at=(number, place): self._gradient_ready(parameter, *at)
                    )
                )

    def _begin_step(self) -> None:
        self._missing = [set(range(len(bucket.parameters))) for bucket in self._buckets]
        """By bucket, places of parameters whose gradient has not been copied into it. Numbers, as a
        parameter's hash is a call of Python."""
        self._started = 0
        """Buckets started in order so far: those before this number."""
        self._begun: set[int] = set()
        """Buckets whose sum has begun."""
        self._void = False
        """True if sums have begun and a loss has made them void: begin all again."""

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # During backward. Autograd calls the hooks, on its own thread for a GPU.

    def _gradient_ready(self, parameter: nn.Parameter, number: int, place: int) -> None:
        """Called with the number of the parameter's bucket, and its place there."""
        if self._held:
            self._phase = StepPhase.HELD
            return
        if self._phase not in (StepPhase.BACKWARD, StepPhase.UNSENT):
            self._phase = StepPhase.BACKWARD
            # Counting gradients would not tell the end of a backward: it may leave out parameters.
            Variable._execution_engine.queue_callback(self._backward_ends)
        if number < self._started:
            # The second gradient of this backward: the sum of both is taken at the end.
            return
        self._copy(parameter, number, place, self._weights.factor)
        self._missing[number].discard(place)
        if self._peer_lost or self._may_not_send():
            return
        try:
            self._start_complete()
        except PeerLost:
            if self._context.recovery is None:
                raise
            # The backward continues; missing sums are made at its end. An exception in a hook
            # would end it in the middle, with some of `.grad` written.
            self._peer_lost = True

    def _start_complete(self) -> None:
        """Start the next buckets that are complete, and drive those under way."""
        # Not each bucket as soon as it is complete: collectives match by the order of their calls,
        # and autograd may reach parameters in another order on another rank.
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start(self._started, ())
            self._started += 1
        # Hooks alone are too rare to move long messages: between two layers' gradients nothing
        # calls MPI. The progress thread does the rest.
        for each in self._sums[: self._started]:
            each.advance()
            if not each.begun:
                break

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

    def _start(self, number: int, uncopied: Iterable[int]) -> None:
        """Start a bucket's sum, after copying the gradients that it lacks, by their places."""
        for place in uncopied:
            parameter = self._buckets[number].parameters[place]
            self._copy(parameter, number, place, self._weights.factor)
        bucket = self._buckets[number]
        if self._carries_weight:
            with torch.no_grad():
                bucket.flat[-1] = self._weights.weight
                bucket.flat[-1 - len(bucket.parameters) : -1] = 1
                for place, parameter in enumerate(reversed(bucket.parameters)):
                    if parameter.grad is None:
                        bucket.flat[-2 - place] = 0
                if number == 0 and self._values is not None:
                    self._values.depart(self._values_in(bucket), self._weights.factor)
        # Noted before the start: one that a loss interrupts may have sent messages already.
        self._begun.add(number)
        self._sums[number].start(bucket.flat)
        self._progress.go()

    @torch.no_grad()
    def _copy(self, parameter: nn.Parameter, number: int, place: int, factor: float) -> None:
        if parameter.dtype is torch.float64 and self._buckets[number].is_narrow:
            self._widen(number)
        view = self._buckets[number].views[place]
        if parameter.grad is None or not factor:  # A gradient of weight 0 may be NaN.
            view.zero_()
            return
        dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if dense.dtype is view.dtype:
            torch.mul(dense, factor, out=view)
        else:  # In the type of sums, which is the wider one.
            view.copy_(dense).mul_(factor)

    def _widen(self, number: int) -> None:
        """Continue a bucket in float64. All ranks do so before they start its next sum."""
        before = self._buckets[number]
        names = [name for name, _ in before.tensors]
        named = list(zip(names, before.parameters, strict=True))
        extra = len(before.flat) - sum(parameter.numel() for parameter in before.parameters)
        bucket = self._placement.for_gradients(named, extra)
        bucket.take_over(before)
        self._buckets[number] = bucket
        tag = _FIRST_TAG + number * TAGS
        self._sums.replace(number, lambda: self._placement.make_sum(bucket, extra, tag))

    # At the end of backward.

    def _average(self) -> None:
        """Start all remaining sums, wait for them, and write the means into `.grad`."""
        began, own_s = time.perf_counter(), self._own_s()
        if self._before_wait is not None:
            self._before_wait()
        if self._context.recovery is None:
            self.sum_all()
        else:
            self._commit.close_turn()
        self._progress.rest()
        self._take_means()
        self._commit.take()
        if self._context.recovery is not None and not self._context.is_part:
            # Here and not after the step only: a step may have several averages.
            self._context.recovery.commit_step(self.contributors)
        if not self._placement.host_runs_ahead:
            self._wait_s += time.perf_counter() - began - (self._own_s() - own_s)

    def sum_all(self) -> None:
        if self._peer_lost:
            self._peer_lost = False
            # Raised here, not in the hook that found it: backward is over, and `.grad` is whole.
            raise PeerLost("another rank was lost while backward ran")
        again, self._void = self._void, False
        for number, bucket in enumerate(self._buckets):
            if again:
                self._start(number, range(len(bucket.parameters)))
            elif number >= self._started:
                self._start(number, self._missing[number])
        for each in self._sums:
            each.begin()
        self._wait_for_sums()
        if not self._carries_weight:
            flags = [float(parameter.grad is not None) for parameter in self._parameters]
            self._summed_weight[: 1 + len(flags)] = [self._weights.weight, *flags]
            if self._values is not None:
                values = torch.from_numpy(self._summed_weight[1 + len(flags) :])
                self._values.depart(values, self._weights.factor)
            request = self._comm.iallreduce(self._summed_weight)
            self._comm.wait([request], "the number of samples")

    def _wait_for_sums(self) -> None:
        for each in self._sums:
            each.wait()

    @torch.no_grad()
    def _take_means(self) -> None:
        """Write the means into `.grad`, and begin the next step."""
        first = 1  # After the weight.
        for bucket in self._buckets:
            count = len(bucket.parameters)
            if self._carries_weight:
                flags, total = bucket.flat[-count - 1 : -1], bucket.flat[-1]
            else:
                weights = torch.from_numpy(self._summed_weight)
                flags, total = weights[first : first + count], weights[0]
            factor = _write_means(bucket, flags, total, self._weights.scale)
            first += count
        if self._values is not None and self._buckets:
            if self._carries_weight:
                values = self._values_in(self._buckets[0])
            else:
                values = torch.from_numpy(self._summed_weight[first:])
            self._values.arrive(values, factor)
        if self._context.takes_assigned:
            mark_means(self._parameters)
        if self._keeps:
            for bucket in self._buckets:
                bucket.swap()
        self._begin_step()

    def _values_in(self, bucket: Bucket) -> torch.Tensor:
        """Return the place of the numbers that travel with the first bucket."""
        assert self._values is not None
        for flat, place in self._places:
            if flat is bucket.flat:
                return place
        # Kept: in a step between large operations each one of torch takes 30 us, out of the caches.
        end = len(bucket.flat) - 1 - len(bucket.parameters)
        place = bucket.flat[end - self._values.count : end]
        self._places.append((bucket.flat, place))
        return place

    def _own_s(self) -> float:
        return sum(each.own_s for each in self._sums)

    # Where ranks may be lost: `RoundCommit` calls these.

    def reset(self, undo: bool) -> None:
        self._sums.reset(undo, self._begun)
        self._void = undo and bool(self._begun)

    def arrays(self, last: bool) -> list[npt.NDArray[np.generic]]:
        sums = [(each.before if last else each.flat).numpy() for each in self._buckets]
        return [self._summed_weight, *sums]


def _write_means(
    bucket: Bucket, flags: torch.Tensor, total: torch.Tensor, scale: float
) -> float | torch.Tensor:
    """Write the means of a bucket, times `scale`, into `.grad`. Return the factor that makes them
    of sums.

    Parameters of which no rank has a gradient, by `flags`, get none; `total` is the sum of the
    ranks' weights.
    """
    factor: float | torch.Tensor
    if total.device.type == "cpu":
        weight = float(total)
        factor, is_of_nothing = scale / max(weight, 1e-12), not weight
    else:  # Without waiting for the device.
        factor, is_of_nothing = scale / total.clamp(min=1e-12), False
    for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        if parameter.grad is None:
            if not float(flags[place]):
                continue
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
        if is_of_nothing:
            continue  # The gradients of earlier backwards of the step stay.
        if parameter.grad.is_sparse:
            # Of an embedding: the rows that any rank has a gradient of.
            parameter.grad = (view * factor).to(parameter.grad).to_sparse(1)
        elif (parameter.grad.dtype, parameter.grad.device) == (view.dtype, view.device):
            torch.mul(view, factor, out=parameter.grad)
        else:
            parameter.grad.copy_(view * factor)
    return factor
