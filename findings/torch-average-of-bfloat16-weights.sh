#!/bin/sh
# torch 2.13.0: the moving average (AveragedModel, get_ema_multi_avg_fn(0.999)) of bfloat16 weights that
# go from 1 to 2 is still 1 after 20,000 steps; of float32 weights it is 2.
#
# The average has the weights' type. A step moves it by a thousandth of the distance, which is less than
# half of the distance of two neighbours in bfloat16 (1/128 at 1), so that each step is rounded away.
# The averaged model that is evaluated is the one of the first step, and nothing warns.
# Way out: average a float32 copy of the model.
#
# Output seen:
#   after 20,000 steps: float32 2.000, bfloat16 1.000
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

assert torch.__version__.startswith("2.13.0"), torch.__version__


def average(dtype):
    model = torch.nn.Linear(1, 1, bias=False).to(dtype).requires_grad_(False)
    model.weight.fill_(1.0)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    averaged.update_parameters(model)
    model.weight.fill_(2.0)
    for _ in range(20_000):
        averaged.update_parameters(model)
    return averaged.module.weight.item()


whole, half = average(torch.float32), average(torch.bfloat16)
print(f"after 20,000 steps: float32 {whole:.3f}, bfloat16 {half:.3f}")
assert whole > 1.999
assert half == 1.0
PYTHON
