#!/bin/sh
# webdataset 1.0.2 with torch 2.13.0: `shardshuffle=` shuffles the shards once: all epochs have the
# same order of shards. With `detshuffle=True` they have others, but not in torch's workers, which
# begin at epoch 0 again unless `persistent_workers=True` is given.
#
# Output seen (epochs with different orders, of 4):
#   shardshuffle=6: no workers 1, workers 1, persistent workers 1
#   shardshuffle=6, detshuffle=True: no workers 4, workers 1, persistent workers 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0 webdataset==1.0.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
import webdataset

assert version("webdataset") == "1.0.2"
assert torch.__version__.startswith("2.13.0"), torch.__version__
places = [f"{sys.argv[1]}/{shard}.tar" for shard in range(6)]
for shard, place in enumerate(places):
    with webdataset.TarWriter(place) as tar:
        tar.write({"__key__": str(shard), "txt": str(shard)})


def orders(workers: int, persistent: bool, **options: bool) -> int:
    data = webdataset.WebDataset(places, shardshuffle=6, seed=3, **options)
    loader = torch.utils.data.DataLoader(
        data.decode().to_tuple("txt"),
        batch_size=None,
        num_workers=workers,
        persistent_workers=persistent,
    )
    epochs = [tuple(text for (text,) in loader) for _ in range(4)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    return len(set(epochs))


for options, expected in (({}, (1, 1, 1)), ({"detshuffle": True}, (4, 1, 4))):
    seen = tuple(orders(*each, **options) for each in ((0, False), (1, False), (1, True)))
    words = ", detshuffle=True" if options else ""
    print(
        f"shardshuffle=6{words}: no workers {seen[0]}, workers {seen[1]}, "
        f"persistent workers {seen[2]}"
    )
    assert seen == expected
PYTHON
