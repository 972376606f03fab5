"""Patches on several ranks; run under mpirun. Prints a JSON line per rank."""

import hashlib
import json
import sys

import dlio


def main(path: str, batch: int, state: str, stop: int) -> None:
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
        print(json.dumps({"patches": patches, "state": loader.state_dict()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
