"""Two epochs of augmented and mixed batches; run under mpirun with a folder and the samples of a
step.

Prints one JSON line per rank: a digest of each sample's pixels and probabilities in each epoch.
"""

import hashlib
import json
import random
import sys
from typing import Any

import torch

import dlio
from dlio import transforms as T  # noqa: N812 - as everybody calls them
from dlio.comm import world

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def recipe(partners: Any = "step") -> T.Compose:
    """A full recipe of training, with every kind of step that dlio does itself."""
    mixtures = [T.MixUp(alpha=0.2, partners=partners), T.CutMix(partners=partners)]
    return T.Compose(
        [
            T.RandomResizedCrop(32),
            T.RandomHorizontalFlip(),
            T.TrivialAugmentWide(),
            T.RandAugment(),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            T.GaussianBlur(3),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
            T.RandomErasing(0.5, value="random"),
            T.RandomChoice(mixtures),
        ]
    )


def several() -> T.Compose:
    """A pipeline of two crops of each picture."""
    first: list[Any] = [T.RandomResizedCrop(32, crops=2), T.RandomHorizontalFlip()]
    return T.Compose([*first, T.RandAugment(), T.Normalize(MEAN, STD), T.RandomErasing(0.5)])


def users_own(image: torch.Tensor) -> torch.Tensor:
    """A random transform that dlio knows nothing of."""
    return image.float() * random.random() + torch.rand(3, 1, 1)


def digests(loader: Any, epochs: int = 2) -> list[dict[int, str]]:
    """A digest of each sample's pixels and label, of each epoch."""
    made = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        seen = {}
        for images, labels in loader:
            samples = loader.last_samples.tolist()
            assert len(samples) == len(images) == len(labels)
            for sample, image, label in zip(samples, images, labels, strict=True):
                content = image.contiguous().numpy().tobytes() + label.numpy().tobytes()
                seen[sample] = hashlib.sha256(content).hexdigest()[:16]
        made.append(seen)
    return made


def report(folder: str, step: int) -> dict[str, list[dict[int, str]]]:
    """This rank's digests of two epochs, for some pipelines and modes."""
    batch, made = step // world().size, {}
    own = T.Compose([T.RandomResizedCrop(32), users_own])
    cases = [("recipe", recipe(), "batch", 2), ("recipe", recipe(), "global", 1)]
    cases += [("crops", several(), "batch", 2)]
    for name, transform, mode, most in [*cases, ("own", own, "batch", 2)]:
        nodes = min(most, world().size)
        with (
            dlio.open(folder, tiers="ram:8MiB", transform=transform, seed=3) as data,
            dlio.DataLoader(data, batch, True, mode=mode, pretend_nodes=nodes) as loader,
        ):
            made[f"{name} {mode}"] = digests(loader)
    return made


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]))), flush=True)
