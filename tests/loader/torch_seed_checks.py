"""Unseeded passes of several ranks; run under mpirun with a folder.

Each rank seeds torch otherwise. Prints one JSON line per rank: the samples of its steps, and
digests of its crops, in three epochs, of which the last two come after a state was loaded.
"""

import hashlib
import json
import sys
from typing import Any

import torch

import dlio
from dlio.comm import world


def main(folder: str) -> dict[str, Any]:
    torch.manual_seed(7 + 100 * world().rank)
    steps: list[list[list[int]]] = []
    digests: dict[str, str] = {}
    numbers: list[list[int]] = []
    with dlio.open(folder, tiers="none", image_size=16) as data:
        first = dlio.DataLoader(data, 2, shuffle=True)
        second = dlio.DataLoader(data, 2, shuffle=True)
        iterator = iter(first)
        next(iterator)
        begun = [first.last_samples.tolist()]
        second.load_state_dict(first.state_dict())
        for epoch in range(3):
            steps.append(begun if epoch == 0 else [])
            for images, _ in second:
                steps[-1].append(second.last_samples.tolist())
                for sample, image in zip(steps[-1][-1], images, strict=True):
                    made = hashlib.sha1(image.numpy().tobytes()).hexdigest()
                    digests[f"{epoch} {sample}"] = made
        mapped = dlio.DataLoader(list(range(23)), 4, shuffle=True, num_workers=1)
        numbers += [batch.tolist() for _ in range(2) for batch in mapped]
    return {"rank": world().rank, "steps": steps, "crops": digests, "numbers": numbers}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
