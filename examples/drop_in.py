"""Train a small network in a plain loop, with dlio.DataLoader in place of torch's.

python examples/drop_in.py pictures
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio

folder = sys.argv[1]
torch.manual_seed(0)
with (
    dlio.open(f"{folder}/train", tiers="ram:256MiB", image_size=32) as data,
    dlio.DataLoader(data, batch_size=16, shuffle=True, num_workers=2) as loader,
):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, len(data.classes)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(loader.diagnosis())
