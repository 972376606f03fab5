"""Synchronous data parallelism: gradients are summed over all ranks while backward goes on."""

import time

import torch
from torch import nn

from dlio.comm import Communicator, Request
from dlio.train.exchange.buckets import Bucket, in_buckets


class Allreduce:
    """Sums each bucket's gradients as soon as backward has made them.

    Reductions are started in one order on all ranks, bucket by bucket, whatever order gradients
    come in; a rank without samples, or a parameter without a gradient, contributes zeros. The
    sum is divided by the number of samples that were really used, which travels with it.

    One rank: no hook, no copy, no communication.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._comm = comm
        groups = in_buckets(model) if comm.size > 1 else []
        last = len(groups) - 1
        # The number of samples rides in the last bucket to leave.
        self._buckets = [Bucket(group, extra=int(k == last)) for k, group in enumerate(groups)]
        self._where = {
            parameter: (number, view)
            for number, bucket in enumerate(self._buckets)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in self._where
        ]
        self._missing: list[set[nn.Parameter]] = []
        self._requests: list[Request] = []
        self._denominator = 1.0
        self._samples = 0
        self._wait_s = 0.0
        self._steps = 0

    def before_backward(self, samples: int, planned: int) -> None:
        self._samples = samples
        self._denominator = planned / self._comm.size
        self._missing = [set(bucket.parameters) for bucket in self._buckets]

    def before_step(self) -> None:
        if not self._buckets:
            return
        self._start_complete(up_to=len(self._buckets))
        started = time.perf_counter()
        self._comm.wait(self._requests, "gradients of the other ranks")
        self._wait_s += time.perf_counter() - started
        self._requests = []
        self._steps += 1
        total = float(self._buckets[-1].flat[-1])
        scale = self._denominator / max(total, 1.0)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.flat *= scale
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(view)

    def after_step(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        size = sum(bucket.flat.numel() * 4 for bucket in self._buckets)
        return {
            "wait_s": self._wait_s,
            "messages": float(self._steps * len(self._buckets)),
            "bytes": float(self._steps * size),
        }

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._comm.size > 1:
            self._comm.close()

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        number, view = self._where[parameter]
        view.copy_(parameter.grad)
        self._missing[number].discard(parameter)
        self._start_complete(up_to=0)
        for request in self._requests:
            request.done()  # MPI moves reductions on only when it is called.

    def _start_complete(self, up_to: int) -> None:
        """Start the next buckets that are complete; below `up_to`, whatever they lack."""
        while (number := len(self._requests)) < len(self._buckets):
            bucket, missing = self._buckets[number], self._missing[number]
            if missing and number >= up_to:
                return
            for parameter in missing:
                self._where[parameter][1].zero_()
            if number == len(self._buckets) - 1:
                bucket.flat[-1] = self._samples
            self._requests.append(self._comm.iallreduce(bucket.array))
