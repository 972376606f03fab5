#!/bin/sh
# torch 2.13.0: to shuffle 10^8 rows, RandomSampler draws two permutations of them for each epoch and
# throws one away; before its first index there is a list of 10^8 Python numbers.
#
# `RandomSampler` yields as many whole permutations as fit into `num_samples`, and then the rest from
# one more; for a plain epoch the rest is 0, and the second permutation of all rows is drawn for
# nothing at the end. Each becomes a list: 40 bytes a row instead of 8. All of it happens in each rank
# and in each epoch, the first part before the first batch, the second one after the last.
#
# Output seen (on two busy cores; times vary):
#   10 rows: permutations of [10, 10]
#   10^8 rows: first index after 52.6 s, memory of 4.0 GB; end of the epoch after 61.9 s more
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import itertools
import os
import time

import torch
from torch.utils.data import RandomSampler

assert torch.__version__.startswith("2.13.0"), torch.__version__
randperm, drawn = torch.randperm, []


def noted(count, *arguments, **options):
    drawn.append(count)
    return randperm(count, *arguments, **options)


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


torch.randperm = noted
assert sorted(RandomSampler(range(10))) == list(range(10))
print(f"10 rows: permutations of {drawn}")
assert drawn == [10, 10], drawn
torch.randperm = randperm

rows = 100_000_000
before, began = memory(), time.perf_counter()
indices = iter(RandomSampler(range(rows)))
next(indices)
first_s, held = time.perf_counter() - began, memory() - before
count = 1 + sum(1 for _ in itertools.islice(indices, rows - 1))
began = time.perf_counter()
assert next(indices, None) is None
end_s = time.perf_counter() - began
print(
    f"10^8 rows: first index after {first_s:.1f} s, memory of {held / 1e9:.1f} GB; "
    f"end of the epoch after {end_s:.1f} s more"
)
assert count == rows
assert held > 30 * rows, held
assert end_s > first_s / 10, (first_s, end_s)
PYTHON
