#!/bin/sh
# torch 2.13.0: each gloo group of 16 ranks takes 19 descriptors and 3 threads of each of them, and
# destroying it gives none of them back while a variable refers to it.
#
# Meshes, sharded optimizers and wrappers make a group for each axis or purpose. A group of p ranks
# connects each rank with all others anew, so a rank of 32 has some 35 more descriptors for each one: a
# limit of 1,024, the usual one, is reached by some 28 groups, and the program then fails in an
# unrelated open. `destroy_process_group(group)` closes nothing as long as the caller's own variable
# exists; the descriptors go when it does.
#
# Output seen:
#   a group of 16 ranks: 19 descriptors and 3 threads of each rank
#   8 groups: 177 descriptors, 28 threads; destroyed: 177, 28; forgotten: 25, 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.13.0
cat > "$folder/groups.py" <<'PYTHON'
import datetime
import os
import sys

import torch
import torch.distributed as dist

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meet",
    rank=rank,
    world_size=size,
    timeout=datetime.timedelta(seconds=600),
)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


ones = torch.ones(10)
dist.all_reduce(ones)
before = held()
groups = []
for _ in range(8):
    groups.append(dist.new_group())
    dist.all_reduce(ones, group=groups[-1])
made = held()
for group in groups:
    dist.destroy_process_group(group)
destroyed = held()
del group, groups
forgotten = held()
dist.barrier()
if rank == 0:
    each = [(after - first) // 8 for after, first in zip(made, before)]
    print(f"a group of {size} ranks: {each[0]} descriptors and {each[1]} threads of each rank")
    print("8 groups: {} descriptors, {} threads".format(*made), end="; ")
    print("destroyed: {}, {}; forgotten: {}, {}".format(*destroyed, *forgotten))
    assert torch.__version__.startswith("2.13.0"), torch.__version__
    assert each == [19, 3], each
    # A connection that was being made when they were counted may be one descriptor more or less.
    assert all(abs(now - then) < 8 for now, then in zip(destroyed + forgotten, made + before))
PYTHON
export OMP_NUM_THREADS=1
for rank in $(seq 1 15); do
    timeout 900 "$folder/venv/bin/python" "$folder/groups.py" "$rank" 16 "$folder" &
done
timeout 900 "$folder/venv/bin/python" "$folder/groups.py" 0 16 "$folder"
wait
