"""Train on many ranks: the loop of drop_in.py with one more line.

mpirun -n 2 python examples/distributed.py pictures
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
    dlio.DataLoader(data, batch_size=8, shuffle=True, num_workers=2) as loader,
):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, len(data.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with dlio.distribute(model, optimizer, exchange="allreduce+bf16"):
        for epoch in range(2):
            loader.set_epoch(epoch)
            count = 0
            for images, labels in loader:
                loss = cross_entropy(model(images.float() / 255), labels)
                optimizer.zero_grad()
                loss.backward()  # .grad becomes the mean of all ranks' gradients
                optimizer.step()
                count += len(labels)
            print(f"epoch {epoch}: this rank trained on {count} of {len(data)} samples")
