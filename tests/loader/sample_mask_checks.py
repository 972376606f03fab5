"""Epochs that leave samples out, on several ranks; run under mpirun with a folder.

Prints one JSON line a rank: for each mode its samples of a whole epoch, of an epoch that was left
and gone on with, and its counts.
"""

import json
import sys
from typing import Any

import numpy as np

import dlio
from dlio.comm import world
from dlio.errors import UsageError

BATCH = 4
LEFT_AT = 3
CASES = (
    ("ram:64MiB", "batch", "sample"),
    ("ram:64MiB", "global", "sample"),
    ("ram:64MiB", "ring", "sample"),
    ("ram:64MiB", "local", "sample"),
    ("ram:64MiB", "partial(0.5)", "sample"),
    ("none", "batch", "sample"),
    ("none", "batch", "block(3)"),
    ("none", "global", "block(3)"),
)


def main(folder: str, numbers: str) -> None:
    reports: list[dict[str, Any]] = []
    for tiers, mode, source_order in (CASES[int(number)] for number in numbers.split(",")):
        with dlio.open(folder, tiers=tiers, image_size=32, seed=3) as data:
            keep = np.random.default_rng(5).random(len(data)) < 0.5
            # A block of which none is kept.
            keep[data.reader.layout.samples_of(1)] = False
            options: dict[str, Any] = {"mode": mode, "source_order": source_order}
            options["pretend_nodes"] = world().size
            with dlio.DataLoader(data, BATCH, True, **options) as loader:
                for _ in loader:
                    pass  # Fills the tiers.
                loader.set_epoch(1, keep)
                whole, steps = [], len(loader)
                for images, labels in loader:
                    assert (labels.numpy() == data.reader.labels[loader.last_samples]).all()
                    whole.append(loader.last_samples.tolist())
                    assert len(images) == len(whole[-1])
                stats = loader.stats()
                loader.set_epoch(2, keep)
                parts = []
                for _ in loader:
                    parts.append(loader.last_samples.tolist())
                    if len(parts) == LEFT_AT:
                        break
                state = loader.state_dict()
            refused = ""
            with dlio.DataLoader(data, BATCH, True, **options) as loader:
                loader.load_state_dict(json.loads(json.dumps(state)))
                loader.set_epoch(2)
                try:
                    iter(loader)
                except UsageError as error:
                    refused = str(error)
                loader.load_state_dict(state)
                loader.set_epoch(2, np.packbits(keep, bitorder="little"))
                parts += [loader.last_samples.tolist() for _ in loader]
                # The next epoch is of all samples again.
                after = sum(len(loader.last_samples) for _ in loader)
            reports.append(
                {
                    "steps": steps,
                    "whole": whole,
                    "parts": parts,
                    "after": after,
                    "refused": refused,
                    "bytes": stats["bytes"],
                    "late": stats["late"],
                    "single_bytes": stats["single_bytes"],
                }
            )
    print(json.dumps({"rank": world().rank, "cases": reports}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
