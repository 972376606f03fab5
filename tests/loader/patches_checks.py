"""Patches on one rank or several; run under mpirun, it prints a JSON line per rank."""

import hashlib
import json
import sys
from typing import Any

import dlio


def patches_and_state(path: str, batch: int, state: str, stop: int) -> dict[str, Any]:
    """Return digests of an epoch's patches by number, and the loader's state at step `stop`."""
    patches = {}
    with (
        dlio.open(path, patch=(7, 6, 9), patches_per_volume=48, seed=3, tiers="ram:4MiB") as data,
        dlio.DataLoader(data, batch, shuffle=True) as loader,
    ):
        if state:
            loader.load_state_dict(json.loads(state))
        for done, each in enumerate(loader, 1):
            for number, part in zip(loader.last_samples.tolist(), each["image"], strict=True):
                patches[number] = hashlib.sha1(part.numpy().tobytes()).hexdigest()
            if done == stop:
                break
        return {"patches": patches, "state": loader.state_dict()}


if __name__ == "__main__":
    path, batch, state, stop = sys.argv[1:]
    print(json.dumps(patches_and_state(path, int(batch), state, int(stop))), flush=True)
