"""Ranks draw numbers of their own for their samples, and go on with equal random states."""

import copy
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import dlio
from dlio.integrations.script.collate_draws import CollateDraws
from dlio.integrations.script.fetch_randoms import FetchRandoms, rank_seed
from dlio.integrations.script.mixed_inputs import MixedInputs
from dlio.integrations.script.script_randoms import ScriptRandoms
from dlio.integrations.script.worker_draws import WorkerDraws
from tests.conftest import MpiRun

_numpy: Any = np.random
"""Its global generator, from which data sets draw."""
_distributions: Any = torch.distributions


class _HalfBatch:
    """Stands for the context of a script that computes on its part of 8 samples."""

    batch, is_outside = "global", False

    def __init__(self, rank: int, part: int = 4) -> None:
        self._rank, self.part = rank, part
        self.notes: list[str] = []
        self.note = self.notes.append
        self.collate_draws, self.worker_draws = CollateDraws(), WorkerDraws()
        self.mixed_inputs = MixedInputs(self.note, self.collate_draws)
        self.batches = 1

    def say(self, text: str, any_rank: bool = False) -> None:
        self.notes.append(f"{text} {any_rank}")

    def places(self) -> Iterator[tuple[range, int]]:
        if self.part:
            yield range(self.part * self._rank, self.part * (self._rank + 1)), 2 * self.part


def _installed(rank: int, *parameters: torch.Tensor) -> ScriptRandoms:
    return ScriptRandoms(rank, _HalfBatch(rank), lambda: parameters)  # type: ignore[arg-type]


def _installed_with(rank: int) -> tuple[ScriptRandoms, _HalfBatch]:
    context = _HalfBatch(rank)
    return ScriptRandoms(rank, context), context  # type: ignore[arg-type]


def test_noise_of_weights_and_gradients_is_the_same_on_all_ranks() -> None:
    weight = nn.Parameter(torch.ones(3, 4))  # The samples of a rank are as many as its columns.
    torch.autograd.backward(weight.sum())

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(0)
        gradient = weight.grad
        assert gradient is not None
        return [
            torch.randn_like(gradient),
            torch.rand_like(weight.data),
            torch.randn_like(gradient.detach()),
            gradient.clone().copy_(gradient.normal_()),
        ]

    whole = drawn()
    for rank in range(2):
        with _installed(rank, weight).installed():
            for one, own in zip(whole, drawn(), strict=True):
                assert torch.equal(one, own)


def test_tensors_of_samples_are_parts_of_one_process_s() -> None:
    def drawn(count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.zeros(count, 3)
        return [
            torch.randn(count, 3),
            torch.rand(size=(count,)),
            torch.randint(10, (count,)),
            torch.randint(0, 10, size=(count, 2), dtype=torch.int32),
            torch.randn_like(x),
            torch.empty(2, count, 3).exponential_().transpose(0, 1),
            torch.rand(1).expand(count),
            torch.randn(5).expand(count, 5),
            torch.normal(0.0, 0.1, x.shape),
            torch.normal(0.0, 0.1, size=(count, 3)),
            torch.normal(x, 2.0),
            torch.normal(x, torch.ones(3)),
            torch.bernoulli(x + 0.5),
            torch.multinomial(x + 1, 2),
            _distributions.Normal(x, 1.0).sample(),
            _distributions.Categorical(logits=x).sample(),
            torch.randn(count, 2),
        ]

    whole, parts = drawn(8), []
    for rank in range(2):
        with _installed(rank).installed():
            parts.append(drawn(4))
    for one, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(one, torch.cat([first, second]))
        assert one.dtype == first.dtype


def _of_one(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Three draws for each sample, and two for all."""
    return [
        torch.randint(0, 10, (len(x),)) / 10,
        torch.rand(x.shape[0]),
        torch.randn(count),
        torch.rand(1) * len(x),
        torch.rand((1,)),
    ]


def test_a_part_of_one_sample_is_not_one_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        randoms = _installed(rank)
        with randoms.installed():
            _of_one(torch.zeros(4), 4)  # So the third is known to draw for each sample.
        monkeypatch.setattr(
            randoms._context, "places", lambda rank=rank: iter([(range(rank, rank + 1), 2)])
        )
        torch.manual_seed(4)
        whole = _of_one(torch.zeros(2), 2)
        state = torch.get_rng_state()
        torch.manual_seed(4)
        with randoms.installed():
            part = _of_one(torch.zeros(1), 1)
        assert torch.equal(torch.get_rng_state(), state)
        for mine, all_of_them in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(mine, all_of_them[rank : rank + 1])
        assert torch.equal(part[3] * 2, whole[3])
        assert torch.equal(part[4], whole[4])


def test_arrays_of_samples_are_parts_of_one_process_s() -> None:
    def drawn(count: int) -> list[np.ndarray[Any, Any]]:
        _numpy.seed(0)
        return [
            _numpy.normal(0, 0.3, size=(count, 3)),
            _numpy.normal(0, 0.3, (count, 3)),
            _numpy.uniform(size=count),
            _numpy.randn(count, 2),
            _numpy.randint(0, 9, (count,)),
            _numpy.random((2, count)).T,
            _numpy.normal(np.zeros(3), 1.0).repeat(count).reshape(3, count).T,
            np.full(count, _numpy.rand()),
            _numpy.choice(90, count),
            _numpy.choice(90, size=(count, 2), replace=True),
            _numpy.gamma(2.0, 0.1, count),
            _numpy.dirichlet([1.0, 2.0], count),
            np.random.default_rng(3).normal(0, 1, (count, 2)),
            np.random.default_rng(3).integers(0, 9, size=count),
            np.random.RandomState(3).uniform(size=(count,)),
            np.array(random.Random(3).sample(range(90), count)),
            np.array(random.Random(3).choices("ab", [1, 3], k=count)),
        ]

    whole, parts = drawn(8), []
    for rank in range(2):
        with _installed(rank).installed():
            parts.append(drawn(4))
    for one, first, second in zip(whole, *parts, strict=True):
        assert np.array_equal(one, np.concatenate([first, second]))


_WIDTH = 4


def test_sizes_that_the_script_writes_are_not_those_of_a_part() -> None:
    def drawn() -> list[Any]:
        torch.manual_seed(0)
        _numpy.seed(0)
        random.seed(0)
        return [
            torch.randn(4, 4),
            torch.rand(size=(_WIDTH,)),
            torch.randint(0, 9, (4, 2)),
            torch.randperm(4),
            _numpy.rand(4),
            _numpy.normal(0, 1, _WIDTH),
            _numpy.permutation(4),
            np.random.default_rng(3).choice(10, 4, False),
            random.sample(range(9), 4),
            random.choices([1, 2], k=4),
        ]

    whole = drawn()
    for rank in range(2):
        with _installed(rank).installed():
            for one, own in zip(whole, drawn(), strict=True):
                assert np.array_equal(one, own)


def test_sizes_that_stay_as_parts_change_are_told_or_taken_for_all() -> None:
    def drawn(width: int) -> list[float]:
        torch.manual_seed(0)
        return torch.rand(width).tolist()

    whole, rows = drawn(4), len(range(4))
    for first in (4, 3):
        randoms, context = _installed_with(1)
        with randoms.installed():
            results = []
            for context.part in (first, 7 - first):
                results.append(drawn(rows))
        # A part of 3 shows that 4 is not the size of one.
        assert (results[0] == whole) == (first == 3)
        assert results[1] == whole
        assert len(context.notes) == (first == 4)


def test_a_part_is_permuted_by_the_order_of_the_whole() -> None:
    torch.manual_seed(0)
    _numpy.seed(0)
    orders = torch.randperm(8).tolist(), _numpy.permutation(8).tolist()
    after = torch.rand(3).tolist(), _numpy.rand()
    for rank in range(2):
        with _installed(rank).installed():
            torch.manual_seed(0)
            _numpy.seed(0)
            count = len(range(4))
            mine = torch.randperm(count).tolist(), _numpy.permutation(count).tolist()
            assert (torch.rand(3).tolist(), _numpy.rand()) == after
            assert torch.randperm(5).tolist() != list(range(5))
        for part, order in zip(mine, orders, strict=True):
            assert part == [k - 4 * rank for k in order if k // 4 == rank]


def test_samples_are_shuffled_in_the_order_of_the_whole() -> None:
    def shuffled(count: int) -> list[list[int]]:
        _numpy.seed(0)
        array, several, own = np.arange(count), list(range(count)), np.arange(count)
        _numpy.shuffle(array)
        random.Random(0).shuffle(several)
        np.random.default_rng(0).shuffle(own)
        other = np.random.default_rng(0).permutation(np.arange(count))
        return [array.tolist(), several, own.tolist(), other.tolist()]

    orders = shuffled(8)
    for rank in range(2):
        with _installed(rank).installed():
            parts = shuffled(4)
        for part, order in zip(parts, orders, strict=True):
            assert part == [k - 4 * rank for k in order if k // 4 == rank]


def test_generators_stay_what_they_are() -> None:
    made = np.random.RandomState(1), random.Random(1)
    with _installed(0).installed():
        assert isinstance(made[0], np.random.RandomState)
        assert isinstance(made[1], random.Random)
        rng = np.random.default_rng(2)
        assert isinstance(rng, np.random.Generator)
        assert np.random.default_rng(rng) is rng
        # More than there are: a constant of the script, which is a part's size by chance.
        assert sorted(rng.choice(6, 4, replace=False).tolist()) != []
        copied = copy.deepcopy(random.Random(2))
        assert copied.random() == random.Random(2).random()


_PER_SAMPLE = """
import random
import numpy as np, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8):
    for row in x:
        if random.random() < 0.5:
            row.neg_()
    scale = 0.9 + 0.2 * np.random.rand()
    kept = torch.randperm(len(x))[:3]
    chosen = np.random.choice(len(x), len(x) // 2, replace=False)
    order = np.random.permutation(len(x))
    far = scale * model(x) - y
    mixed = model(0.5 * x + 0.5 * x[order]) - y
    loss = far.square().mean() + far[kept].mean() + far[chosen].mean() + mixed.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(random.random(), np.random.rand())
"""


_SEEDS = """
import os, pickle, random, time
import numpy as np, torch
seed = int(time.time()) + 1000 * os.getpid()  # Other ones, though all begin in one second.
torch.manual_seed(seed)
random.seed(seed)
np.random.seed(seed % 2**32)
torch.Generator().manual_seed(seed)
random.Random(seed)
np.random.default_rng(seed)
torch.manual_seed(0)
np.random.default_rng(np.random.default_rng(0))  # As SciPy does; it returns the same one.
np.random.default_rng(np.random.RandomState(0))
generator = pickle.loads(pickle.dumps(torch.Generator()))
assert isinstance(torch.default_generator, torch.Generator)
generator = torch.Generator()
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
model = torch.nn.Linear(1, 1)
for (x,) in torch.utils.data.DataLoader(data, 4, num_workers=1):  # Its seeds are not the script's.
    model(x).sum().backward()
os.write(2, f"own {generator.seed()} {torch.rand(1, generator=generator).item()};".encode())
"""


@pytest.mark.mpi
def test_seeds_that_differ_by_rank_are_told(tmp_path: Path, mpirun: MpiRun) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SEEDS, encoding="utf-8")
    done = mpirun(2, "-m", "dlio.cli", "run", str(script))
    assert done.returncode == 0, done.stderr
    lines = ", ".join(f"train.py:{line}" for line in range(5, 11))
    assert done.stderr.count("gives another seed") == 1
    assert f"run: {lines}: the script gives another seed there on each rank" in done.stderr
    own = re.findall("own [^;]*;", done.stderr)
    assert len(own) == 2
    assert len(set(own)) == 1


@pytest.mark.mpi
def test_draws_by_the_number_of_samples_are_told(tmp_path: Path, mpirun: MpiRun) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PER_SAMPLE, encoding="utf-8")
    done = mpirun(2, "-m", "dlio.cli", "run", str(script))
    assert done.returncode == 0, done.stderr
    assert "train.py:10, train.py:14: the random numbers that the script draws" in done.stderr
    assert "train.py:17: samples of a batch meet there (an index over" in done.stderr
    assert "train.py:13: samples of a batch meet there (a random choice" in done.stderr


def test_generators_without_a_seed_have_the_same_on_all_ranks() -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(0)
        with _installed(rank).installed():
            own = (np.random.default_rng(), np.random.RandomState(), random.Random())
            drawn.append([each.random() for each in own])
            for seed, draw in (
                (random.seed, random.random),
                (_numpy.seed, _numpy.rand),
                (torch.seed, lambda: torch.rand(()).item()),
            ):
                seed()
                drawn[-1].append(draw())
            drawn[-1].append(random.Random(5).random())
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) == 7
    assert drawn[0][-1] == random.Random(5).random()


def test_a_parameter_has_no_dimension_of_samples() -> None:
    drawn = []
    for rank in range(2):
        with _installed(rank).installed():
            torch.manual_seed(0)
            drawn.append(torch.randn_like(nn.Parameter(torch.zeros(4, 3))))
    assert torch.equal(*drawn)


class _Dropping(nn.Module):
    """Calls a function that TorchScript compiles from its source."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.0)


def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("way", ["script", "compile"])
def test_compiled_functions_draw_other_numbers_on_each_rank(way: str) -> None:
    drawn, after = [], []
    for rank in range(2):
        randoms = _installed(rank)
        with randoms.installed():
            noisy = torch.jit.script(_noisy) if way == "script" else randoms.inside(_noisy)
            torch.manual_seed(0)
            drawn.append(noisy(torch.zeros(4, 3)))
        after.append(torch.get_rng_state())
    assert not torch.equal(*drawn)
    assert torch.equal(*after)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x


class _Doubler:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = _doubled(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_class_is_compiled_with_the_names_of_its_module() -> None:
    with _installed(0).installed():  # As by torch.distributed.optim, which ignite imports.
        compiled: Any = torch.jit.script(_Doubler)
    assert compiled(torch.ones(1)).x == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_dropout_differs_by_rank_and_leaves_equal_states() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    recurrent = nn.LSTM(3, 3, 2, dropout=0.5)
    for drop in (
        lambda: functional.dropout(torch.ones(12, 3)),
        lambda: attention(*[torch.ones(4, 4)] * 3, need_weights=False)[0],
        lambda: recurrent(torch.ones(5, 4, 3))[0],
        lambda: torch.poisson(torch.full((4, 9), 3.0)),
    ):
        masks, after = [], []
        for rank in range(2):
            torch.manual_seed(0)
            randoms, context = _installed_with(rank)
            with randoms.installed():
                masks.append(drop().detach())
            (note,) = context.notes
            assert "test_script_randoms.py:" in note
            assert "dropout, or another operation that draws random numbers inside" in note
            after.append(torch.get_rng_state())
        assert not torch.equal(*masks)
        assert torch.equal(*after)
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), _Dropping())
    before = torch.get_rng_state()
    randoms, context = _installed_with(1)
    with randoms.installed():
        functional.dropout(torch.ones(4, 3), 0.0)
        functional.dropout(torch.ones(4, 3), training=False)
        assert torch.jit.script(network)(torch.ones(4, 3)).shape == (4, 3)
    assert torch.equal(before, torch.get_rng_state())
    assert not context.notes


def test_a_data_set_draws_other_numbers_on_each_rank() -> None:
    def samples() -> Iterator[tuple[float, float, float]]:
        for _ in range(6):
            yield random.random(), _numpy.rand(), float(torch.rand(()))

    states = random.getstate(), torch.get_rng_state()
    drawn = [list(FetchRandoms(rank_seed(rank, 5)).around(samples())) for rank in range(2)]
    numbers = [number for rank in drawn for sample in rank for number in sample]
    assert len(set(numbers)) == 36
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


class _Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all generators of the process."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [random.random(), _numpy.rand(), _numpy.normal(), random.choice([1, 2])]
        numbers += [float(_distributions.Gamma(1.0, 1.0).sample()), float(torch.rand(1))]
        one = torch.empty(1)
        return torch.tensor([*numbers, float(torch.rand_like(one)), float(one.normal_())])


def test_threads_of_a_loader_do_not_draw_from_the_script_s_states() -> None:
    with _installed(0).installed():
        loader = dlio.DataLoader(_Drawing(), batch_size=4, num_workers=2, workers="thread")
        torch.manual_seed(0)
        torch.empty((), dtype=torch.int64).random_()  # The loader's base seed.
        expected = torch.rand(3)
        torch.manual_seed(0)
        states = random.getstate(), _numpy.get_state()[2]
        batches = list(loader)
        assert torch.equal(torch.rand(3), expected)
        assert (random.getstate(), _numpy.get_state()[2]) == states
    assert len(set(torch.cat(batches)[:, 0].tolist())) == 24


def _is_loop() -> bool:
    return all(random.random() < 1 for _ in range(4))


@pytest.mark.parametrize(
    ("draw", "is_told"),
    [
        (lambda: _numpy.beta(0.4, 0.4), True),
        (lambda: random.betavariate(0.4, 0.4), True),
        (lambda: np.random.default_rng(1).beta(0.4, 0.4), True),
        (lambda: _distributions.Beta(0.4, 0.4).sample(), True),
        (lambda: torch.rand(()), True),
        (lambda: _numpy.permutation(4), True),
        (lambda: torch.randperm(4), True),
        (lambda: torch.rand(4, 3) < 0.1, False),
        (lambda: _numpy.rand(4), False),
        (_is_loop, False),
    ],
)
def test_numbers_that_make_a_batch_of_samples_are_told_but_not_those_of_each(
    draw: Callable[[], Any], is_told: bool
) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        draw()
        return torch.stack(samples)

    randoms, context = _installed_with(0)
    context.part = 0  # None is computed on while samples are fetched.
    with randoms.installed():
        context.mixed_inputs.around_collate(collate)([torch.ones(3)] * 4)
        draw()
    assert len(context.notes) == is_told
    line = r"test_script_randoms.py:\d+: random numbers are drawn there while samples are made"
    assert all(re.match(line, each) for each in context.notes)


def test_weights_of_samples_that_are_drawn_by_values_differ_by_rank() -> None:
    drawn, notes = [], []
    for rank in range(2):
        randoms, context = _installed_with(rank)
        with randoms.installed():
            torch.manual_seed(0)
            one = _distributions.Beta(0.4, 0.4).sample()
            several = _distributions.Beta(0.4, 0.4).sample((4,))
            drawn.append((one, several, torch.rand(3)))
        notes += context.notes
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
    assert torch.equal(drawn[0][2], drawn[1][2])
    assert len(notes) == 2
    assert all("draws others on each rank" in each for each in notes)


@pytest.mark.parametrize("name", ["random", "shuffle"])
def test_functions_are_put_back(name: str) -> None:
    before = getattr(random, name), torch.randn, functional.dropout
    with _installed(0).installed():
        assert torch.randn is not before[1]
    assert (getattr(random, name), torch.randn, functional.dropout) == before


_OF_SAMPLES = '''
import os, sys, types
import numpy as np, torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
class DatasetFolder(Dataset):
    """torchvision's, as far as dlio looks at it."""
    def __init__(self, root, transform):
        self.root, self.transform, self.target_transform = root, transform, None
        self.samples = [
            (f"{root}/{each}/{file}", number)
            for number, each in enumerate(sorted(os.listdir(root)))
            for file in sorted(os.listdir(f"{root}/{each}"))
        ]
    def loader(self, path):
        with Image.open(path) as image:
            return image.convert("RGB")
    loader.__name__ = "default_loader"
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(self.loader(path)), label
DatasetFolder.__module__ = "torchvision.datasets.folder"
for number in range(16):
    os.makedirs(f"photos/{number % 2}", exist_ok=True)
    colours = np.random.default_rng(number).integers(0, 255, (2, 2, 3), np.uint8)
    Image.fromarray(colours).save(f"photos/{number % 2}/{number}.png")
def pixels(image):
    return torch.from_numpy(np.array(image)).flatten() / 255
def moved(image):
    return pixels(image) + torch.rand(1)
class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if seeds:
            torch.manual_seed(index)
        return torch.rand(12), index % 2
torch.manual_seed(0)
net = nn.Linear(12, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train(data, **options):
    for x, y in DataLoader(data, 8, shuffle=True, **options):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.5f}")
seeds = True
train(DatasetFolder("photos", pixels))
train(Rows(), num_workers=2)
if sys.argv[1:]:
    seeds = False
    for options in ({}, {"worker_init_fn": torch.manual_seed}):
        class Rows(Rows):
            pass
        Rows.__name__ = f"Rows{len(options)}"
        train(Rows(), num_workers=1, **options)
    train(DatasetFolder("photos", moved))
    train(DatasetFolder("photos", moved), num_workers=1)
'''


@pytest.mark.mpi
def test_samples_that_draw_otherwise_than_in_one_process_are_told(
    tmp_path: Path, mpirun: MpiRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "draws.py"
    script.write_text(_OF_SAMPLES)
    sound = mpirun(2, "-m", "dlio.cli", "run", str(script))
    alone = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    assert sound.stdout == alone.stdout
    assert "not one process's" not in sound.stderr
    assert "dlio draws" not in sound.stderr
    errors = mpirun(2, "-m", "dlio.cli", "run", str(script), "more").stderr
    in_workers = "samples of {} draw random numbers in the loader's workers, and those of a rank"
    assert all(errors.count(in_workers.format(name)) == 1 for name in ("Rows0", "Rows1"))
    by_dlio = "dlio draws the random numbers by which samples of DatasetFolder are transformed"
    later = [each.partition(by_dlio)[2] for each in errors.splitlines() if by_dlio in each]
    assert len(later) == 2
    assert "such as the next pass's order, are not one process's; with the loader's" in later[0]
    assert later[1].endswith("one process without dlio")
