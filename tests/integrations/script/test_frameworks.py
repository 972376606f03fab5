"""Frameworks in a script see one process, whatever started it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import pytest
import torch

import dlio
from dlio.comm.launch_detection import hidden_launch, show_launch, torchrun_place
from dlio.integrations.script.script_losses import losses_of
from dlio.integrations.script.share import SharingLoader


def _run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "dlio.cli", "run", "-n", "2", str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    )


def test_a_script_does_not_see_that_it_is_one_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with hidden_launch():
        assert "RANK" not in os.environ
        assert "WORLD_SIZE" not in os.environ
        assert torchrun_place() == (1, 2)
        show_launch()
        assert os.environ["RANK"] == "1"
    with hidden_launch():
        pass
    assert {name: os.environ[name] for name in place} == place


def test_losses_of_frameworks_between_the_script_and_its_backward_count() -> None:
    def divided(loss: torch.Tensor) -> tuple[torch.Tensor, Sequence[FrameType]]:
        part = loss / 2
        return part, [sys._getframe(0), sys._getframe(1)]

    given = torch.ones(3, requires_grad=True).sum()
    root, frames = divided(given)
    losses = losses_of(root, frames, 4)
    assert losses[0] is root
    assert any(each is given for each in losses[1:])
    assert len(losses) == 2  # Each once, in however many frames it is.


def test_frameworks_take_loaders_of_dlio_for_torchs_in_a_script() -> None:
    # What `isinstance(loader, torch.utils.data.DataLoader)` asks while `dlio run` runs a script.
    class Own(SharingLoader[int]):
        pass

    data = torch.utils.data.TensorDataset(torch.zeros(1))
    loader, torchs = dlio.DataLoader(data), torch.utils.data.DataLoader(data)
    assert isinstance(loader, SharingLoader)
    assert not isinstance(loader, Own)
    assert not isinstance(torchs, dlio.DataLoader)
    assert issubclass(Own, SharingLoader)
    assert not issubclass(SharingLoader, Own)


@pytest.mark.mpi
def test_frameworks_run_as_in_one_process(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
    assert name not in os.environ, name
sys.stdout.reconfigure(line_buffering=True)
os.fstat(sys.stdout.fileno())

class Loader(DataLoader[tuple[torch.Tensor, ...]]):
    pass

writer = SummaryWriter("log")
writer._get_file_writer().add_summary(writer.file_writer and __import__(
    "torch.utils.tensorboard.summary", fromlist=["scalar"]).scalar("x", 1.0))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
data = TensorDataset(torch.randn(32, 4))
total = torch.zeros(())
for epoch in range(2):
    for (x,) in Loader(data, batch_size=8):
        out = model(x)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print("norm", norm.item(), "total", total.item())  # WHOLE
        print("positive", (out > 0).sum().item())  # PART
""",
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "script.py").read_text().splitlines()
    number = {
        word: next(k for k, line in enumerate(lines, 1) if line.endswith(f"# {word}"))
        for word in ("WHOLE", "PART")
    }
    assert f"script.py:{number['PART']}: numbers" in done.stderr
    assert f"script.py:{number['WHOLE']}" not in done.stderr
    assert done.stdout.count("norm") == 8


@pytest.mark.mpi
def test_accelerate_steps_at_the_last_batch_of_an_epoch_too(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = _run(
        tmp_path,
        """
import sys, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(20, 4))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
for epoch in range(2):
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, accelerator.sync_gradients)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        f"{epoch} {steps}" for epoch in range(2) for steps in (False, True, True)
    ]


_SKIPS = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
saved = {}
for every in (1, 2):
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(38, 4), torch.randn(38, 1))
    model = torch.nn.Linear(4, 1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        rest = accelerator.skip_first_batches(loader, 2) if epoch == 1 else loader
        batches = 0
        for x, y in rest:
            with accelerator.accumulate(model):
                batches += 1
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        print(every, batches)
    saved[every] = accelerator.unwrap_model(model).weight.detach()
torch.save(saved, sys.argv[1] + ".pt")
"""


def _alone_and_on_ranks(folder: Path, script: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a script with the argument `one` in one process, and with `two` on 2 ranks."""
    (folder / "script.py").write_text(script)
    done = []
    for name, command in (("one", []), ("two", ["-m", "dlio.cli", "run", "-n", "2"])):
        done.append(
            subprocess.run(
                [sys.executable, *command, "script.py", name],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        )
        assert done[-1].returncode == 0, done[-1].stderr
    return done


@pytest.mark.mpi
def test_accelerate_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for each in _alone_and_on_ranks(tmp_path, _SKIPS):
        assert each.stdout.split() == "1 5 1 3 1 5 2 5 2 3 2 5".split()
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    for every, weight in one.items():
        assert torch.allclose(two[every], weight, atol=1e-6, rtol=0), every


_PAIRS = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.functional import cross_entropy
torch.manual_seed(3)
def data(count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
accelerator = Accelerator(cpu=True)
model, optimizer, first, second = accelerator.prepare(
    model,
    optimizer,
    DataLoader(data(38), 8, shuffle=True),
    DataLoader(data(21), 8, shuffle=True),
)
for epoch in range(2):
    model.train()
    for (a, b), (c, d) in zip(first, second):
        accelerator.backward(cross_entropy(model(a), b) + cross_entropy(model(c), d))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = []
    with torch.no_grad():
        for x, y in second:
            right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    accelerator.print(len(torch.cat(right)), int(torch.cat(right).sum()))
if accelerator.is_main_process:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1] + ".pt")
"""


@pytest.mark.mpi
def test_accelerate_joins_two_loaders_in_the_order_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    one, two = _alone_and_on_ranks(tmp_path, _PAIRS)
    assert one.stdout == two.stdout
    assert one.stdout.startswith("21 ")
    expected, got = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    for name, weight in expected.items():
        assert torch.allclose(got[name], weight, atol=1e-6, rtol=0), name


_TRAINER = """
import sys
import torch
import transformers
class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum()}
class Net(torch.nn.Module):
    main_input_name = "x"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(4, 1)
    def floating_point_ops(self, inputs, **options):
        return 2 * inputs["x"].numel()
    def forward(self, x, labels):
        out = self.layer(x)[:, 0]
        return {"loss": (out - labels).square().mean(), "logits": out}
def error(of):
    return {"error": float(abs(of.predictions - of.label_ids).mean())}
args = transformers.TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=0.05,
    use_cpu=True,
    report_to=[],
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    disable_tqdm=True,
    include_num_input_tokens_seen="all",
)
net = Net()
trainer = transformers.Trainer(
    model=net, args=args, train_dataset=Data(38), eval_dataset=Data(21), compute_metrics=error
)
loss = trainer.train().metrics["train_loss"]
metrics = trainer.evaluate()
predictions = torch.from_numpy(trainer.predict(Data(13)).predictions)
state = trainer.state
counts = [state.total_flos, state.num_input_tokens_seen]
numbers = torch.tensor([loss, metrics["eval_loss"], metrics["eval_error"], *counts])
torch.save({**net.state_dict(), "numbers": numbers, "of 13": predictions}, sys.argv[1] + ".pt")
"""


@pytest.mark.mpi
@pytest.mark.nightly
def test_trainer_trains_evaluates_and_saves_as_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    _alone_and_on_ranks(tmp_path, _TRAINER)
    expected, got = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    assert expected.keys() == got.keys()
    for name, values in expected.items():
        assert torch.allclose(got[name], values, atol=1e-5, rtol=0), name
    files = [
        sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))
        for folder in (tmp_path / "one", tmp_path / "two")
    ]
    assert files[0] == files[1]
    assert any("model.safetensors" in name for name in files[0])


@pytest.mark.mpi
def test_parameters_that_no_optimizer_has_are_told_where_they_are_distributed(
    tmp_path: Path,
) -> None:
    done = _run(
        tmp_path,
        """
import dlio, sys, torch
from dlio.comm import world
model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 1)})
def distribute(name, parameters):
    if world().rank == 0:  # Lines of several ranks come in any order.
        print(name, file=sys.stderr, flush=True)
    dlio.distribute(model, torch.optim.SGD(parameters, lr=0.1))
distribute("all", model.parameters())
distribute("head", model["head"].parameters())
model["body"].requires_grad_(False)
distribute("frozen", model["head"].parameters())
""",
    )
    assert done.returncode == 0, done.stderr
    warnings = [each for each in done.stderr.splitlines() if each.startswith("distribute: ")]
    assert len(warnings) == 1
    assert warnings[0].startswith("distribute: body.weight and 1 more parameter require gradients")
    before = done.stderr[: done.stderr.index(warnings[0])]
    assert "head" in before
    assert "frozen" not in before


_ACCELERATE = """
import os, sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather, gather_object, set_seed

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 21
    def __getitem__(self, k):
        return X[k], X[k].sum(), f"sample {k}"

set_seed(5)
X = torch.randn(21, 4)
config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y, names in loader:
        early = accelerator.gather_for_metrics(list(names))
        early += gather_object([name.upper() for name in names])
        print(*early, *[round(each, 3) for each in gather(y).tolist()])
        count, total = accelerator.gather_for_metrics(((y > 0).sum(), y.sum()))
        largest = accelerator.gather((y * 1000).int().max())
        print(count.sum().item(), round(torch.sum(total).item(), 2), largest.max().item())
        out = model(x)[:, 0]
        accelerator.backward((out - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        p, t = accelerator.gather_for_metrics((out.detach(), y))
        error = (p - t).square().mean().item()
        names = accelerator.gather_for_metrics(list(names))
        print(len(p), round(error, 4), *names)
weights = torch.nn.utils.parameters_to_vector(model.parameters())
print([round(each, 4) for each in weights.tolist()])
"""


# A sampler of the script's: Accelerate reads one batch ahead, and the pass is over at the last one.
_WEIGHTED = "sampler=torch.utils.data.WeightedRandomSampler(torch.rand(21), 21)"


@pytest.mark.mpi
@pytest.mark.parametrize("order", ["shuffle=True", _WEIGHTED], ids=["shuffled", "weighted"])
def test_accelerate_orders_and_gathers_samples_as_in_one_process(
    order: str, tmp_path: Path
) -> None:
    if find_spec("accelerate") is None:  # Imported by the scripts alone.
        pytest.skip("needs accelerate")
    on_ranks = _run(tmp_path, _ACCELERATE.replace("shuffle=True", order))
    assert on_ranks.returncode == 0, on_ranks.stderr
    assert on_ranks.stdout == _alone(tmp_path)
    assert "gather" not in on_ranks.stderr


@pytest.mark.mpi
def test_accelerate_may_be_imported_after_the_loaders_were_made(tmp_path: Path) -> None:
    if find_spec("accelerate") is None:  # Imported by the script alone.
        pytest.skip("needs accelerate")
    imports, rest = _ACCELERATE.split("class Data")
    made = "loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True)\n"
    data, use = rest.replace(made, "").split("set_seed(5)")
    script = f"import torch\nclass Data{data}{made}{imports}set_seed(5){use}"
    on_ranks = _run(tmp_path, script)
    assert on_ranks.returncode == 0, on_ranks.stderr
    assert on_ranks.stdout == _alone(tmp_path)


def _alone(folder: Path) -> str:
    """Return what the script in a folder prints in one process."""
    one = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return one.stdout


_EVALUATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(24, 3)
net = torch.nn.Linear(3, 1)
several = DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x[:16]), 8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model, optimizer, train, test = accelerator.prepare(net, optimizer, *several)
for epoch in range(2):
    for (inputs,) in train:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    gathered = []
    for (inputs,) in test:  # As Trainer does: with gradients but for the predictions.
        with torch.no_grad():
            outputs = model(inputs)
        gathered.append(accelerator.gather_for_metrics(outputs))
    print("rows", [len(each) for each in gathered])
"""


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("accelerate") is None, reason="pip install 'dlio[dev]'")
def test_rows_of_an_evaluation_that_every_rank_has_whole_are_gathered_once(tmp_path: Path) -> None:
    done = _run(tmp_path, _EVALUATED)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "rows" in line] == ["rows [8, 8]"] * 2
    assert "gather" not in done.stderr
