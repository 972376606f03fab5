"""torchmetrics over the survivors, without a process group of torch.distributed.

A value is made from several tensors, such as a sum and a count. If a rank is lost while they are
gathered, all of them are gathered again, from the same ranks.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch
from torch import nn

from dlio.comm import world
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.integrations.objects import gather_tensors

_MARK: Final = "of_dlio"
"""Attribute of a method that takes the place of another."""
_SHARE: Final = "_of_dlio"
"""Attribute of a metric that counts over ranks."""


def gathered(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, whatever the group: there is only one. Collective."""
    del group
    comm = world()
    return uniform(comm, lambda: gather_tensors(tensor, comm))


def reduce_over_ranks(model: nn.Module) -> None:
    """Have the metrics of a model be reduced over dlio's ranks, if they are not otherwise."""
    from torchmetrics import Metric

    keeps_together(Metric, "_sync_dist", lambda metric: tuple(metric._reductions))
    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gathered
            metric.distributed_available_fn = lambda: world().size > 1


def count_over_ranks(
    model: nn.Module,
    gather: Callable[..., list[torch.Tensor]],
    divides: Callable[[], bool],
    counts: Callable[[], bool],
    is_first: Callable[[], bool],
) -> None:
    """Have the metrics of a model count each sample of batches that ranks have parts of once.

    Args:
        gather: returns the tensors of all ranks. Collective.
        divides: True if this rank has a part of the present batch, and not all of it.
        counts: False if that part has no sample that counts.
        is_first: True if of batches that all ranks have whole this rank's count.
    """
    from torchmetrics import Metric

    def keeping(metric: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            share = vars(metric).get(_SHARE)
            if share is None or share.is_inside:
                return method(*args, **options)
            is_divided, was_divided = divides(), share.is_divided and metric._update_count > 0
            if is_divided and not was_divided and not is_first():
                metric.reset()  # So far all ranks have had the same batches.
            share.is_divided = is_divided or was_divided
            of_rank = counts() if is_divided else is_first() or not was_divided
            before = None if of_rank else state_of(metric)
            share.is_inside = True
            try:
                return method(*args, **options)
            finally:
                share.is_inside = False
                if before is not None:
                    put_back(metric, before)

        return call

    if not getattr(Metric.forward, _MARK, False):
        original = Metric.forward

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            return keeping(self, original.__get__(self))(*args, **options)

        setattr(forward, _MARK, True)
        kind: Any = Metric
        kind.forward = forward
    metrics: list[Any] = list(model.modules())
    for metric in metrics:
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            share = _MetricShare()
            vars(metric)[_SHARE] = share
            vars(metric)["update"] = keeping(metric, metric.update)
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = share.wants_others


class _MetricShare:
    """The batches that a metric of this rank is of, since it was reset."""

    is_inside = is_divided = False

    def wants_others(self) -> bool:
        return self.is_divided


def state_of(metric: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of a metric's updates and a copy of what it has made of them."""
    states = {name: copied_state(getattr(metric, name)) for name in metric._defaults}
    return metric._update_count, states


def put_back(metric: Any, state: tuple[int, dict[str, Any]]) -> None:
    """Put a metric back to a state of before."""
    metric._update_count, states = state
    metric._computed = None
    for name, value in states.items():
        setattr(metric, name, value)


def keeps_together(kind: type[Any], name: str, states: Callable[[Any], tuple[str, ...]]) -> None:
    """Have a method of a class, collective, gather all that it does from the same ranks.

    `states` returns the names of the object's attributes that the method may change.
    """
    original = getattr(kind, name)
    if getattr(original, _MARK, False):
        return

    def method(self: Any, *args: Any, **options: Any) -> Any:
        recovery = recovery_of(world())
        if recovery is None:
            return original(self, *args, **options)
        before = {each: copied_state(getattr(self, each)) for each in states(self)}
        while True:
            number = recovery.number
            result = original(self, *args, **options)
            if recovery.number == number:
                return result
            for each, value in before.items():
                setattr(self, each, copied_state(value))

    setattr(method, _MARK, True)
    setattr(kind, name, method)


def copied_state(state: Any) -> Any:
    """Return a copy of a metric's state: a tensor, or a list of them."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    return list(state) if isinstance(state, list) else state
