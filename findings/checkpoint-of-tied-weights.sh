#!/bin/sh
# torch 2.13.0: torch.distributed.checkpoint writes weights that two names share once for each name.
#
# A language model ties its embedding and its output layer; torch.save stores their memory once. A
# distributed checkpoint has it twice, for the model and again for each moment of an optimizer that is
# saved by name, so that a model whose vocabulary dominates takes up to twice the bytes and the time.
# Loading fills both: whatever is read last wins, which no check compares.
#
# Output seen:
#   weights of 4.0 MB under two names: torch.save 4.0 MB, torch.distributed.checkpoint 8.0 MB
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.13.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

assert torch.__version__.startswith("2.13.0"), torch.__version__


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 1000)
        self.output = nn.Linear(1000, 1000, bias=False)
        self.output.weight = self.embedding.weight


state = Model().state_dict()
torch.save(state, "plain.pt")
dcp.save(state, checkpoint_id="checkpoint", no_dist=True)
plain = os.path.getsize("plain.pt") / 1e6
parts = sum(each.stat().st_size for each in Path("checkpoint").iterdir()) / 1e6
print(
    f"weights of 4.0 MB under two names: torch.save {plain:.1f} MB, "
    f"torch.distributed.checkpoint {parts:.1f} MB"
)
assert len(state) == 2 and 3.9 < plain < 4.1 and 7.9 < parts < 8.2, (plain, parts)
PYTHON
