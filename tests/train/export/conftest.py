"""A small residual network, trained for seconds on drawn pictures."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from dlio.train.export.pictures import Pictures, read_pictures
from dlio.train.model import make_model, normalised

CLASSES = 4
SIZE = 32
MODEL = "resnet(width=8)"


@dataclass(frozen=True)
class Trained:
    """Files of a trained network, and its data."""

    weights: Path
    train: Path
    val: Path
    module: nn.Module
    held_out: Pictures

    def options(self, output: Path, **more: object) -> dict[str, object]:
        """Options of an export with checks."""
        given = {
            "weights": str(self.weights),
            "output": str(output),
            "model": MODEL,
            "image_size": SIZE,
            "check": str(self.val),
        }
        return {**given, **more}


@pytest.fixture(scope="session")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    data = read_pictures("--calibrate", str(pictures / "train"), CLASSES, SIZE, 1000)
    torch.manual_seed(0)
    model = make_model(MODEL, CLASSES, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(25):
        for chosen in torch.randperm(len(data)).split(32):
            logits = model(normalised(data.images[chosen], torch.device("cpu")))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, data.labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(model.state_dict(), path)
    held_out = read_pictures("--check", str(pictures / "val"), CLASSES, SIZE, 1000)
    return Trained(path, pictures / "train", pictures / "val", model.eval(), held_out)
