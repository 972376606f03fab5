"""Ranks of unequal speed: epochs with even shares, with --balance, and as they would be at best.

The last rank needs three times as long for a sample as the others. What ranks compute is almost
all sleep, in proportion to their samples, so that a machine with fewer cores than ranks does not
distort it. `python -m dlio_bench.balance JSON` is one rank of it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

_SLOWER: Final = 3.0
_BATCH: Final = 32
_SIZE: Final = 32
_MODEL: Final = "sleeping"
_TIMEOUT_S: Final = 600.0
_STARTS: Final = 5


def measure(
    repeats: int,
    ranks: Sequence[int] = (2, 3),
    images: int = 960,
    epochs: int = 4,
    sample_s: float = 0.004,
) -> dict[str, Any]:
    """Trains with and without `--balance`, the last rank slowed 3x.

    For each number of ranks: `even_s`, `first_s` and `balanced_s`, seconds of an epoch with even
    shares, of the first with --balance, and of the last; `ideal_s`, all samples over the sum of the
    ranks' own rates, as the run with even shares has measured them; their ratios to that of the
    same repeat; `asked_s`, likewise of rates as asked for, sleep and nothing else; `shares` of each
    repeat's last epoch.

    Args:
        sample_s: that a fast rank computes for a sample.
    """
    from dlio.demo import draw_dataset
    from dlio_bench.machine import ratio, spread

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        pictures = os.path.join(scratch, "pictures")
        draw_dataset(pictures, images=images, validation=3, classes=3)
        for size in ranks:
            told: dict[str, list[Any]] = {}
            for _ in range(repeats):
                task = {
                    "source": os.path.join(pictures, "train"),
                    "epochs": epochs,
                    "sample_s": sample_s,
                    "report": os.path.join(scratch, "report.json"),
                }
                even, balanced = (_trained(size, {**task, "balance": on}) for on in (False, True))
                told.setdefault("even_s", []).append(even[-1]["seconds"])
                told.setdefault("first_s", []).append(balanced[0]["seconds"])
                told.setdefault("balanced_s", []).append(balanced[-1]["seconds"])
                told.setdefault("ideal_s", []).append(images / sum(even[-1]["rank_samples_per_s"]))
                told.setdefault("shares", []).append(balanced[-1]["shares"])
            ideal = told["ideal_s"]
            asked = images * sample_s / (size - 1 + 1 / _SLOWER)
            found[f"{size}_ranks"] = {
                "asked_s": asked,
                **{name: spread(told[name]) for name in told if name.endswith("_s")},
                "even_over_ideal": ratio(told["even_s"], ideal),
                "first_over_ideal": ratio(told["first_s"], ideal),
                "balanced_over_ideal": ratio(told["balanced_s"], ideal),
                "shares": told["shares"],
            }
    return found


def _trained(ranks: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The epochs of one training, as its report has them."""
    from dlio.comm.launch import find_mpirun
    from dlio.errors import UsageError

    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "^ofi",  # Looking for fabrics takes a second.
        "OMP_NUM_THREADS": "1",
    }
    argv = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    argv += [sys.executable, "-m", "dlio_bench.balance", json.dumps(task)]
    for _ in range(_STARTS):
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        # mpirun says so, before any rank runs, when an interface goes as it lists them.
        if "listener thread failed to start" not in done.stderr:
            break
    if done.returncode:
        raise UsageError(f"{ranks} ranks failed: {done.stderr.strip()[-800:]}")
    with open(task["report"], encoding="utf-8") as file:
        epochs: list[dict[str, Any]] = json.load(file)["epochs"]
    return epochs


def _rank(task: dict[str, Any]) -> None:
    """One rank's training."""
    from dlio.comm import world
    from dlio.train.config import TrainConfig
    from dlio.train.model import MODELS
    from dlio.train.trainer import train

    comm = world()
    sample_s = task["sample_s"] * (_SLOWER if comm.rank == comm.size - 1 else 1.0)
    MODELS[_MODEL] = _sleeping(sample_s)
    train(
        TrainConfig(
            task["source"],
            epochs=task["epochs"],
            batch_size=_BATCH,
            model=_MODEL,
            image_size=_SIZE,
            tiers="ram:1GiB",
            workers=1,
            balance=task["balance"],
            report=task["report"],
        )
    )


def _sleeping(sample_s: float) -> Callable[[int, int], Any]:
    """A factory of models that take `sample_s` for each sample."""
    import torch
    from torch import nn

    class Sleeping(nn.Module):
        def __init__(self, classes: int, image_size: int) -> None:
            super().__init__()
            self.head = nn.Linear(3, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # x: (n, 3, size, size) -> (n, classes)
            time.sleep(sample_s * len(x))
            logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
            return logits

    return Sleeping


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
