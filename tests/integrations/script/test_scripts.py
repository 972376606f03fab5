"""Unmodified scripts for one process, run on several ranks, train the same weights."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dlio.cli.option_records import RankOptions
from dlio.cli.run import CheckOptions, Script, command
from dlio.errors import UsageError
from dlio.integrations.script.run_options import RunOptions
from dlio.launch import command_ranks
from tests.conftest import MpiRun

SCRIPTS = Path(__file__).with_name("scripts")
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))


def _run(*argv: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _flat(saved: Any) -> dict[str, torch.Tensor]:
    if isinstance(saved, torch.Tensor):
        return {"": saved}
    items = saved.items() if isinstance(saved, dict) else enumerate(saved)
    return {f"{key}.{name}": t for key, value in items for name, t in _flat(value).items()}


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[dict[str, torch.Tensor], str]]:
    """Return (saved tensors, standard output) of a script when plain Python runs it, once."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def run(name: str) -> tuple[dict[str, torch.Tensor], str]:
        out = str(folder / f"{name}.pt")
        done = _run(str(SCRIPTS / f"{name}.py"), *(["--out"] if name == "clipping" else []), out)
        assert done.returncode == 0, done.stderr
        return _flat(torch.load(out)), done.stdout

    return run


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(
    "accumulation-2",
    "given_gradients-2",
    "gradient_hooks-2",
    "loader_subclasses-2",
    "loss_terms-2",
    "noise-2",
    "own_samplers-2",
    "pass_uses-2",
    "unfinished-2",
)
def test_a_script_gets_the_weights_that_one_process_gets(
    name: str,
    ranks: int,
    alone: Callable[[str], tuple[dict[str, torch.Tensor], str]],
    tmp_path: Path,
) -> None:
    out = str(tmp_path / "out.pt")
    option = ["--out"] if name == "clipping" else []
    script = str(SCRIPTS / f"{name}.py")
    done = _run("-m", "dlio.cli", "run", "-n", str(ranks), script, *option, out)
    assert done.returncode == 0, done.stderr
    expected, printed = alone(name)
    trained = _flat(torch.load(out))
    assert trained.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(trained[key], tensor, atol=1e-5, rtol=0), key
    # Rank 0 alone prints, and its figures count all held-out samples, not a rank's share.
    assert re.sub(r"\d+\.\d+", "#", done.stdout) == re.sub(r"\d+\.\d+", "#", printed)
    if name in ("plain", "pass_uses"):
        assert done.stdout == printed


@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["gossip", "hierarchical", "local-sgd(2)", "asgd", "tree"])
@pytest.mark.nightly  # By day, the next test trains with one that averages.
def test_other_exchanges_train_a_script_too(exchange: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    argv = ["-m", "dlio.cli", "run", "-n", "3", "--exchange", exchange]
    done = _run(*argv, str(SCRIPTS / "plain.py"), out)
    assert done.returncode == 0, done.stderr
    right = [int(text) for text in re.findall(r": (\d+) of 330", done.stdout)]
    assert len(right) == 2
    assert right[1] > 200


@pytest.mark.mpi
@pytest.mark.needs("balance")
def test_a_slow_rank_gets_fewer_samples_and_the_weights_stay_the_same(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
sample_s = 0.006 if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" else 0.002
torch.manual_seed(3)
inputs = torch.randn(100, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=16, shuffle=True)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        time.sleep(sample_s * len(x))
        optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""
    )
    trained = {}
    for ranks in ("1", "2"):
        out = str(tmp_path / f"{ranks}.pt")
        done = _run("-m", "dlio.cli", "run", "-n", ranks, "--balance", str(script), out)
        assert done.returncode == 0, done.stderr
        trained[ranks] = _flat(torch.load(out))
    shares = re.search(r"on each rank in the last training pass: (\d+), (\d+)", done.stderr)
    assert shares is not None
    fast, slow = map(int, shares.groups())
    assert fast + slow == 16
    assert fast > slow
    for key, tensor in trained["1"].items():
        assert torch.allclose(trained["2"][key], tensor, atol=1e-5, rtol=0), key


@pytest.mark.mpi
def test_batches_per_rank_make_fewer_steps(tmp_path: Path) -> None:
    out = str(tmp_path / "out.pt")
    argv = ["-m", "dlio.cli", "run", "-n", "2", "--batch", "per-rank"]
    script = tmp_path / "count.py"
    script.write_text(
        """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes = []
for x in DataLoader(torch.arange(50.0)[:, None], batch_size=10, shuffle=True):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    sizes.append(len(x))
print(sizes)
loader = DataLoader(torch.arange(50.0)[:, None], batch_size=10)
lengths = []
for train in (True, False, True):
    model.train(train)
    lengths.append(len(loader))
    counts = [sum(1 for _ in loader)]
    model.train(not train)
    lengths += counts + [len(loader)]
print(lengths)
"""
    )
    done = _run(*argv, str(script), out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[10, 10, 5]\n[3, 3, 3, 3, 5, 5, 5, 3, 3]\n"


@pytest.mark.mpi
def test_ranks_have_equal_weights_as_often_as_the_exchange_averages(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import copy, torch
from torch.utils.data import DataLoader
torch.manual_seed(1)
data = list(zip(torch.randn(48, 3), torch.randn(48, 1)))
model = torch.nn.Linear(3, 1)
alone = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss(net, x, y):
    return (net(x) - y).square().mean()
def tell():
    pairs = zip(model.parameters(), alone.parameters())
    print("on its own", all(torch.allclose(a, b) for a, b in pairs))
for x, y in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    loss(model, x, y).backward()
    optimizer.step()
    gradients = torch.autograd.grad(loss(alone, x, y), list(alone.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(alone.parameters(), gradients):
            parameter -= 0.1 * gradient
tell()
model.eval()
model(x)
tell()
"""
    )
    for exchange, said in (("local-sgd(100)", [True, False]), ("local-sgd(2)", [False, False])):
        done = _run("-m", "dlio.cli", "run", "-n", "2", "--exchange", exchange, str(script))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"on its own {each}" for each in said]


@pytest.mark.mpi
def test_options_without_effect_are_reported_and_impossible_ones_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""
    )
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script))
    assert done.returncode == 0
    assert "without a torch DataLoader" in done.stderr
    script.write_text("import torch.distributed as d\nd.init_process_group('gloo')\n")
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script))
    assert done.returncode == 2
    assert "is distributed already" in done.stderr
    script.write_text("raise KeyError('mine')\n")
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script))
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr


def test_a_missing_script_and_an_unknown_exchange_are_refused(tmp_path: Path) -> None:
    done = _run("-m", "dlio.cli", "run", str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path}: a folder, and no script" in done.stderr
    done = _run("-m", "dlio.cli", "run", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py: no such script" in done.stderr
    done = _run("-m", "dlio.cli", "run", "--exchange", "telepathy", "nowhere.py")
    assert done.returncode == 2
    assert "choose one of" in done.stderr


def test_a_missing_script_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_ranks, "_launch", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(UsageError, match=r"nowhere\.py: no such script"):
        command(Script("nowhere.py"), RunOptions(), CheckOptions(), RankOptions(ranks=2))


SCALED = """
import torch
torch.manual_seed(0)
x = torch.randn(64, 4)
x[::2] *= 1e4  # A rank that gets these overflows at scales that others bear.
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**122)
skipped = 0
for inputs, targets in torch.utils.data.DataLoader(data, batch_size=2):
    optimizer.zero_grad()
    scaler.scale(torch.nn.functional.l1_loss(net(inputs), targets)).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
print("skipped", skipped)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["allreduce", "gossip", "local-sgd(1)"])
@pytest.mark.daily("allreduce")
def test_steps_that_a_scaler_skips_on_one_rank_block_no_other(
    exchange: str, tmp_path: Path
) -> None:
    (tmp_path / "scaled.py").write_text(SCALED)
    command = ("-m", "dlio.cli", "run", "-n", "2", "--exchange", exchange)
    done = _run(*command, str(tmp_path / "scaled.py"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 1


@pytest.mark.mpi
def test_groups_of_parameters_do_not_hold_messages_back(tmp_path: Path) -> None:
    """Weights and biases in two groups are sent in the order in which backward computes them."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
from dlio.exchange.sums import AllreduceSum
model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(6)))
groups = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (2, 1)]
optimizer = torch.optim.SGD(groups, lr=0.1)
started, original = [], AllreduceSum.start
def start(self, region):
    started.append(len(region))
    return original(self, region)
AllreduceSum.start = start
early = []
model[0].register_full_backward_pre_hook(lambda *_: early.append(len(started)))
model(torch.ones(4, 600)).sum().backward()
optimizer.step()
print(early[0], len(started))
"""
    )
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script))
    assert done.returncode == 0, done.stderr
    early, all_of_them = map(int, done.stdout.split())
    assert all_of_them >= 5
    assert early >= all_of_them - 1


_CROPS = """
import sys
import torch, dlio
from torch.utils.data import DataLoader
torch.manual_seed(5)
loader = DataLoader(dlio.open(sys.argv[1], image_size=8, tiers="none"), 4, shuffle=True)
model = torch.nn.Linear(3 * 8 * 8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for images, labels in loader:
        made = model(images.flatten(1) / 255)
        loss = torch.nn.functional.cross_entropy(made, labels % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), sys.argv[2])
"""


@pytest.mark.mpi
def test_crops_follow_torchs_seed_on_any_number_of_ranks(pictures: Path, tmp_path: Path) -> None:
    script = tmp_path / "crops.py"
    script.write_text(_CROPS, encoding="utf-8")
    saved = []
    for ranks in ("1", "2"):
        out = str(tmp_path / f"{ranks}.pt")
        done = _run("-m", "dlio.cli", "run", "-n", ranks, str(script), str(pictures), out)
        assert done.returncode == 0, done.stderr
        saved.append(_flat(torch.load(out)))
    for key, tensor in saved[0].items():
        assert torch.allclose(tensor, saved[1][key], atol=1e-5, rtol=0), key


_SETS = """
import os
words = {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
os.write(2, f"order {list(words)}\\n".encode())
"""


@pytest.mark.mpi
@pytest.mark.cold  # A server of forked interpreters has its own order.
@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["dlio", "mpirun"])
def test_sets_of_texts_have_one_order_on_all_ranks(
    launcher: str, mpirun: MpiRun, tmp_path: Path
) -> None:
    script = tmp_path / "words.py"
    script.write_text(_SETS)
    if launcher == "dlio":
        done = _run("-m", "dlio.cli", "run", "-n", "3", str(script))
    else:
        done = mpirun(3, "-m", "dlio.cli", "run", str(script))
    assert done.returncode == 0, done.stderr
    orders = re.findall(r"order \[.*?\]", done.stderr)
    assert len(orders) == 3
    assert len(set(orders)) == 1
