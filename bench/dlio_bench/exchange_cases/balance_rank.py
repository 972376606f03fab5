"""One rank of the cases balance and unequal.

Run as `python -m dlio_bench.exchange_cases.balance_rank JSON`.

Its computation is almost all sleep, in proportion to its samples, so that a machine with fewer
cores than ranks does not distort it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_BATCH: Final = 32
_SIZE: Final = 32
_MODEL: Final = "sleeping"
_GRID: Final = 8
_WIDTH: Final = 64


def _rank(task: dict[str, Any]) -> None:
    """One rank's trainings, one after another: options of `TrainConfig` in `runs`."""
    from dlio.comm import world
    from dlio.train.config import train_config
    from dlio.train.model import MODELS
    from dlio.train.trainer import train

    comm = world()
    sample_s = task["sample_s"] * (task["factor"] if comm.rank == comm.size - 1 else 1.0)
    MODELS[_MODEL] = _sleeping(sample_s)
    runs = []
    for options in task["runs"]:
        report = train(
            train_config(
                epochs=task["epochs"],
                batch_size=_BATCH,
                model=_MODEL,
                image_size=_SIZE,
                tiers="ram:1GiB",
                workers=1,
                **options,
            )
        )
        runs.append(
            [
                {
                    "seconds": epoch.seconds,
                    "samples": epoch.samples,
                    "shares": epoch.shares,
                    "rates": epoch.rank_samples_per_s,
                    "val_accuracy": epoch.val_accuracy,
                }
                for epoch in report.epochs
            ]
        )
    if comm.rank == 0:
        print(json.dumps({"runs": runs}), flush=True)


def _sleeping(sample_s: float) -> Callable[[int, int], Any]:
    """A factory of models that take `sample_s` for each training sample."""
    import torch
    from torch import nn

    class SleepingModel(nn.Module):
        def __init__(self, classes: int, image_size: int) -> None:
            super().__init__()
            self.head = nn.Sequential(
                *(nn.AdaptiveAvgPool2d(_GRID), nn.Flatten(), nn.Linear(3 * _GRID**2, _WIDTH)),
                *(nn.ReLU(), nn.Linear(_WIDTH, classes)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # x: (n, 3, size, size) -> (n, classes)
            if self.training:
                time.sleep(sample_s * len(x))
            logits: torch.Tensor = self.head(x)
            return logits

    return SleepingModel


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
