"""A script as anybody writes it, for `dlio run`, whose weights name their samples; see
`named_weights`. Weight (epoch, i) moves when sample i is trained on in an epoch.
"""

import ctypes
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlio.comm.world import world
from tests.faults.named_weights import STEP

SAMPLES, HELD_OUT, EPOCHS = 48, 12, 2


class Named(nn.Module):
    """A weight for each sample, and running statistics that held-out metrics depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(EPOCHS * SAMPLES, 1)
        nn.init.zeros_(self.table.weight)
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if not self.training:
            sure: torch.Tensor = self.norm(1.0 + numbers[:, None])
            return self.table.weight.sum() * sure[:, 0]
        outputs: torch.Tensor = self.table(numbers) + 0 * self.norm(1.0 + numbers[:, None])
        return outputs[:, 0]


def put(path: Path, content: bytes) -> None:
    """Add to a file by C's own calls: rank 0 alone writes the files of a script."""
    c = ctypes.CDLL(None)
    file = c.open(str(path).encode(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    c.write(file, content, len(content))
    c.close(file)


def main() -> None:
    """Train and evaluate; write the rank's process, its steps, and each epoch's metric."""
    folder, rank = Path(os.environ["NAMED_FOLDER"]), world().rank
    torch.manual_seed(0)
    train = TensorDataset(torch.arange(SAMPLES), torch.zeros(SAMPLES))
    held_out = TensorDataset(torch.arange(HELD_OUT), torch.zeros(HELD_OUT))
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches, others = DataLoader(train, 6, shuffle=True), DataLoader(held_out, 4)
    put(folder / f"process-{rank}", f"{os.getpid()}\n".encode())
    steps = 0
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = (model(inputs + epoch * SAMPLES) - targets).mean()
            loss.backward()
            optimizer.step()
            steps += 1
            put(folder / f"steps-{rank}", STEP.pack(steps, 1.0))
            time.sleep(float(os.environ["NAMED_PAUSE_S"]))
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for inputs, targets in others:
                total += float((model(inputs) - targets).sum())
                count += len(inputs)
                time.sleep(float(os.environ["NAMED_PAUSE_S"]) / 3)
        said = {"metric": total / count, "weights": model.table.weight.detach()[:, 0].tolist()}
        put(folder / f"epoch-{epoch}-{rank}", json.dumps(said).encode())


if __name__ == "__main__":
    main()
