"""Body of test_differing.py: loaders whose arguments differ between the ranks, case by case."""

import json
import sys
from typing import Any

import dlio
from dlio.comm import world
from dlio.errors import UsageError


def differing(rank: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Per case: options of the loader, of which one differs, and of the way that it begins."""
    alike: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    return {
        "nothing": (alike, {}),
        "seed": (alike | {"seed": rank}, {}),
        "batch_size": (alike | {"batch_size": 4 + rank}, {}),
        "shuffle": (alike | {"shuffle": rank == 0}, {}),
        "drop_last": (alike | {"drop_last": rank == 0}, {}),
        "mode": (alike | {"mode": ("batch", "local")[rank]}, {}),
        "source_order": (alike | {"source_order": ("sample", "block(2)")[rank]}, {}),
        "epoch": (alike, {"epoch": rank}),
        "position in the epoch": (alike, {"resumes": rank == 0}),
        "order": (alike | ({"sampler": [1, 2], "shuffle": None} if rank else {}), {}),
    }


def outcome(folder: str, options: dict[str, Any], begin: dict[str, Any]) -> str:
    with (
        dlio.open(folder, tiers="ram:8MiB", image_size=8) as data,
        dlio.DataLoader(data, **options) as loader,
    ):
        loader.set_epoch(begin.get("epoch", 0))
        if begin.get("resumes"):
            loader.load_state_dict(loader.state_dict() | {"position": 8})
        try:
            count = sum(len(labels) for _, labels in loader)
        except UsageError as error:
            return str(error)
        return f"{sum(world().allgather(count))} samples"


if __name__ == "__main__":
    rank = world().rank
    for case, (options, begin) in differing(rank).items():
        said = outcome(sys.argv[1], options, begin)
        print(json.dumps({"rank": rank, "case": case, "said": said}), flush=True)
