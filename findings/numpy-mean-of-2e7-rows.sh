#!/bin/sh
# numpy 2.4.6: the mean of 20,000,000 rows of float32 ones is 0.84, by mean(axis=0) of an array (rows,
# 2); of each column alone it is 1.
#
# Sums along the last axis are made of halves (pairwise); those over rows add one row after another in
# float32, and at 2^24 a 1 no longer changes the sum. Beyond that the mean and the standard deviation
# by which a table is normalised shrink with its rows, and nothing warns.
# Way out: dtype=np.float64 in mean, sum and std, or sums of chunks of rows.
#
# Output seen:
#   mean over rows: 0.839; of a column: 1.0; over rows with dtype=float64: 1.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np

assert np.__version__ == "2.4.6", np.__version__
table = np.ones((20_000_000, 2), np.float32)
rows, column = table.mean(axis=0)[0], np.ascontiguousarray(table[:, 0]).mean()
exact = table.mean(axis=0, dtype=np.float64)[0]
print(f"mean over rows: {rows:.3f}; of a column: {column:.1f}; over rows with dtype=float64: {exact:.1f}")
assert abs(rows - 2**24 / 20_000_000) < 1e-6
assert column == exact == 1
PYTHON
