"""Synchronous data parallelism: gradients are summed over all ranks while backward goes on."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from dlio.comm import Communicator
from dlio.comm.funnel import elsewhere
from dlio.comm.progress import Progress
from dlio.train.cut import Cut
from dlio.train.exchange.backward import after_backward, sends_after_backward
from dlio.train.exchange.buckets import Bucket, Named, in_buckets
from dlio.train.exchange.compress.layout import Scratch
from dlio.train.exchange.compress.reduce import TAGS
from dlio.train.exchange.paths import (
    CudaCopies,
    DeviceMpiPath,
    HostPath,
    NcclPath,
    Path,
    PinnedPath,
    find_path,
)
from dlio.train.exchange.reshape_state import Told, recut_state
from dlio.train.exchange.sums import Sum, make_sum, state_of
from dlio.train.exchange.sums import load_state as load_sums
from dlio.train.exchange_spec import ExchangeSpec

_FIRST_TAG: Final = 1


class GradientExchange:
    """Sums each bucket's gradients as soon as backward has made them, and has the mean in `.grad`
    when backward returns: so what a script does with them then (clipping, accumulating, looking)
    is done with the mean.

    Sums are started in one order on all ranks, bucket by bucket, whatever order gradients come in.
    A rank without samples, whose backward does not run, and a parameter that only this rank's
    backward did not reach contribute what is in `.grad`, of earlier backwards of the step, or
    zeros; a bucket that no parameter of is reached is left out, on all ranks alike. Each rank's
    gradients count by its `weight`, which travels with them.

    With a compressor a mean that is given is not exact; what it lacks is in the next one.

    Where the gradients lie and how they get to other ranks is in `dlio.train.exchange.paths`. With
    a GPU and an MPI that only the main thread may call, nothing is sent before backward is over.

    One rank: no hook, no copy, no communication.

    Args:
        before_wait: called at the end of each backward, before other ranks are waited for.
    """

    alike = True

    def __init__(
        self,
        named: Named,
        comm: Communicator,
        spec: ExchangeSpec,
        node_of: list[int],
        before_wait: Callable[[], None] | None = None,
    ) -> None:
        self._before_wait = before_wait
        self._comm, self._spec, self._named = comm, spec, named
        self._nodes = np.asarray(node_of, np.int32)
        self._progress = Progress(comm)
        self._told = Told()
        # The weight must be exact: it rides with a bucket that is not compressed, or alone.
        self._compressed = spec.compressor is not None
        devices = [parameter.device for _, parameter in named]
        several = comm.size > 1 and len(named) > 0
        self._path = find_path(devices, spec, comm) if several else "host"
        self._where_from = devices[0] if self._path != "host" else None
        self._group: Any = dist.new_group(backend="nccl") if self._path == "nccl" else None
        self._make_buckets()
        self._end_after_backward: Callable[[], None] | None = None
        self._unfinished = False
        """Whether a backward is over whose messages another thread is to send."""
        if several and sends_after_backward(devices):
            self._end_after_backward = after_backward(self._after_backward)
        self._in_backward = False
        self._done_this_step = False
        self._weight, self._scale, self._contribution = 1.0, 1.0, 1.0
        self._whole = False
        self._held = False
        self._exposed_s = 0.0

    def _make_buckets(self) -> None:
        """Buckets of the parameters as they are, their sums and hooks."""
        comm, spec, path, where = self._comm, self._spec, self._path, self._where_from
        groups = in_buckets(self._named) if comm.size > 1 else []
        scratch = Scratch()
        extra = int(not self._compressed)
        self._buckets = [Bucket(group, extra, where) for group in groups]
        stream: Any = torch.cuda.Stream(where) if path == "pinned" else None  # type: ignore[no-untyped-call]
        self._sums: list[Path] = []
        self._totals: list[Sum] = []
        for number, bucket in enumerate(self._buckets):
            tag = _FIRST_TAG + number * TAGS
            tensors = [*bucket.tensors, *([("", (1,))] if extra else [])]
            if path == "nccl":
                self._sums.append(NcclPath(bucket, comm.size, self._group))
            elif path == "mpi":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._sums.append(DeviceMpiPath(bucket, comm, event))
            else:
                total = make_sum(spec, comm, tensors, tag, self._nodes, scratch)
                self._totals.append(total)
                made = HostPath(bucket, total) if path == "host" else None
                self._sums.append(made or PinnedPath(bucket, total, CudaCopies(stream)))
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
        self._held_back: set[int] = set()
        """Buckets that have gradients which other ranks have not been told."""

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

    def hold(self, held: bool) -> None:
        self._held = held

    def before_step(self) -> None:
        """Gradients are the mean's when this returns, on a rank without samples, too."""
        missed = self._whole and not self._done_this_step
        if self._buckets and (missed or self._held_back):
            self._finish(everything=self._whole)
        self._done_this_step = False

    def after_step(self) -> None:
        pass

    def watch(self, module: nn.Module) -> None:
        pass

    def finish(self) -> None:
        pass

    def reshape(self, cuts: Sequence[Cut]) -> None:
        before, state = self._buckets, self.state()
        self._told.keep(self._counted())
        self._close_buckets()
        self._make_buckets()
        self.load_state(recut_state(state, before, self._buckets, cuts, ("owed",)))

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self._totals)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        load_sums(self._totals, state)

    def statistics(self) -> dict[str, float]:
        return {"wait_s": self._exposed_s, **self._told.plus(self._counted())}

    def _counted(self) -> dict[str, float]:
        told = [each.statistics() for each in self._sums]
        return {key: sum(each[key] for each in told) for key in ("messages", "bytes")}

    def close(self) -> None:
        if self._end_after_backward is not None:
            self._end_after_backward()
        self._close_buckets()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._progress.close()
        if self._comm.size > 1:
            self._comm.close()

    def _close_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for each in self._sums:
            each.close()

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if self._held:
            self._held_back.add(self._where[parameter][0])
            return
        if not self._in_backward:
            self._in_backward = True
            self._done_this_step = False
            Variable._execution_engine.queue_callback(self._backward_ends)
        number = self._where[parameter][0]
        if number < self._started:
            return  # A second gradient of one backward: summed at its end.
        self._contribute(parameter)
        self._missing[number].discard(parameter)
        if self._end_after_backward is not None and elsewhere():
            return
        self._start_complete()
        for each in self._sums[: self._started]:
            if not each.advance():
                break

    def _backward_ends(self) -> None:
        if self._end_after_backward is not None and elsewhere():
            self._unfinished = True
            return
        self._in_backward = False
        self._unfinished = False
        self._finish(everything=self._whole)
        self._done_this_step = True

    def _after_backward(self) -> None:
        if self._unfinished:
            self._backward_ends()

    def _finish(self, everything: bool) -> None:
        """Start what is left, wait for all, and put the means into `.grad`.

        Args:
            everything: buckets that no gradient has come for, too: other ranks have some.
        """
        reached = [
            everything or len(missing) < len(bucket.parameters) or number in self._held_back
            for number, (bucket, missing) in enumerate(
                zip(self._buckets, self._missing, strict=True)
            )
        ]
        began = time.perf_counter()
        for number in range(self._started, len(self._buckets)):
            if reached[number]:
                self._start(number)
        for number, each in enumerate(self._sums):
            if reached[number]:
                each.begin()
        if self._before_wait is not None:
            self._before_wait()
        for number, each in enumerate(self._sums):
            if reached[number]:
                each.wait()
        self._progress.rest()
        total = None
        if self._compressed:
            total = self._summed_weight()
        for number, bucket in enumerate(self._buckets):
            if reached[number]:
                self._take(number, bucket, total, everything)
        self._exposed_s += time.perf_counter() - began
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._started = 0
        self._held_back = set()

    @torch.no_grad()
    def _take(self, number: int, bucket: Bucket, total: float | None, everything: bool) -> None:
        """Means into `.grad`.

        Args:
            total: sum of the ranks' weights; None where it is the bucket's last element.
        """
        scale: Any
        if total is None and bucket.flat.device.type != "cpu":
            scale = self._scale / bucket.flat[-1].clamp(min=1e-12)  # Nobody waits for it.
        else:
            weight = float(bucket.flat[-1]) if total is None else total
            scale = self._scale / max(weight, 1e-12)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                if parameter in self._missing[number] and not everything:
                    continue  # No rank's backward reached it.
                parameter.grad = torch.empty_like(parameter)
            if (parameter.grad.dtype, parameter.grad.device) == (view.dtype, view.device):
                torch.mul(view, scale, out=parameter.grad)
            else:
                parameter.grad.copy_(view * scale)

    def _summed_weight(self) -> float:
        weight = np.array([self._weight])
        self._comm.wait([self._comm.iallreduce(weight)], "the number of samples")
        return float(weight[0])

    def _start_complete(self) -> None:
        """Start the next buckets that are complete."""
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start(self._started)
            self._started += 1

    @torch.no_grad()
    def _contribute(self, parameter: nn.Parameter) -> None:
        view = self._where[parameter][1]
        if parameter.grad is None:
            view.zero_()
            return
        view.copy_(parameter.grad)
        if self._contribution != 1.0:
            view.mul_(self._contribution)

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        for parameter in self._missing[number]:
            self._contribute(parameter)
        if not self._compressed:
            bucket.flat[-1] = self._weight
        self._sums[number].start()
        self._progress.go()
