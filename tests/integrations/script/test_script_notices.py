"""Losses and metrics that cannot be one process's are told in a line that names the script's."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dlio.integrations.script import script_lines
from dlio.integrations.script.pass_use import PassMemory, loop_trains
from dlio.integrations.script.share import SharingLoader

_SCRIPT = """
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Rows(TensorDataset):
    def __getitem__(self, index):
        x, y, label = super().__getitem__(index)
        return x, y, label + 0 if label.item() else label  # A number of a sample, not of a batch.
data = Rows(torch.randn(32, 4), torch.randn(32, 4), torch.arange(32) % 2)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(loss_of):
    for x, y, label in DataLoader(data, batch_size=16):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # backward
        optimizer.step()
        yield loss, (model(x).argmax(1) == label).sum()
means = {
    "mse": functional.mse_loss,
    "sum": lambda z, y: functional.mse_loss(z, y, reduction="sum") / 100,
}
for loss_of in means.values():
    for loss, right in train(loss_of):
        print(f"{loss.item():.4f}")
for x, y, label in DataLoader(data, batch_size=15):
    out = model(x)
    first, second = functional.mse_loss(out, y, reduction="sum"), out.abs().sum()
    loss = (first + second) / 100
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f} {first.item():.3f} {second.item():.3f}")
if __import__("sys").argv[1:]:
    __import__("warnings").warn("printed once")
    __import__("logging").warning("printed once")
    for x, y, label in DataLoader(data, batch_size=16):
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item() * len(x))  # size
    for x, y, label in DataLoader(data, batch_size=16):
        mixed = torch.lerp(x, x.flip(0), 0.3)  # meet
        has_first = 2 if (x == data.tensors[0][0]).any() else 1  # condition
        loss = functional.mse_loss(model(mixed), y) * has_first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for loss, right in train(functional.mse_loss):
        print(len(loss.shape), right.item())  # right
    for loss_of in (
        lambda z, y: functional.cross_entropy(z @ y.T, torch.arange(len(z))),
        lambda z, y: functional.mse_loss(z, y).sqrt(),
    ):
        for _ in train(loss_of):
            pass
"""


def _run(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of the script, which may write files there."""
    script = next(each for each in argv if each.endswith(".py"))
    return subprocess.run(
        [sys.executable, *argv],
        cwd=os.path.dirname(script),
        capture_output=True,
        text=True,
        timeout=400,
        check=check,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.mpi
def test_losses_are_one_process_s_without_a_word_or_a_line_says_which_are_not(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    run = ("-m", "dlio.cli", "run", "-n", "2", str(script))
    silent = _run(*run)
    assert silent.stdout == _run(str(script)).stdout
    assert silent.stderr == ""
    errors = _run(*run, "more").stderr.splitlines()
    assert sum("UserWarning: printed once" in each for each in errors) == 1
    assert sum("root:printed once" in each for each in errors) == 1
    said = [each for each in errors if each.startswith("dlio")]
    line = {
        word: next(k for k, text in enumerate(_SCRIPT.splitlines(), 1) if f"# {word}" in text)
        for word in ("backward", "right", "size", "meet", "condition")
    }
    sizes = [each for each in said if f"script.py:{line['size']}: the size of a training" in each]
    assert len(sizes) == 1
    backward = f"script.py:{line['backward']}: "
    for word in ("right", "condition"):
        read = f"script.py:{line[word]}: numbers that the script reads"
        assert len([each for each in said if read in each]) == 1
    meet = f"script.py:{line['meet']}: samples of a batch meet there (flip over the batch)"
    assert len([each for each in said if meet in each]) == 1
    compares = [each for each in said if backward + "the loss compares samples" in each]
    assert len(compares) == 1
    assert "each rank sees part of a batch" in compares[0]
    assert len([each for each in said if backward + "the loss is not a mean" in each]) == 1
    assert len(said) == 6


_PARTS = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(90, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
part, rest = torch.utils.data.random_split(data, [48, 42])
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2), nn.Dropout(0.0))
frozen, teacher = nn.BatchNorm1d(6), nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen, best = [], 0.0
for epoch in range(4):
    model.train()
    for k, (x, y) in enumerate(DataLoader(part, batch_size=16)):
        frozen.eval(), teacher.eval()
        with torch.no_grad():
            soft = teacher(frozen(x)).softmax(1)
        loss = nn.functional.cross_entropy(model(x), y) + nn.functional.mse_loss(model(x), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(len(x))
        model[k].eval()
    model.eval()
    score = right = 0
    with torch.no_grad():
        for x, y in DataLoader(rest, batch_size=16):
            out = model(x)
            right += (out.argmax(1) == y).sum().item()
            score += out.double().sum().item()
    seen.append(score)
    if score > best or epoch == 0:
        best = score
        torch.save(model.state_dict(), "best.pt")
sys.stderr.write(f"seen {json.dumps(seen)}\\n")
"""


@pytest.mark.mpi
def test_parts_in_evaluation_change_no_share_and_ranks_evaluate_alike(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_PARTS)
    said = _run("-m", "dlio.cli", "run", "-n", "2", str(script)).stderr.splitlines()
    seen = (json.loads(each[5:]) for each in said if each.startswith("seen "))
    first, second = sorted(seen, reverse=True)  # Rank 0's first part has two samples more.
    scores = [[number for k, number in enumerate(each) if k % 4 == 3] for each in (first, second)]
    assert scores[0] == scores[1]
    # The first parts differ, to tell a constant of the script from the size of a part.
    assert [size for k, size in enumerate(first) if k % 4 < 3] == [10, 6, 8] * 4
    assert [size for k, size in enumerate(second) if k % 4 < 3] == [6, 10, 8] * 4


_STATES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))
    def forward(self, x):
        self.steps += 1
        return x * self.mask
class Queue(Constant):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4))
    def forward(self, x):
        self.queue = 0.9 * self.queue + 0.1 * x.detach().mean(0)
        return super().forward(x - self.queue)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
for kind in (Constant, Queue):
    model = nn.Sequential(kind(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(data, batch_size=8):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(kind.__name__, flush=True)
"""


@pytest.mark.mpi
def test_buffers_that_hold_a_rank_s_own_part_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_STATES)
    said = _run("-m", "dlio.cli", "run", "-n", "2", str(script)).stderr.splitlines()
    assert len(said) == 3
    assert "script.py:19: samples of a batch meet there (mean over the batch)" in said[0]
    assert "script.py:26: values of samples of earlier batches" in said[1]
    assert said[2].startswith("dlio run: buffer Queue.queue: the values come from each rank's part")


_SEVERAL = """
import itertools
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(36, 4), torch.randn(36, 2))
whole = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 6, False), batch_size=None)
first, second = DataLoader(data, batch_size=12), DataLoader(data, batch_size=9)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def mean(x, y):
    return (model(x) - y).square().sum() / len(x)
def add(x, y):
    return (model(x) - y).square().sum() / 100
for _ in range(2):
    for (x, y), (c, d) in zip(whole, second):
        optimizer.zero_grad()
        (mean(x, y) + mean(c, d)).backward()
        optimizer.step()
    for (x, y), (c, d) in zip(whole, second):
        optimizer.zero_grad()
        (mean(x, y) + add(c, d)).backward()  # adds
        optimizer.step()
    for (x, y), (c, d) in zip(first, itertools.cycle(second)):
        x = 0.7 * x + 0.3 * x.flip(0)  # first
        c = 0.7 * c + 0.3 * c.flip(0)  # second
        optimizer.zero_grad()
        (mean(x, y) + mean(c, d)).backward()
        optimizer.step()
"""


@pytest.mark.mpi
def test_each_loader_of_a_step_is_looked_at(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SEVERAL)
    said = _run("-m", "dlio.cli", "run", "-n", "2", str(script)).stderr
    for place, text in (
        ("adds", "the loss adds up a sum over samples there, and each rank has all samples of"),
        ("first", "samples of a batch meet there"),
        ("second", "samples of a batch meet there"),
    ):
        lines = [i for i, line in enumerate(_SEVERAL.splitlines(), 1) if f"# {place}" in line]
        assert f"script.py:{lines[0]}: {text}" in said, said
    assert said.count("the loss adds up a sum") == 1


_LOOPS = """
for x in loader:
    loss(x).backward()
    optimizer.step()
for k, x in enumerate(
    loader
):
    with autocast():
        if k < 3:
            x = augment(x)
        loss = f(x)
    scaler.scale(loss).backward()
    if k % 4 == 3:
        scaler.step(optimizer)
for x in loader:
    def closure():
        loss = f(x)
        loss.backward()
        return loss
    optimizer.step(closure)
for x in loader:
    if train:
        loss(x).backward()
        optimizer.step()
for x in loader:
    if not train:
        continue
    loss(x).backward()
    optimizer.step()
for x in loader:
    loss(x).backward()
for x in loader:
    step(x)
def update(x):
    f(x).backward()
    optimizer.step()
class Trainer:
    def learn(self, x):
        return update(x)
    def learn_or_look(self, x, train):
        if train:
            update(x)
for x in loader:
    total += trainer.learn(x).item()
for x in loader:
    trainer.learn_or_look(x, False)
for x in loader:
    learning and trainer.learn(x)
"""


def test_a_loop_trains_if_each_turn_calls_backward_and_an_optimizer_steps(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(_LOOPS)
    lines = _LOOPS.splitlines()
    heads = [k for k, text in enumerate(lines, 1) if text.startswith("for ")]
    trains = [loop_trains(str(path), k) for k in heads]
    assert trains == [True, True, True, False, False, False, False, True, False, False]
    assert loop_trains(str(path), heads[1] + 1)  # The header's line that calls `iter`.
    assert not loop_trains(str(path), heads[0] + 1)


_MEANS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def learn(x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
def passed_on(loader):
    for batch in loader:
        yield batch
total = seen = 0
if "pass" in sys.argv:
    for x, y in passed_on(DataLoader(data, batch_size=8)):
        size = x.shape[0]
        total += learn(x, y) * size
        seen += size
elif "skip" in sys.argv:
    for k, (x, y) in enumerate(DataLoader(data, batch_size=8)):
        if k == 2:
            continue
        total += learn(x, y) * len(x)
        seen += len(x)
else:
    for x, y in DataLoader(data, batch_size=8):
        total += learn(x, y) * len(x)
        seen += len(x)
print(f"{total / seen:.4f}")
"""


@pytest.mark.mpi
def test_means_are_right_or_told_to_be_about_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_MEANS)
    run = ("-m", "dlio.cli", "run", "-n", "2", str(script))
    ranks = _run(*run)
    # The ranks' parts differ in the first two batches, by which constants are known.
    assert float(ranks.stdout) == pytest.approx(float(_run(str(script)).stdout), rel=0.05)
    # A loss that is read earlier is that of rank 0's part.
    assert "whole batch once backward was called: means" in ranks.stderr
    assert "are about right; counts" in ranks.stderr
    # The loop has its batches of a generator, as of a loader that fetches one ahead.
    assert re.search(r"script\.py:2\d, script\.py:2\d: the size of", _run(*run, "pass").stderr)
    # It is not sure that each turn trains: the first batch is whole.
    assert "it began with whole batches, which count 2 times as much" in _run(*run, "skip").stderr


def test_a_pass_trains_once_an_optimizer_has_stepped_on_its_batches() -> None:
    memory, data = PassMemory(), object()
    for turn in range(4):
        use, other = (memory.begin(data, length, evaluating=False)[0] for length in (4, 5))
        use.takes()
        use.is_under_way = False
        assert use.trains == (turn in (1, 2))
        if turn == 2:
            assert "trained nothing" in (use.end() or "")
            continue
        use.backward()  # Of another loader's batch.
        use.steps()
        assert use.trains == (turn == 1)
        use.computes()
        use.backward()
        other.steps()
        use.steps()
        assert use.trains
        assert not other.trains
        assert use.end() is None


def test_batches_that_are_taken_before_the_first_is_used_train() -> None:
    memory, data = PassMemory(), object()
    for turn in range(4):
        use, said = memory.begin(data, 4, evaluating=False)
        use.takes()
        use.is_under_way = False
        assert use.trains == (turn in (1, 2))
        assert ("trained nothing" in (said or "")) == (turn == 3)
        if turn < 2:
            use.computes()
            use.backward()
            use.steps()
    assert not list(memory.end())


def test_of_two_passes_that_are_under_way_neither_is_over() -> None:
    memory, data = PassMemory(), object()
    for _ in range(2):
        uses = []
        for _ in range(2):
            use, said = memory.begin(data, 4, evaluating=False)
            assert said is None
            uses.append(use)
        for use in uses:
            use.takes()
        for use in uses:
            use.computes()
            use.backward()
            use.steps()
            use.is_under_way = False
    assert not list(memory.end())


def test_a_data_set_in_the_memory_of_one_that_is_gone_is_another_one() -> None:
    # Whether memory is used again differs between ranks.
    memory = PassMemory()
    for _ in range(20):
        use = memory.begin(TensorDataset(torch.zeros(4)), 4, evaluating=False)[0]
        assert not use.trains
        use.takes()
        use.computes()
        use.backward()
        use.steps()
        use.is_under_way = False


def test_what_starts_dlio_is_no_line_of_the_script() -> None:
    names: dict[str, Callable[[Callable[[], object]], object]] = {}
    file = os.path.join(os.path.dirname(script_lines.__file__), "runner.py")
    exec(compile("def run_script(act): return act()", file, "exec"), names)
    assert script_lines.script_frame()
    assert not names["run_script"](script_lines.script_frame)


def test_frameworks_that_make_a_loader_anew_see_its_parameters() -> None:
    ours = inspect.signature(SharingLoader.__init__).parameters
    assert set(inspect.signature(DataLoader.__init__).parameters) <= set(ours)


_TOLD = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
torch.manual_seed(0)
x = torch.randn(30, 4)
data = TensorDataset(x, (x[:, 0] > 0).long(), torch.rand(30))
first, head = nn.Linear(4, 6), nn.Linear(6, 2)
change = torch.zeros(1, 4, requires_grad=True)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
def each_of(x, y):
    return functional.cross_entropy(head(first(x)), y, reduction="none")
for x, y, w in DataLoader(data, batch_size=10):
    each_of(x + change, y).mean().backward()  # tensor of shape (1, 4)
    change.data += change.grad
    optimizer.step()
    optimizer.zero_grad()
optimizer = torch.optim.SGD([*first.parameters(), *head.parameters()], lr=0.1)  # no optimizer had
for x, y, w in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    for a, b in zip(x.chunk(2), y.chunk(2)):
        loss = each_of(a, b).mean() / 2
        loss.backward()  # some of the samples
    optimizer.step()
for x, y, w in DataLoader(data, batch_size=10):
    loss = (each_of(x, y) * w).mean() / w.mean()
    optimizer.zero_grad()
    loss.backward()  # another one on each rank
    optimizer.step()
late = nn.Linear(4, 2)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for number, (x, y, w) in enumerate(DataLoader(data, batch_size=10)):
    if number == 2:
        optimizer.add_param_group({"params": late.parameters()})
    loss = functional.cross_entropy(head(first(x)) + late(x), y)
    loss.backward()  # parameters that no optimizer had
    optimizer.step()
kept = []
for x, y, w in DataLoader(data, batch_size=10):
    out = first(x)
    scores = out @ torch.cat([head.weight, *kept]).T  # samples of earlier batches
    optimizer.zero_grad()
    functional.cross_entropy(scores, y).backward()
    optimizer.step()
    kept.append(out.detach())
for x, y, w in DataLoader(data, batch_size=10):
    loss = each_of(x, y).mean()
    optimizer.zero_grad()
    torch.autograd.backward([loss, first(x).square().mean()])
    optimizer.step()
    print(loss.item())  # numbers that the script reads
wholes = DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 10, False), batch_size=None)
for (x, y, w), (a, b, w) in zip(wholes, DataLoader(data, batch_size=10)):
    optimizer.zero_grad()
    (each_of(x, y).sum() + each_of(a, b).sum()).backward()  # all samples of another loader
    optimizer.step()
"""


@pytest.mark.mpi
def test_gradients_and_samples_of_a_rank_s_own_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_TOLD)
    errors = _run("-m", "dlio.cli", "run", "-n", "2", str(script)).stderr.splitlines()
    said = [each for each in errors if each.startswith("dlio run: ")]
    for number, text in enumerate(_TOLD.splitlines(), 1):
        _, _, words = text.partition("  # ")
        if words:
            at = f"script.py:{number}: "
            assert [each for each in said if at in each and words in each], (words, said)


@pytest.mark.mpi
def test_ranks_that_slice_their_shares_otherwise_are_told_how_to_go_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (
        _SCRIPT.partition("def train")[0]
        + """
for x, y, label in DataLoader(data, batch_size=9):
    optimizer.zero_grad()
    for a, b in zip(x.split(4), y.split(4)):
        functional.mse_loss(model(a), b).backward()
    optimizer.step()
"""
    )
    script.write_text(text)
    line = next(k for k, each in enumerate(text.splitlines(), 1) if "backward()" in each)
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script), check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert f"with backward at script.py:{line}. " in last
    assert "take batches of the slice's size from the loader" in last


@pytest.mark.mpi
def test_an_interrupt_of_a_rank_s_own_is_told_with_the_script_s_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nraise KeyboardInterrupt\n")
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script), check=False)
    assert done.returncode == 130
    assert re.search(r"ranks? [01 and]+ ended at \S*script.py:2: KeyboardInterrupt", done.stderr)


_JOINED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4), (torch.rand(16, 2) < 0.5).float())
model, learned = torch.nn.Linear(4, 2), torch.nn.Parameter(torch.zeros(()))
optimizer = torch.optim.SGD([*model.parameters(), learned], lr=0.1)
for x, mask in DataLoader(data, batch_size=8):
    far = model(x).square() * mask
    first, second = (far[:, k].sum() / mask[:, k].sum() for k in range(2))
    loss = torch.exp(-learned) * (first + second) + learned
    optimizer.zero_grad()
    loss.backward()  # backward
    optimizer.step()
    print("a step")
"""


@pytest.mark.mpi
def test_a_learned_weight_of_a_sum_of_terms_that_count_otherwise_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_JOINED)
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script), check=False)
    line = next(k for k, text in enumerate(_JOINED.splitlines(), 1) if "# backward" in text)
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"dlio: error: script.py:{line}: a learned weight multiplies there" in done.stderr


_TRUE_NOTICES = """
import itertools, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
x = torch.randn(40, 4)
class Read(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return x[i], float(x[i].sum())  # of a single sample
white, net = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)
class Own(torch.optim.Optimizer):  # It has a rate of its own, as Adafactor may have.
    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            each -= 0.1 * each.grad
optimizer = Own(net.parameters(), {"lr": None})
loader = DataLoader(Read(), 8, shuffle=True)
ones = torch.ones(8, 1)
for a, b in loader:
    out = net(a)[:, 0]
    loss = nn.functional.mse_loss(out, b.float())
    if sys.argv[1:]:
        loss = nn.functional.binary_cross_entropy(out[:, None].sigmoid(), ones)  # of a whole batch
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
def far(out, b):
    is_far = (out - b).abs() > 0.01  # of each box
    return ((out - b) * is_far).square().sum() / len(b)
boxes = [(torch.randn(1 + i % 4, 4), torch.rand(1 + i % 4, 1)) for i in range(40)]
for a, b in DataLoader(boxes, 8, collate_fn=lambda each: tuple(zip(*each))):
    loss = nn.functional.mse_loss(net(torch.cat(a)), torch.cat(b))  # of all boxes
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for a, b in DataLoader(boxes, 8, collate_fn=lambda each: tuple(zip(*each))):
    loss = far(torch.cat([net(each) for each in a]), torch.cat(b))  # the first is of a single row
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")  # of all boxes of the batch
print(f"{net.bias.item():.5f}")
numbers = DataLoader([(each, each.sum()) for each in x[:26]], 10)
second = DataLoader([(each, each.mean()) for each in x[26:33]], 7)
for epoch in range(2):
    for (a, b), (c, d) in zip(numbers, itertools.cycle(second)):  # A batch whose pass is over.
        out, other = net(a)[:, 0], net(c)[:, 0]
        loss = nn.functional.mse_loss(out, b) + nn.functional.mse_loss(other, d)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"{net.bias.item():.5f}")
for a, _ in loader:  # It trains nothing: whole batches.
    white(a)
print(white.running_mean)
"""


@pytest.mark.mpi
def test_what_is_of_single_samples_or_of_whole_batches_is_not_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_TRUE_NOTICES)
    run = ("-m", "dlio.cli", "run", "-n", "2", str(script))
    done = _run(*run)
    assert done.stderr == ""
    assert done.stdout == _run(str(script)).stdout
    ended = _run(*run, "fixed", check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.search(r"this rank has \d of the batch's 8 samples; other parts may have", last)
    assert "or use --batch per-rank)" in last


_KEPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(32, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for a, b in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
    out = model(a)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(out, b).backward()
    optimizer.step()
    kept.append(out.detach())
signs = torch.cat(kept).numpy() > 0  # of rank 0's parts
outputs = model(x).detach().numpy()  # of all
print(signs.mean())
"""


@pytest.mark.mpi
def test_outputs_that_are_read_after_their_pass_are_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_KEPT)
    done = _run("-m", "dlio.cli", "run", "-n", "2", str(script))
    line = 1 + _KEPT.splitlines().index(next(e for e in _KEPT.splitlines() if "signs = " in e))
    assert f"script.py:{line}: numbers that the script reads there are from rank" in done.stderr


_COUNTED = """
import torch
from itertools import islice
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(25, 6), torch.arange(25) % 4)
net = nn.Linear(6, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    batches = iter(DataLoader(data, 4, shuffle=True))
    while several := list(islice(batches, 4)):
        count = sum(y.ne(3).sum() for _, y in several)
        for x, y in several:
            loss = nn.functional.cross_entropy(net(x), y, ignore_index=3, reduction="sum")
            (loss / count).backward()  # of several batches
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.mpi
def test_a_count_over_batches_of_which_a_rank_has_a_stand_in_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_COUNTED)
    errors = _run("-m", "dlio.cli", "run", "-n", "2", str(script)).stderr
    assert "script.py:16: a sum is divided there by more than its number of elements" in errors
