"""Epochs of ranks of one node, each with a tier on its device; run under mpirun with a folder.

Prints one JSON line a rank: by epoch, its samples and how many of them its tier had, and the images
that its tier keeps at the end.
"""

import json
import os
import sys

import numpy as np
import torch

import dlio
from dlio.comm import world
from dlio.util.settings import DEVICE_TIER


def main(folder: str) -> None:
    os.environ[DEVICE_TIER] = "1"
    epochs = []
    with (
        dlio.open(folder, tiers="gpu:8MiB:decoded,ram:64MiB", image_size=48) as data,
        dlio.DataLoader(data, 16, shuffle=True, device="cpu", num_workers=1) as loader,
    ):
        for _ in range(3):
            samples: list[int] = []
            for _ in loader:
                samples += loader.last_samples.tolist()
            epochs.append([len(samples), loader.stats()["decoded"]])
        assert data.mounted is not None
        tier = data.mounted.on_device(torch.device("cpu"))
        assert tier is not None
        kept = np.flatnonzero(tier.find(np.arange(len(data)))[:, 0] >= 0).tolist()
    print(json.dumps({"rank": world().rank, "epochs": epochs, "kept": kept}))


if __name__ == "__main__":
    main(sys.argv[1])
