"""A network that is pruned while it trains; the script asks for pruning and ignores ranks."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlio
from dlio.features.pruning import Schedule

torch.manual_seed(3)
inputs = torch.randn(480, 8)
labels = (inputs @ torch.randn(8, 3)).argmax(1)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
apoptosis = dlio.Apoptosis(
    model,
    optimizer,
    example=inputs[:2],
    steps=4 * len(loader),
    schedule=Schedule(every=2, looks=4, tolerance=5.0, allowed=2.0, share=0.125),
    probe=lambda model: criterion(model(inputs[:200]), labels[:200]),
)
for epoch in range(4):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        apoptosis.step()
    model.eval()
    with torch.no_grad():
        right = (model(inputs).argmax(1) == labels).sum().item()
    widths = [layer.out_features for layer in model if isinstance(layer, nn.Linear)]
    print(f"epoch {epoch}: widths {widths}, {right / len(inputs):.3f} right")
apoptosis.close()
assert apoptosis.layout.version > 1
torch.save(model.state_dict(), sys.argv[1])
