#!/bin/sh
# h5py 3.16.0: variable-length numbers in big-endian order are written right and read wrong.
#
# HDF5 files from other machines and instruments hold big-endian numbers, and for data sets of fixed
# size NumPy's ">i4" carries that through. In one of variable length, h5py converts what is written to
# the type of the file, but returns the elements' bytes as they are, labelled as native ones: 1 is read
# as 16777216, and nothing is raised. Reading them with `.view(">i4")` gives the numbers.
#
# Output seen:
#   written [1 2 3], read [16777216 33554432 50331648] of type int32, with .view('>i4') [1 2 3]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 h5py==3.16.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import h5py
import numpy as np

assert h5py.version.version == "3.16.0", h5py.version.version
numbers = np.array([1, 2, 3], np.int32)
with h5py.File("numbers.h5", "w") as file:
    file.create_dataset("fixed", data=numbers.astype(">i4"))
    file.create_dataset("ragged", (1,), dtype=h5py.vlen_dtype(np.dtype(">i4")))[0] = numbers
with h5py.File("numbers.h5") as file:
    fixed, ragged = file["fixed"][:], file["ragged"][0]
    kept = h5py.check_vlen_dtype(file["ragged"].dtype)
print(f"written {numbers}, read {ragged} of type {ragged.dtype}, with .view('>i4') {ragged.view('>i4')}")
assert kept == np.dtype(">i4"), kept
assert fixed.tolist() == [1, 2, 3]
assert ragged.dtype == np.dtype("<i4"), ragged.dtype
assert ragged.tolist() == [1 << 24, 2 << 24, 3 << 24], ragged
assert ragged.view(">i4").tolist() == [1, 2, 3]
PYTHON
