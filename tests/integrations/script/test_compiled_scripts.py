"""Scripts that compile their networks, by `torch.compile` or TorchScript, train as one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dlio.integrations.script.compiled_calls import around_compile

_SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

way, options = sys.argv[1], {"backend": "aot_eager", "fullgraph": True}

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(8, 16), nn.Dropout(0.0)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = self.drop(torch.relu(self.first(x)))
        return self.last(functional.dropout(x, 0.0, self.training))

torch.manual_seed(0)
model = Network()
inputs = torch.randn(50, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

def loss_of(x, y):
    return functional.mse_loss(net(x), y)

net = model
if way == "module":
    net = torch.compile(model, **options)
elif way == "in place":
    model.compile(**options)
elif way == "function":
    loss_of = torch.compile(loss_of, **options)
elif way == "script":
    net = torch.jit.script(model)
for epoch in range(2):
    for x, y in DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(epoch)):
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if way == "script":
    net.save("net.pt")
    net = torch.jit.load("net.pt")
print([f"{each:.5f}" for each in net(inputs[:4]).flatten().tolist()])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["module", "in place", "function", "script"])
def test_compiled_networks_train_as_in_one_process(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    printed = []
    for start in (["script.py"], ["-m", "dlio.cli", "run", "-n", "2", "script.py"]):
        done = subprocess.run(
            [sys.executable, *start, way],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append([float(x) for x in re.findall(r"-?\d\.\d+", done.stdout)])
    assert len(printed[0]) == 4
    assert printed[1] == pytest.approx(printed[0], abs=2e-5)


def test_a_network_that_is_compiled_in_name_only_is_looked_at_further() -> None:
    calls: list[str] = []

    def known() -> None:
        calls.append("compiles")

    compiled = around_compile(torch.compile, known, lambda *_: None, lambda call: call)
    assert compiled(nn.Linear(2, 2), disable=True)(torch.ones(1, 2)).shape == (1, 2)
    assert calls == []
    compiled(nn.Linear(2, 2), backend="eager")
    assert calls == ["compiles"]
