"""Epochs of ranks with uneven shares; run under mpirun with a folder and a mode.

Each pass has other shares; the last goes on, with others again, in the middle of one before.
Each pass is begun ahead, and dropped for its new shares. Prints one JSON line a rank: its samples
a step for each pass, how often it asked peers how far they were, and what came of it.
"""

import json
import sys
from collections import Counter
from typing import Any

import pytest
import torch

import dlio
from dlio.comm import world
from dlio.errors import UsageError
from dlio.loader.shuffle import sample_shuffle

SHARES = ([5, 1, 6], [10, 1, 1], None, [2, 9, 1], [1, 2, 9])


def counted(owner: Any, name: str, calls: Counter[str]) -> None:
    """Count calls of a function."""
    function = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls[name] += 1
        return function(*args)

    setattr(owner, name, call)


def main(folder: str, mode: str) -> None:
    comm = world()
    calls: Counter[str] = Counter()
    counted(sample_shuffle, "leave", calls)
    counted(sample_shuffle.Shuffle, "_agree_on_end", calls)
    counted(sample_shuffle.Shuffle, "_settle", calls)
    passes = []
    kept: dict[str, Any] = {}
    with (
        dlio.open(folder, tiers="ram:64MiB", image_size=32, seed=3) as data,
        dlio.DataLoader(
            data,
            4,
            True,
            num_workers=1,
            persistent_workers=True,
            mode=mode,
            shares=SHARES[0],
            pretend_nodes=3,
        ) as loader,
    ):
        for number, shares in enumerate(SHARES):
            loader.shares = shares
            if number == len(SHARES) - 1:
                loader.load_state_dict(kept)
            steps = []
            for step, (images, labels) in enumerate(loader):
                samples = loader.last_samples.tolist()
                assert len(images) == len(samples)
                assert torch.equal(labels, torch.as_tensor(data.reader.labels[samples]))
                steps.append(samples)
                if number == len(SHARES) - 2 and step == 4:
                    kept = loader.state_dict()
            assert len(loader) == -(-len(data) // 12)
            assert loader.stats()["late"] == 0
            passes.append(steps)
        for wrong in ([12], [4, 4, 5]):
            loader.shares = wrong
            with pytest.raises(UsageError, match="3 numbers that sum to 12"):
                iter(loader)
    assert kept == {**kept, "position": 60}
    print(json.dumps({"rank": comm.rank, "passes": passes, "calls": calls}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
