"""A loop with `dlio.DataLoader` and `dlio.distribute`.

Prints the numbers that this rank has trained on and its weight. The argument says when the loop
itself makes torch's default group: `none`, or `before` or `after` the loader.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dlio


def main(group: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 + int(os.environ.get("RANK", "0")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if group == "before":
        torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.arange(10.0)[:, None])
    loader = dlio.DataLoader(data, batch_size=2, shuffle=True)
    if group == "after":
        torch.distributed.init_process_group("gloo")
    seen: list[int] = []
    with dlio.distribute(model, optimizer):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            if loader.batch_share is None or loader.batch_share.samples:
                seen += x.flatten().int().tolist()  # Others are repeated, and count nothing.
    print(f"{seen};{model.weight.item()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
