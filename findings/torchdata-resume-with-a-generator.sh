#!/bin/sh
# torchdata 0.11.0 with torch 2.13.0: with `generator=` and without workers, a StatefulDataLoader that
# was resumed ends its epoch rightly, and then shuffles all later epochs otherwise than an
# uninterrupted run.
#
# In one process the loader and its sampler draw from the same generator, in another order after
# `load_state_dict` than before. Nothing is lost within an epoch, so that tests of a resumed epoch
# pass; a run that must be the same after an interruption is not, from the next epoch on. With one
# worker or more, or without `generator=`, the orders agree.
#
# Output seen (an epoch's number in the uninterrupted run, none for an order that it never had):
#   0 workers: resumed in epoch 1: 1 none none; after epoch 1: none none none
#   1 workers: resumed in epoch 1: 1 2 3; after epoch 1: 2 3 4
#   2 workers: resumed in epoch 1: 1 2 3; after epoch 1: 2 3 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0 torchdata==0.11.0
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

assert version("torchdata") == "0.11.0"
assert torch.__version__.startswith("2.13.0"), torch.__version__


def loader(workers: int) -> StatefulDataLoader:
    generator = torch.Generator().manual_seed(7)
    samples = list(range(20))
    return StatefulDataLoader(
        samples, batch_size=4, shuffle=True, num_workers=workers, generator=generator
    )


def order(batches) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


for workers in (0, 1, 2):
    whole = loader(workers)
    orders = [order(whole) for _ in range(6)]
    seen = []
    for batches in (2, None):
        stopped = loader(workers)
        if batches is None:
            order(stopped)
            begun = []
        else:
            iterator = iter(stopped)
            begun = order(next(iterator) for _ in range(batches))
        resumed = loader(workers)
        resumed.load_state_dict(stopped.state_dict())
        epochs = [order(resumed) for _ in range(3)]
        epochs[0] = begun + epochs[0]
        assert all(sorted(each) == list(range(20)) for each in epochs)
        seen.append([orders.index(each) + 1 if each in orders else "none" for each in epochs])
    print(
        f"{workers} workers: resumed in epoch 1: {' '.join(map(str, seen[0]))}; "
        f"after epoch 1: {' '.join(map(str, seen[1]))}",
        flush=True,
    )
    expected = [[1, 2, 3], [2, 3, 4]] if workers else [[1, "none", "none"], ["none"] * 3]
    assert seen == expected, seen
PYTHON
