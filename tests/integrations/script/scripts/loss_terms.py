"""Losses that are not means over samples: sums, means over tokens, several of them in one step."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES, LENGTH, BATCH = 5, 4, 7
torch.manual_seed(1)
inputs = torch.randn(33, 6)
labels = torch.randint(0, CLASSES, (33, LENGTH))
labels[torch.rand(33, LENGTH) < torch.linspace(0, 0.9, 33)[:, None]] = -100
labels[:, 0] = torch.arange(33) % CLASSES
targets = torch.randn(33, LENGTH * CLASSES)
other = TensorDataset(torch.randn(25, 6), torch.randn(25, LENGTH * CLASSES))
rarity = torch.linspace(0.2, 2.0, CLASSES)
factor = nn.Parameter(torch.zeros(()))


def tokens(out, y, **options):
    return functional.cross_entropy(out.reshape(-1, CLASSES), y.reshape(-1), **options)


def first(out, y, **options):
    return functional.cross_entropy(out[:, :CLASSES], y[:, 0], **options)


def masked(out, t, y):
    mask = (y >= 0).repeat_interleave(CLASSES, 1)
    return ((out - t).square() * mask).sum() / mask.sum()


def selected(out, t, y):
    mask = (y >= 0).repeat_interleave(CLASSES, 1)
    return (out - t)[mask].abs().mean()


def scarce(out, t, y):
    chosen = (t[:, 0] > 0).float()  # None of some parts of a batch: 0 / 0 there.
    return (first(out, y, reduction="none") * chosen).sum() / chosen.sum()


def variational(out, t, _):
    return functional.mse_loss(out, t, reduction="sum") - 0.5 * torch.sum(1 + out - out.exp())


def each(out, t):
    return [functional.mse_loss(out[k], t[k]) for k in range(len(out))]


def boxes(out, t, y):
    numbers = [int((row >= 0).sum()) for row in y]
    return sum(n * far for n, far in zip(numbers, each(out, t), strict=True)) / sum(numbers)


def counted(out, t, y):
    chosen = (t[:, 0] > 0.8).float()  # None of some parts of a batch.
    return (first(out, y, reduction="none") * chosen).sum() / max(1.0, chosen.sum().item())


def detected(out, t, y):
    numbers = [3 * int(row[0] > 0.5) for row in t]  # Of most samples, none.
    count = torch.as_tensor([sum(numbers)]).clamp(min=1).item()
    far = [(out[k, :n] - t[k, :n]).abs().sum() for k, n in enumerate(numbers)]
    return first(out, y) + sum(far) / count


def penalty(model):
    return 0.1 * sum(p.square().sum() for p in model.parameters())


LOSSES = {
    "sum": lambda out, t, y: functional.mse_loss(out, t, reduction="sum") / 50,
    "sum and constant": lambda out, t, y: functional.l1_loss(out, t, reduction="sum") / 50 + 0.5,
    "sum by samples": lambda out, t, y: functional.l1_loss(out, t, reduction="sum") / len(out),
    "sum by batch size": lambda out, t, y: first(out, y, reduction="sum") / BATCH,
    "variational": lambda out, t, y: variational(out, t, y) / len(out),
    "variational sums": lambda out, t, y: variational(out, t, y) / 100,
    "tokens": lambda out, t, y: tokens(out, y, label_smoothing=0.1),
    "classes": lambda out, t, y: first(out, y, weight=rarity),
    "two means": lambda out, t, y: tokens(out, y) + 0.5 * functional.mse_loss(out, t),
    "mean and sum": lambda out, t, y: first(out, y) + 0.01 * (out - t).abs().sum(),
    "masked": masked,
    "selected": selected,
    "scarce": scarce,
    "batchmean": lambda out, t, y: functional.kl_div(
        out.log_softmax(1), t.softmax(1), reduction="batchmean"
    ),
    "by features": lambda out, t, y: (out - t).square().mean(0).sum(),
    "vector": lambda out, t, y: first(out, y, reduction="none") / 8,
    "uncertain": lambda out, t, y: torch.exp(-factor) * tokens(out, y) + factor,
    "each sample": lambda out, t, _: sum(each(out, t)) / 10,
    "mean of each": lambda out, t, _: torch.stack(each(out, t)).mean(),
    "boxes": boxes,
    "counted": counted,
    "detected": detected,
    "summed penalty": lambda out, t, y: first(out, y, reduction="sum") / BATCH,
}


def train(name):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, LENGTH * CLASSES))
    optimizer = torch.optim.SGD([*model.parameters(), factor], lr=0.1)
    last = 0.0
    for x, t, y in DataLoader(TensorDataset(inputs, targets, labels), BATCH, shuffle=True):
        loss = LOSSES[name](model(x), t, y)
        if name == "summed penalty":
            loss = loss + penalty(model)
        optimizer.zero_grad()
        loss.backward(torch.ones_like(loss))
        optimizer.step()
        last = float(loss.detach().sum())
    print(f"{name}: {last:.4f}")
    return [p.detach() for p in model.parameters()]


def train_on_two_loaders():
    torch.manual_seed(2)
    model = nn.Linear(6, LENGTH * CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(TensorDataset(inputs, targets), 8), DataLoader(other, 5)
    for (x, t), (u, v) in zip(*loaders, strict=False):
        loss = functional.mse_loss(model(x), t) + functional.l1_loss(model(u), v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_on_two_loaders_of_tokens():
    """Parts of one loader's last batch are stand-ins on some ranks, and a pass that begins again is
    whole at first."""
    torch.manual_seed(2)
    model = nn.Linear(6, LENGTH * CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    short = DataLoader(TensorDataset(inputs[:16], targets[:16]), 4, shuffle=True)
    turns = iter(short)
    for x, _, y in DataLoader(TensorDataset(inputs, targets, labels), 8):
        try:
            u, v = next(turns)
        except StopIteration:
            turns = iter(short)
            u, v = next(turns)
        loss = tokens(model(x), y) + 0.1 * functional.l1_loss(model(u), v, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_without_modules():
    weight = nn.Parameter(torch.zeros(6, LENGTH * CLASSES))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for x, t in DataLoader(TensorDataset(inputs, targets), BATCH):
        optimizer.zero_grad()
        (x @ weight - t).square().mean().backward()
        optimizer.step()
    return [weight.detach()]


def step(model, optimizer, batch, reduction):
    x, t = batch
    loss = functional.smooth_l1_loss(model(x), t, reduction=reduction) / 50
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train_by_function():
    torch.manual_seed(2)
    model = nn.Linear(6, LENGTH * CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in DataLoader(TensorDataset(inputs, targets), 8):
            step(model, optimizer, batch, "sum")
    return [p.detach() for p in model.parameters()]


saved = {name: train(name) for name in LOSSES}
saved["two loaders"] = train_on_two_loaders()
saved["two loaders of tokens"] = train_on_two_loaders_of_tokens()
saved["no modules"] = train_without_modules()
saved["function"] = train_by_function()
torch.save(saved, sys.argv[1])
