"""Pictures and labels that measure an exported model, in memory."""

from dataclasses import dataclass

import numpy as np
import torch

from dlio.errors import UsageError
from dlio.loader.dataset import open_dataset
from dlio.util.units import counted


@dataclass(frozen=True, slots=True, eq=False)
class LabelledPictures:
    """Labelled pictures, cropped to their middle as `dlio train` evaluates."""

    images: torch.Tensor
    """uint8 (n, 3, image_size, image_size)."""
    labels: torch.Tensor
    """int64 (n,)."""
    names: tuple[str, ...]
    """Class names; labels index them. May be empty."""

    def __len__(self) -> int:
        return len(self.labels)

    def accuracy(self, logits: torch.Tensor) -> float:
        """Share of right answers, 0 to 1, of logits (n, classes)."""
        return float((logits.argmax(1) == self.labels).double().mean())


def read_pictures(
    option: str, path: str, classes: int, image_size: int, count: int
) -> LabelledPictures:
    """Read `count` pictures of a data set, chosen at random and the same ones each time.

    All are read if the data set has fewer. `option` is the option that names `path`, for errors.

    Raises UsageError if the data set has other classes than the model or no labelled pictures,
    SourceError and DecodeError if it cannot be read.
    """
    with open_dataset(path, tiers="none", image_size=image_size, train=False) as data:
        if not data.has_classes:
            raise UsageError(f"{option} {path}: give labelled pictures, such as class folders")
        labels = np.asarray(data.reader.labels, np.int64)
        there = len(data.classes) or int(labels.max()) + 1
        if there != classes:
            raise UsageError(
                f"{option} {path}: it has {counted(there, 'class')}, the model has {classes}: give "
                "data of the classes that it was trained on"
            )
        drawn = np.random.default_rng(0).permutation(len(data))[:count]
        chosen = sorted(int(each) for each in drawn)
        images = torch.empty(len(chosen), 3, image_size, image_size, dtype=torch.uint8)
        for place, index in enumerate(chosen):
            images[place] = data[index][0]
        return LabelledPictures(images, torch.from_numpy(labels[chosen]), tuple(data.classes))
