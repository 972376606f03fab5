"""A rank that consumes an epoch of compressed arrays, half of them a peer's; prints a JSON line."""

import json
import sys

import numpy as np

import dlio


def main(source: str) -> None:
    samples: list[int] = []
    right = True
    with (
        dlio.open(source, tiers="ram:64MiB") as data,
        dlio.DataLoader(data, 8, shuffle=True, mode="global", pretend_nodes=2) as loader,
    ):
        for batch in loader:
            (values,) = batch.values()
            first = values.numpy()[:, 0]
            right &= bool((values.numpy() == first[:, None] + np.repeat(np.arange(50), 40)).all())
            samples += (first // 50).tolist()
        stats = loader.stats()
    reports = {"samples": samples, "right": right, "sent": stats["sent"], "late": stats["late"]}
    print(json.dumps({**reports, "peer": stats["bytes"]["peer"]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
