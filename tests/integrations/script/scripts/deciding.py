"""Decisions by losses and metrics: a schedule, the best checkpoint, an early stop, L-BFGS."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(66, 6)
targets = inputs @ torch.randn(6, 1) + 0.5 * torch.randn(66, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=11, shuffle=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
best, bad, rates, kept = float("inf"), 0, [], None
for _ in range(30):
    total = count = 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        penalty = 0.01 * model.weight.square().sum()
        whole = loss + penalty
        optimizer.zero_grad()
        (whole / 2).backward()
        optimizer.step()
        total += whole.item() * len(x)
        count += len(x)
    schedule.step(total / count)
    rates.append(optimizer.param_groups[0]["lr"])
    if total / count < best - 1e-4:
        best, bad = total / count, 0
        torch.save(model.state_dict(), sys.argv[1] + ".best")
        kept = torch.load(sys.argv[1] + ".best")
    else:
        bad += 1
    if bad == 4:
        break
last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
# From fresh weights, which are the same on ranks: from trained ones, which differ by rounding, one
# process's searches, too, end up to 1e-4 apart.
model = nn.Linear(6, 1)
lbfgs = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=60)


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


# Its weights would differ as much as one process's do when a sum is in another order.
(x, y), *_ = DataLoader(TensorDataset(inputs, targets), batch_size=66)
lbfgs.step(closure)
with torch.no_grad():
    least = nn.functional.mse_loss(model(inputs), targets)
torch.save(
    {
        "last": last,
        "best": kept,
        "rates": torch.tensor(rates),
        "least": least,
        "searched": model.state_dict(),
    },
    sys.argv[1],
)
