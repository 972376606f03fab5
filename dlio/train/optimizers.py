"""torch's optimizers, by the names that --optimizer accepts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.util.arguments import unknown_word

_Make = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class _OptimizerKind:
    make: _Make
    """Make the optimizer from parameter groups and a momentum."""
    peak_lr: float
    """Peak learning rate for a global batch of 64; it grows with the square root of the batch."""
    weight_decay: float
    """Default weight decay."""


_KINDS: Final = {
    "nesterov": _OptimizerKind(
        lambda groups, m: torch.optim.SGD(groups, lr=0.0, momentum=m, nesterov=m > 0), 0.1, 5e-4
    ),
    "sgd": _OptimizerKind(lambda groups, m: torch.optim.SGD(groups, lr=0.0, momentum=m), 0.1, 5e-4),
    "adagrad": _OptimizerKind(lambda groups, _: torch.optim.Adagrad(groups, lr=0.0), 1e-2, 1e-4),
    "rmsprop": _OptimizerKind(
        lambda groups, m: torch.optim.RMSprop(groups, lr=0.0, momentum=m, alpha=0.99), 3e-4, 1e-4
    ),
    "adam": _OptimizerKind(lambda groups, _: torch.optim.Adam(groups, lr=0.0), 2e-3, 1e-4),
    "adamw": _OptimizerKind(lambda groups, _: torch.optim.AdamW(groups, lr=0.0), 2e-3, 5e-2),
}

OPTIMIZERS: Final = tuple(_KINDS)
"""Names that --optimizer takes."""


def make_optimizer(
    name: str, model: nn.Module, momentum: float, weight_decay: float | None
) -> torch.optim.Optimizer:
    """Make an optimizer of all parameters that require gradients, with learning rate 0.

    Biases and norms (parameters with fewer than two dimensions) get no weight decay, others that of
    the optimizer by default. SGD and RMSprop alone have a momentum.

    Raises UsageError for an unknown name, and for a model without trainable parameters.
    """
    kind = _kind(name)
    decay = kind.weight_decay if weight_decay is None else weight_decay
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if not parameters:
        raise UsageError(
            "the model has no parameters that require gradients: there is nothing to train"
        )
    return kind.make([group for group in groups if group["params"]], momentum)


def usual_lr(name: str, global_batch: int) -> float:
    """Default peak learning rate, suitable for residual networks.

    Raises UsageError for an unknown name.
    """
    return float(_kind(name).peak_lr * (global_batch / 64) ** 0.5)


def _kind(name: str) -> _OptimizerKind:
    if name not in _KINDS:
        raise unknown_word("--optimizer", name, _KINDS)
    return _KINDS[name]
