#!/bin/sh
# h5py 3.16.0 (HDF5 inside its wheel): a virtual data set of more files than a process may open is
# read as zeros from the file on that cannot be opened, without an error.
#
# HDF5 takes a source file that it cannot open for one that does not exist yet, and gives its rows the
# fill value: also where the limit of open files (`ulimit -n`, 1,024 on many systems, which sockets
# and worker pipes count for, too) is reached. One slice over 300 files under a limit of 100 has 205
# rows of zeros; row by row, HDF5 closes the files in between, and all rows are right. So a copy into
# RAM at the start is wrong, and a spot check is not. A source file that is damaged raises.
# Way out: read the files themselves, or raise the limit, and choose a fill value that no row has.
#
# Output seen:
#   limit of 1024: 0 rows of zeros; limit of 100: 205 rows of zeros; row by row: 0
#   a damaged file: OSError
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 h5py==3.16.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import resource
from pathlib import Path

import h5py
import numpy as np

assert h5py.__version__ == "3.16.0", h5py.__version__
layout = h5py.VirtualLayout((300,), "f8")
for k in range(300):
    with h5py.File(f"{k}.h5", "w") as file:
        file["x"] = [k + 1.0]
    layout[k] = h5py.VirtualSource(f"{k}.h5", "x", (1,))
with h5py.File("all.h5", "w", libver="latest") as file:
    file.create_virtual_dataset("x", layout, fillvalue=0)


def zeros(limit, one_by_one=False):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with h5py.File("all.h5") as file:
        rows = [file["x"][k] for k in range(300)] if one_by_one else file["x"][:]
    return int((np.array(rows) == 0).sum())


enough, few, single = zeros(1024), zeros(100), zeros(100, one_by_one=True)
print(f"limit of 1024: {enough} rows of zeros; limit of 100: {few} rows of zeros; row by row: {single}")
assert enough == single == 0
assert 200 <= few <= 210, few
Path("5.h5").write_bytes(Path("5.h5").read_bytes()[:300])
try:
    zeros(1024)
except OSError as error:
    print(f"a damaged file: {type(error).__name__}")
else:
    raise AssertionError("a damaged file is read")
PYTHON
