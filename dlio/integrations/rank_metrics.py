"""torchmetrics over the survivors, without a process group of torch.distributed.

A value is made from several tensors, such as a sum and a count. If a rank is lost while they are
gathered, all of them are gathered again, from the same ranks.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from dlio.comm import world
from dlio.comm.survival.recovery import recovery_of, uniform
from dlio.integrations.objects import gather_tensors

_MARK: Final = "of_dlio"
"""Attribute of a method that takes the place of another."""


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
