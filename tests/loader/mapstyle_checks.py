"""Epochs of several ranks over a user's map-style data set; run under mpirun.

Each call of the data set is noted in a file of its rank. Prints one JSON line per rank.
"""

import json
import os
import sys
from typing import Any

import torch

import dlio
from dlio.comm import world

N = 203


class Noting(torch.utils.data.Dataset[Any]):
    """Samples that are a function of the index, which notes its calls."""

    def __init__(self, folder: str, varying: bool) -> None:
        self.varying = varying
        # One write of a few bytes that is appended is not torn.
        self.file = os.open(
            os.path.join(folder, f"calls.{world().rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        os.write(self.file, f"{index}\n".encode())
        if self.varying:
            return f"sample {index} " * (1 + index % 50), index
        return torch.full((20,), float(index)), index


def main(folder: str, varying: str, tiers: str, mode: str, nodes: str, leave: str) -> None:
    data = Noting(folder, varying == "varying")
    epochs: list[list[int]] = []
    with dlio.DataLoader(
        data,
        4,
        shuffle=True,
        tiers=tiers,
        mode=mode,
        pretend_nodes=int(nodes),
        collate_fn=list,
        num_workers=2,
    ) as loader:
        if leave == "leave":
            for step, _ in enumerate(loader):
                if step == 2:
                    break
        for epoch in range(2):
            loader.set_epoch(epoch)
            seen: list[int] = []
            for batch in loader:
                for value, number in batch:
                    if data.varying:
                        assert value == f"sample {number} " * (1 + int(number) % 50)
                    else:
                        assert value.tolist() == [float(number)] * 20
                    seen.append(int(number))
            epochs.append(seen)
        peers = loader.stats()["bytes"]["peer"]
    print(json.dumps({"rank": world().rank, "epochs": epochs, "peers": peers}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
