#!/bin/sh
# datasets 5.2.0: the epoch of a shuffled IterableDataset is forgotten by all that is derived from it:
# after `data.set_epoch(1)`, `split_dataset_by_node(data, rank, world)` has the order of epoch 0.
#
# A loop that sets the epoch and then takes this rank's part, or maps, trains on one order in all
# epochs. Nothing is said, and each epoch still has every sample once. Call `set_epoch` on what is
# iterated over.
#
# Output seen:
#   map: set before: the same order, set after: another one
#   take: set before: the same order, set after: another one
#   with_format: set before: the same order, set after: another one
#   split_dataset_by_node: set before: the same order, set after: another one
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check datasets==5.2.0
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import datasets
from datasets.distributed import split_dataset_by_node

assert datasets.__version__ == "5.2.0", datasets.__version__


def samples(shards):
    for shard in shards:
        for row in range(4):
            yield {"x": 10 * shard + row}


DERIVED = {
    "map": lambda data: data.map(lambda row: row),
    "take": lambda data: data.take(24),
    "with_format": lambda data: data.with_format("numpy"),
    "split_dataset_by_node": lambda data: split_dataset_by_node(data, rank=0, world_size=1),
}
NAMES = {True: "the same order", False: "another one"}


def order(derive, epoch: int, is_set_first: bool) -> list[int]:
    shards = {"shards": list(range(6))}
    data = datasets.IterableDataset.from_generator(samples, gen_kwargs=shards)
    data = data.shuffle(seed=0, buffer_size=4)
    if is_set_first:
        data.set_epoch(epoch)
    data = derive(data)
    if not is_set_first:
        data.set_epoch(epoch)
    return [int(row["x"]) for row in data]


for name, derive in DERIVED.items():
    same = {first: order(derive, 0, first) == order(derive, 1, first) for first in (True, False)}
    print(f"{name}: set before: {NAMES[same[True]]}, set after: {NAMES[same[False]]}")
    assert same == {True: True, False: False}
PYTHON
