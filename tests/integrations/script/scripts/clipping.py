"""Adam, clipping by norm, a scheduler, groups with weight decay, and a smaller last batch."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset


class Curve(Dataset):
    def __len__(self) -> int:
        return 205

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return x, (x.sin().sum(), x.cos().sum())


def collate(samples):
    xs, ys = zip(*samples, strict=True)
    return {"x": torch.stack(xs), "y": torch.stack([torch.stack(y) for y in ys])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 40)
        self.norm = torch.nn.LayerNorm(40)
        self.outer = torch.nn.Linear(40, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.norm(self.inner(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = Model()
    groups = [{"params": model.norm.parameters(), "weight_decay": 0.0}]
    rest = [*model.inner.parameters(), *model.outer.parameters()]
    optimizer = torch.optim.AdamW([{"params": rest}, *groups], lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 22)
    loader = DataLoader(Curve(), 20, shuffle=True, collate_fn=collate, num_workers=1)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad(set_to_none=False)
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main()
