"""A hand-written loop with `dlio.distribute`: counts how often each sample is in a gradient.

`loop.py FOLDER MODE`, run by MPI. `ENDS='{"1": 3}'` kills rank 1 before its third backward pass;
with `HOW=hang` it computes for ever instead.
Each rank prints one JSON line an epoch, of how often it saw each sample in the weights.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dlio

EPOCHS = 3
RANK = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]


def main() -> None:
    """Train on the positions of samples: sample i moves weight i alone."""
    folder, mode = sys.argv[1:]
    end = json.loads(os.environ["ENDS"]).get(RANK, 0)
    with dlio.open(folder, tiers="ram:64MiB", image_size=32) as data:
        model = nn.Embedding(len(data), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        nodes = 2 if mode == "nodes" else None
        samples: Any = list(range(len(data))) if mode == "list" else data
        passes = 0
        with (
            dlio.distribute(model, optimizer),
            dlio.DataLoader(samples, 4, True, seed=1, pretend_nodes=nodes) as loader,
        ):
            for epoch in range(EPOCHS):
                counts = torch.zeros(len(data), dtype=torch.int64)
                steps = 0
                for batch in loader:
                    passes += 1
                    while passes == end and os.environ.get("HOW") == "hang":
                        pass
                    if passes == end:
                        os.kill(os.getpid(), signal.SIGKILL)
                    before = model.weight.detach().clone()
                    optimizer.zero_grad()
                    seen = batch if mode == "list" else torch.from_numpy(loader.last_samples)
                    model(seen).sum().div(max(1, len(seen))).backward()
                    optimizer.step()
                    counts += (model.weight.detach() != before)[:, 0]
                    steps += 1
                line = {"epoch": epoch, "counts": sorted(set(counts.tolist())), "steps": steps}
                print(json.dumps({**line, "planned": len(loader)}), flush=True)
    Path(f"ended-{RANK}").touch()


if __name__ == "__main__":
    main()
