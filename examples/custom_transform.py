"""A transform of your own behind transforms that are fused with decoding.

python examples/custom_transform.py pictures
"""

import sys

import torch

import dlio
from dlio import transforms as T


class AddNoise:
    """Add noise seeded by the pixels, so that a sample is the same on every worker."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(image.sum()))
        noise = torch.randint(-8, 9, image.shape, generator=generator)
        return (image.to(torch.int16) + noise).clamp(0, 255).to(torch.uint8)


transform = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), AddNoise()])
with (
    dlio.open(f"{sys.argv[1]}/train", transform=transform, tiers="none") as data,
    dlio.DataLoader(data, batch_size=16, shuffle=True, num_workers=2) as loader,
):
    images, labels = next(iter(loader))
    print(images.dtype, tuple(images.shape), labels.tolist())
