"""A script as anybody writes it, for `dlio run`, whose weights name their samples; see
`named_weights`. Weight (epoch, i) moves when sample i is trained on in an epoch.
"""

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


def main() -> None:
    """Train and evaluate; write the rank's process, its steps, and each epoch's metric."""
    folder, rank = Path(os.environ["NAMED_FOLDER"]), world().rank
    torch.manual_seed(0)
    train = TensorDataset(torch.arange(SAMPLES), torch.zeros(SAMPLES))
    held_out = TensorDataset(torch.arange(HELD_OUT), torch.zeros(HELD_OUT))
    model = nn.Embedding(EPOCHS * SAMPLES, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches, others = DataLoader(train, 6, shuffle=True), DataLoader(held_out, 4)
    part = folder / f".process-{rank}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"process-{rank}")
    steps = 0
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = (model(inputs + epoch * SAMPLES)[:, 0] - targets).mean()
            loss.backward()
            optimizer.step()
            steps += 1
            with open(folder / f"steps-{rank}", "ab") as file:
                file.write(STEP.pack(steps, 1.0))
            time.sleep(float(os.environ["NAMED_PAUSE_S"]))
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for inputs, targets in others:
                total += float((model.weight.sum() * (1 + inputs) - targets).sum())
                count += len(inputs)
                time.sleep(float(os.environ["NAMED_PAUSE_S"]) / 3)
        said = {"metric": total / count, "weights": model.weight.detach()[:, 0].tolist()}
        (folder / f"epoch-{epoch}-{rank}").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
