"""Checks of compiled models on ranks: `mpirun ... compile_checks.py FOLDER`."""

import sys
from functools import partial
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters

from dlio.comm import world
from dlio.train.config import train_config
from dlio.train.trainer import train


def check_synchronised(folder: str) -> None:
    """Ranks that normalise together train alike, compiled or not; the last batch is uneven."""
    comm, losses = world(), []
    for compiled in (False, True):
        report = train(
            train_config(
                source=f"{folder}/train",
                epochs=2,
                batch_size=20,
                image_size=32,
                model="convnet(width=4)",
                batch_norm="sync",
                compile=compiled,
            )
        )
        losses.append([epoch.loss for epoch in report.epochs])
        assert all(epoch.consensus_distance == 0 for epoch in report.epochs)
        assert bool(counters["frames"]["ok"]) == compiled
    plain, compiled_ones = map(torch.tensor, losses)
    assert torch.allclose(plain, compiled_ones, atol=1e-4), losses
    assert comm.size == 2


if __name__ == "__main__":
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        check_synchronised(sys.argv[1])
    print("kept", flush=True)
