"""Local SGD and DiLoCo: ranks train on their own, and now and then agree on the mean of what their
weights have changed by (Stich, 2019; Douillard et al., 2023).

`diloco` gives that mean to an outer optimizer, as its gradient: Nesterov's momentum of 0.9 and a
learning rate of 0.7, as published.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

from dlio.comm import Communicator
from dlio.train.cut import Cut
from dlio.train.exchange.buckets import Bucket, Named, in_buckets
from dlio.train.exchange.compress.layout import Scratch
from dlio.train.exchange.compress.reduce import TAGS
from dlio.train.exchange.reshape_state import Told, recut_state
from dlio.train.exchange.sums import load_state as load_sums
from dlio.train.exchange.sums import make_sum, state_of
from dlio.train.exchange_spec import ExchangeSpec

_FIRST_TAG: Final = 1
_OUTER_RATE: Final = 0.7
_OUTER_MOMENTUM: Final = 0.9


class Periodic:
    """Every `spec.period` steps, and at the end, weights become the last common ones plus the mean
    change, compressed where the exchange says so; what is left out is told next time."""

    alike = False

    def __init__(
        self, named: Named, comm: Communicator, spec: ExchangeSpec, node_of: list[int]
    ) -> None:
        self._comm, self._spec, self._named = comm, spec, named
        self._nodes = np.asarray(node_of, np.int32)
        self._told = Told()
        self._steps = 0
        self._make_buckets()

    def _make_buckets(self) -> None:
        """Buckets of the parameters as they are, which are taken for the common ones."""
        comm, spec = self._comm, self._spec
        groups = in_buckets(self._named) if comm.size > 1 else []
        scratch = Scratch()
        self._buckets = [Bucket(group) for group in groups]
        self._sums = [
            make_sum(spec, comm, bucket.tensors, _FIRST_TAG + number * TAGS, self._nodes, scratch)
            for number, bucket in enumerate(self._buckets)
        ]
        self._common = [torch.empty_like(bucket.flat) for bucket in self._buckets]
        self._momentum = [torch.zeros_like(bucket.flat) for bucket in self._buckets]
        for bucket, common in zip(self._buckets, self._common, strict=True):
            self._read(bucket)
            common.copy_(bucket.flat)

    def before_backward(self, samples: int, planned: int) -> None:
        pass

    def weigh(self, samples: float) -> None:
        pass

    def hold(self, held: bool) -> None:
        pass

    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        self._steps += 1
        if self._steps >= self._spec.period:
            self._agree()

    def watch(self, module: nn.Module) -> None:
        pass

    def finish(self) -> None:
        if self._steps:
            self._agree()

    def reshape(self, cuts: Sequence[Cut]) -> None:
        before, state = self._buckets, self.state()
        self._told.keep(self._counted())
        for each in self._sums:
            each.close()
        self._make_buckets()
        # Weights that are alike are the common ones; what made up for neurons is no change to tell.
        kept = ("owed", "momentum") if self._steps == 0 else ("owed", "momentum", "common")
        self.load_state(recut_state(state, before, self._buckets, cuts, kept))

    def state(self) -> dict[str, torch.Tensor]:
        state = {"steps": torch.tensor(self._steps), **state_of(self._sums)}
        for number, (common, momentum) in enumerate(zip(self._common, self._momentum, strict=True)):
            state[f"common/{number}"], state[f"momentum/{number}"] = common, momentum
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        load_sums(self._sums, state)
        self._steps = int(state.get("steps", 0))
        for number, bucket in enumerate(self._buckets):
            self._read(bucket)
            common = state.get(f"common/{number}", bucket.flat)
            self._common[number].copy_(common)
            if f"momentum/{number}" in state:
                self._momentum[number].copy_(state[f"momentum/{number}"])

    def statistics(self) -> dict[str, float]:
        return self._told.plus(self._counted())

    def _counted(self) -> dict[str, float]:
        told = [each.statistics() for each in self._sums]
        return {key: sum(each[key] for each in told) for key in ("wait_s", "messages", "bytes")}

    def close(self) -> None:
        for each in self._sums:
            each.close()
        if self._comm.size > 1:
            self._comm.close()

    @torch.no_grad()
    def _agree(self) -> None:
        self._steps = 0
        for bucket, common, total in zip(self._buckets, self._common, self._sums, strict=True):
            self._read(bucket)
            bucket.flat -= common
            total.start(bucket.array)
            for each in self._sums:
                each.advance()
        for number, (bucket, total) in enumerate(zip(self._buckets, self._sums, strict=True)):
            total.wait()
            change = bucket.flat.div_(self._comm.size)
            common, momentum = self._common[number], self._momentum[number]
            if self._spec.merge == "outer":
                momentum.mul_(_OUTER_MOMENTUM).add_(change)
                change.add_(momentum, alpha=_OUTER_MOMENTUM)
                common.add_(change, alpha=_OUTER_RATE)
            else:
                common.add_(change)
            bucket.flat.copy_(common)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.copy_(view)

    @staticmethod
    @torch.no_grad()
    def _read(bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            view.copy_(parameter)
