"""A script that ends without closing its loader; run with a kind of data set and a way to end.

Usage: ends_checks.py {dlio,plain} {break,finish} [FOLDER]
"""

import sys
from typing import Any

import torch

import dlio


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), float(index))


def main(kind: str, end: str, folder: str) -> None:
    data: Any = Numbers()
    if kind == "dlio":
        data = dlio.open(folder, image_size=64, tiers="ram:32MiB")
    loader = dlio.DataLoader(
        data, 2, shuffle=True, num_workers=2, persistent_workers=True, device="cpu"
    )
    for step, _ in enumerate(loader):
        if end == "break" and step == 1:
            break
    # The script ends here. Module globals keep the loader alive to the very end.
    globals()["kept"] = (loader, data)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
