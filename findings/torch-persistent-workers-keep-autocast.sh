#!/bin/sh
# torch 2.13.0: persistent workers of a DataLoader keep the modes of the thread that began the first
# pass. A first pass in `torch.autocast` (a sanity check of the validation, for example) makes all
# later ones compute products in bfloat16 and in `torch.no_grad()`, outside of both blocks.
#
# Modes are local to a thread, a fork copies the forking one's, and persistent workers are forked
# once. Nothing is said: types of what is returned are those of the data set's own code, which may
# well convert the rounded products to float32. The other way round, workers that have begun
# outside of a block do not follow it. Workers that are not persistent follow each pass.
#
# Output seen (product's type, gradients recorded; in the block, then after it):
#   persistent: bfloat16, False; then bfloat16, False
#   made anew: bfloat16, False; then float32, True
#   persistent, begun outside: float32, True; in a block float32, True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.utils.data import DataLoader, Dataset

assert torch.__version__.startswith("2.13.0"), torch.__version__


class Products(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[str, bool]:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return str(product.dtype).removeprefix("torch."), torch.is_grad_enabled()


def loader(persistent: bool) -> DataLoader:
    return DataLoader(
        Products(), batch_size=None, num_workers=1, persistent_workers=persistent
    )


def seen(batches: DataLoader) -> str:
    (sample,) = batches
    return ", ".join(map(str, sample))


results = []
for persistent, name in ((True, "persistent"), (False, "made anew")):
    batches = loader(persistent)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = seen(batches)
    results.append(f"{name}: {first}; then {seen(batches)}")
batches = loader(True)
outside = seen(batches)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    inside = seen(batches)
results.append(f"persistent, begun outside: {outside}; in a block {inside}")
print("\n".join(results), flush=True)
assert results == [
    "persistent: bfloat16, False; then bfloat16, False",
    "made anew: bfloat16, False; then float32, True",
    "persistent, begun outside: float32, True; in a block float32, True",
], results
PYTHON
