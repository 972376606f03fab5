"""Scripts that compile their networks, by `torch.compile` or TorchScript, train as one process."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlio.integrations.script.compiled_calls import around_compile
from dlio.integrations.script.mixed_inputs import MixedInputs

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
    printed = [_printed(tmp_path, [*start, way]) for start in _STARTS]
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


_TOLD = "samples of a batch meet there"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("way", "meets"), [("apart", False), ("before", True), ("after", True)])
def test_samples_that_meet_outside_compiled_calls_are_told(
    way: str, meets: bool, backend: str
) -> None:
    model = nn.Linear(4, 3)
    net = _compiled()(model, backend=backend, fullgraph=True)
    said: list[str] = []
    watch = MixedInputs(said.append)
    for samples in (6, 5):
        x, y = torch.randn(samples, 4), torch.arange(samples) % 3
        watch.start([x, y], samples)
        try:
            losses = nn.functional.cross_entropy(
                net(x - x.mean(0) if way == "before" else x), y, reduction="none"
            )
            assert losses.requires_grad
            loss = losses * losses.detach().softmax(0) if way == "after" else losses
            torch.autograd.backward(loss.sum())
        finally:
            watch.close()
    assert any(_TOLD in each for each in said) is meets
    assert sum("inside a compiled function" in each for each in said) == 1


def test_a_script_that_is_not_compiled_by_a_variable_is_looked_at_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    centred = _compiled()(lambda x: x - x.mean(0), backend="eager")
    said: list[str] = []
    watch = MixedInputs(said.append)
    x = torch.randn(6, 4)
    watch.start([x], 6)
    try:
        nn.Linear(4, 3)(centred(x))
    finally:
        watch.close()
    assert len(said) == 1
    assert _TOLD in said[0]


def _compiled() -> Callable[..., Any]:
    return around_compile(torch.compile, lambda: None, lambda *_: None, lambda call: call)


_WHOLE_LOSS = """
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = torch.compile(functional.cross_entropy, backend="aot_eager", fullgraph=True)
for x, y in DataLoader(data, 7):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
print([f"{each:.5f}" for each in model.weight.flatten().tolist()])
"""


def test_a_loss_is_compiled_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_WHOLE_LOSS)
    alone, ranks = [_printed(tmp_path, start) for start in _STARTS]
    assert len(alone) == 12
    assert ranks == pytest.approx(alone, abs=2e-5)


_STARTS = (["script.py"], ["-m", "dlio.cli", "run", "-n", "2", "script.py"])


def _printed(folder: Path, start: list[str]) -> list[float]:
    done = subprocess.run(
        [sys.executable, *start],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"-?\d\.\d+", done.stdout)]


_DRAWING_COMPILER = """
import random
import torch
from torch.utils.data import DataLoader, TensorDataset

def backend(graph, inputs):
    for _ in range(max(len(each) for each in inputs if isinstance(each, torch.Tensor))):
        random.random()
    return graph.forward

model = torch.nn.Linear(8, 2)
net = torch.compile(model, backend=backend, dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for (x,) in DataLoader(TensorDataset(torch.randn(45, 8)), 15):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.mpi
def test_numbers_that_the_compiler_draws_are_not_the_script_s(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_DRAWING_COMPILER)
    command = [sys.executable, "-m", "dlio.cli", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "random numbers" not in done.stderr
    assert "global hooks" not in done.stderr
