#!/bin/sh
# torchmetrics 1.9.0: after a day of steps, the mean of numbers that are all 0.7 is 0.694.
#
# `MeanMetric` adds value x weight in float32. With 1,024 samples in a batch and ten steps a second, the
# sum is 6 x 10^8 after 864,000 steps, where neighbouring numbers are 64 apart: 716.8 is added as 704.
# The weights, powers of two, are still added without an error, so nothing balances it. Numbers that
# vary round up and down and lose less; those that stay, such as a rate or a converged accuracy, drift.
# `MeanMetric().set_dtype(torch.float64)` is right. The script takes a minute or two.
#
# Output seen:
#   after 10,000 steps 0.70006, 100,000 0.69968, 400,000 0.70122, 864,000 0.69385; in float64 0.70000
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.13.0 torchmetrics==1.9.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torchmetrics

assert torchmetrics.__version__ == "1.9.0", torchmetrics.__version__
mean, exact = torchmetrics.MeanMetric(), torchmetrics.MeanMetric().set_dtype(torch.float64)
value, weight = torch.tensor(0.7), torch.tensor(1024.0)
wide = torch.tensor(0.7, dtype=torch.float64)
means = {}
for step in range(1, 864_001):
    mean.update(value, weight)
    exact.update(wide, weight)
    if step in (10_000, 100_000, 400_000, 864_000):
        means[step] = float(mean.compute())
told = ", ".join(f"{step:,}{' steps' if step == 10_000 else ''} {each:.5f}" for step, each in means.items())
print(f"after {told}; in float64 {float(exact.compute()):.5f}")
assert abs(float(exact.compute()) - 0.7) < 1e-6
assert 0.6935 < means[864_000] < 0.6945, means
PYTHON
