#!/bin/sh
# pylance 14.0.2, torch 2.13.0: the type of an integer column's batches depends on whether that very
# batch has a missing value.
#
# `lance.torch.data.LanceDataset` converts each batch by way of NumPy, where an integer column with a
# null becomes float64 with NaN; the next batch of the same column, without a null, is int64. A loss or
# an embedding that gets the column fails on some batches only, and identifiers beyond 2^53 in a batch
# with a null are rounded: two samples get the same one.
#
# Output seen:
#   torch.float64 [9007199254740992.0, nan]; torch.int64 [3, 4]; torch.int64 [9007199254740993, 6]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0 pyarrow==26.0.1 pylance==14.0.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import lance
import pyarrow as pa
import torch
from lance.torch.data import LanceDataset

assert lance.__version__ == "14.0.2", lance.__version__
large = 2**53 + 1
lance.write_dataset(pa.table({"id": [large, None, 3, 4, large, 6]}), "rows.lance")
batches = [
    batch if isinstance(batch, torch.Tensor) else batch["id"]
    for batch in LanceDataset("rows.lance", batch_size=2)
]
print("; ".join(f"{each.dtype} {each.tolist()}" for each in batches))
assert [each.dtype for each in batches] == [torch.float64, torch.int64, torch.int64]
assert batches[0][0].item() == large - 1 and batches[2][0].item() == large
PYTHON
