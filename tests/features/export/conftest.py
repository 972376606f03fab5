"""A small residual network, trained for seconds on pictures of stripes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from torch import nn

from dlio.features.export.check_pictures import LabelledPictures, read_pictures
from dlio.train.model import make_model, normalised
from tests.train.conftest import dlio, pictures

__all__ = ["dlio", "pictures"]

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
    held_out: LabelledPictures

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


def _draw(folder: Path, count: int, seed: int) -> None:
    """Write pictures of 4 classes: stripes along or across, red or blue, with noise."""
    random = np.random.default_rng(seed)
    waves = np.sin(np.arange(SIZE) * 0.8)
    for number in range(count):
        label = number % CLASSES
        stripes = waves[None, :] if label % 2 else waves[:, None]
        image = random.normal(90, 25, (SIZE, SIZE, 3))
        image[..., 0 if label < 2 else 2] += 60 + 50 * np.broadcast_to(stripes, (SIZE, SIZE))
        path = folder / f"class{label}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(image.clip(0, 255).astype(np.uint8)))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    stripes = tmp_path_factory.mktemp("stripes")
    _draw(stripes / "train", 96, 0)
    _draw(stripes / "val", 40, 1)
    data = read_pictures("--calibrate", str(stripes / "train"), CLASSES, SIZE, 1000)
    torch.manual_seed(0)
    model = make_model(MODEL, CLASSES, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        for chosen in torch.split(torch.randperm(len(data)), 32):
            logits = model(normalised(data.images[chosen], torch.device("cpu")))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, data.labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(model.state_dict(), path)
    held_out = read_pictures("--check", str(stripes / "val"), CLASSES, SIZE, 1000)
    return Trained(path, stripes / "train", stripes / "val", model.eval(), held_out)
