"""Synchronous data parallelism: gradients are summed over all ranks while backward goes on."""

import time
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable

from dlio.comm import Communicator
from dlio.train.exchange.buckets import Bucket, Named, in_buckets
from dlio.train.exchange.compress.layout import Scratch
from dlio.train.exchange.compress.reduce import TAGS
from dlio.train.exchange.spec import ExchangeSpec
from dlio.train.exchange.sums import Sum, make_sum

_FIRST_TAG: Final = 1


class GradientExchange:
    """Sums each bucket's gradients as soon as backward has made them, and has the mean in `.grad`
    when backward returns: so what a script does with them then (clipping, accumulating, looking)
    is done with the mean.

    Sums are started in one order on all ranks, bucket by bucket, whatever order gradients come in.
    A rank without samples, whose backward does not run, and a parameter that only this rank's
    backward did not reach contribute zeros; a bucket that no parameter of is reached is left out,
    on all ranks alike. Each rank's gradients count by its `weight`, which travels with them.

    With a compressor a mean that is given is not exact; what it lacks is in the next one.

    One rank: no hook, no copy, no communication.
    """

    def __init__(
        self, named: Named, comm: Communicator, spec: ExchangeSpec, node_of: list[int]
    ) -> None:
        self._comm = comm
        groups = in_buckets(named) if comm.size > 1 else []
        scratch, nodes = Scratch(), np.asarray(node_of, np.int32)
        # The weight must be exact: it rides with a bucket that is not compressed, or alone.
        self._compressed = spec.compressor is not None
        self._buckets = [Bucket(group, extra=int(not self._compressed)) for group in groups]
        self._sums: list[Sum] = []
        for number, bucket in enumerate(self._buckets):
            extra = [] if self._compressed else [("", (1,))]
            tag = _FIRST_TAG + number * TAGS
            tensors = [*bucket.tensors, *extra]
            self._sums.append(make_sum(spec, comm, tensors, tag, nodes, scratch))
        self._where = {
            parameter: (number, view)
            for number, bucket in enumerate(self._buckets)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in self._where
        ]
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._started = 0
        self._in_backward = False
        self._done_this_step = False
        self._weight, self._scale, self._contribution = 1.0, 1.0, 1.0
        self._whole = False
        self._exposed_s = 0.0

    def before_backward(self, samples: int, planned: int) -> None:
        """A rank's loss is its sum over samples, divided by `planned / ranks`. All buckets are
        summed, for a rank without samples does not know which ones others reach."""
        self._weight, self._scale = float(samples), planned / self._comm.size
        self._contribution = 1.0
        self._whole = True

    def weigh(self, samples: float) -> None:
        """A rank's loss is a mean over so many samples; the same number everywhere for equals."""
        self._weight, self._scale, self._contribution = samples, 1.0, samples
        self._whole = False

    def before_step(self) -> None:
        """Gradients are the mean's when this returns, on a rank without samples, too."""
        if self._whole and not self._done_this_step and self._buckets:
            self._finish(everything=True)
        self._done_this_step = False

    def after_step(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        told = [each.statistics() for each in self._sums]
        return {
            "wait_s": self._exposed_s,
            "messages": sum(each["messages"] for each in told),
            "bytes": sum(each["bytes"] for each in told),
        }

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for each in self._sums:
            each.close()
        if self._comm.size > 1:
            self._comm.close()

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if not self._in_backward:
            self._in_backward = True
            self._done_this_step = False
            Variable._execution_engine.queue_callback(self._backward_ends)
        number, view = self._where[parameter]
        if number < self._started:
            return  # A second gradient of one backward: summed at its end.
        view.copy_(parameter.grad)
        if self._contribution != 1.0:
            view.mul_(self._contribution)
        self._missing[number].discard(parameter)
        self._start_complete()
        for each in self._sums[: self._started]:
            each.advance()

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._finish(everything=self._whole)
        self._done_this_step = True

    def _finish(self, everything: bool) -> None:
        """Start what is left, wait for all, and put the means into `.grad`.

        Args:
            everything: buckets that no gradient has come for, too: other ranks have some.
        """
        reached = [
            everything or len(missing) < len(bucket.parameters)
            for bucket, missing in zip(self._buckets, self._missing, strict=True)
        ]
        began = time.perf_counter()
        for number in range(self._started, len(self._buckets)):
            if reached[number]:
                self._start(number)
        for number, each in enumerate(self._sums):
            if reached[number]:
                each.wait()
        total = None
        if self._compressed:
            total = self._summed_weight()
        for number, bucket in enumerate(self._buckets):
            if reached[number]:
                weight = float(bucket.flat[-1]) if total is None else total
                self._take(number, bucket, self._scale / max(weight, 1e-12), everything)
        self._exposed_s += time.perf_counter() - began
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._started = 0

    @torch.no_grad()
    def _take(self, number: int, bucket: Bucket, scale: float, everything: bool) -> None:
        bucket.flat *= scale
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                if parameter in self._missing[number] and not everything:
                    continue  # No rank's backward reached it.
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)

    def _summed_weight(self) -> float:
        weight = np.array([self._weight])
        self._comm.wait([self._comm.iallreduce(weight)], "the number of samples")
        return float(weight[0])

    def _start_complete(self) -> None:
        """Start the next buckets that are complete."""
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start(self._started)
            self._started += 1

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        for parameter in self._missing[number]:
            self._where[parameter][1].zero_()
        if not self._compressed:
            bucket.flat[-1] = self._weight
        self._sums[number].start(bucket.array)
