"""Map-style data sets of torch: samples are stored without pickle and restored unchanged."""

import os
import random
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.data.reader import open_reader
from dlio.data.reader_contract import abilities_of
from dlio.errors import SourceError, UsageError

SALT = random.SystemRandom().random()
"""RAM tiers are shared with all processes of the user that read the same data."""


class Counts(np.ndarray):
    """Counts that all threads share: each has copies of plain arrays alone, which are buffers."""


class Made(torch.utils.data.Dataset[Any]):
    """Samples made by a function of the index; counts the reads of each."""

    def __init__(self, make: Callable[[int], Any], count: int = 50) -> None:
        self.make = make
        self.asked = np.zeros(count, np.int64).view(Counts)

    def __len__(self) -> int:
        return len(self.asked)

    def __getitem__(self, index: int) -> Any:
        self.asked[index] += 1
        return self.make(index)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.full((2, 3), float(i)), i % 4),
        lambda i: {"x": np.arange(i % 5, dtype=np.uint16), "words": f"word {i}", "n": i / 2},
        lambda i: [(np.float32(i), {"a": i > 5, "b": b"raw" * (i % 3)}), torch.tensor(i)],
        lambda i: torch.arange(3) + i,
        lambda i: Pair(np.zeros((i % 3, 2), np.complex64), np.int8(i)),
        lambda i: f"only text {i}",
    ],
)
def test_samples_are_restored_unchanged(make: Callable[[int], Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, Pair):
            value = value._asdict()
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return np.asarray(value).tolist() if not isinstance(value, str | bytes) else value

    with dlio.open(Made(make), tiers="none") as data:
        assert [plain(data[i]) for i in range(50)] == [plain(make(i)) for i in range(50)]
        payloads = data.reader.read(np.arange(50))
        if not abilities_of(data.reader).sizes_are_estimates:
            assert [len(payload) for payload in payloads] == data.reader.sizes.tolist()


def test_pictures_are_stored_losslessly_and_can_be_cropped() -> None:
    def make(i: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(i).integers(0, 255, (20 + i % 3, 30, 3), np.uint8)
        return Image.fromarray(pixels), i % 2

    made = Made(make)
    with dlio.open(made, image_size=None, tiers="none") as data:
        image, label = data[7]
        assert image.permute(1, 2, 0).numpy().tobytes() == np.asarray(make(7)[0]).tobytes()
        assert label == 1
    with dlio.open(made, image_size=8, tiers="none") as data:
        assert data[7][0].shape == (3, 8, 8)
        assert data.targets == [i % 2 for i in range(50)]


@pytest.mark.parametrize("tiers", ["ram:16MiB", "FOLDER:16MiB"])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.full((100,), i + SALT), i),
        lambda i: (f"words {SALT + i} " * (i % 7), i),
        lambda i: (np.full((i % 5, 3), i + SALT, np.float32), i),
    ],
)
def test_each_sample_is_asked_for_once_when_tiers_hold_it(
    make: Callable[[int], Any], tiers: str, tmp_path: Path
) -> None:
    made = Made(make)
    with dlio.DataLoader(
        made, 4, shuffle=True, tiers=tiers.replace("FOLDER", str(tmp_path)), collate_fn=list
    ) as loader:
        for _ in range(3):
            assert sorted(int(each[1]) for batch in loader for each in batch) == list(range(50))
        assert made.asked.tolist() == [1] * 50


@pytest.mark.parametrize("outside", [True, False])
def test_parts_of_data_sets_are_asked_for_once_and_many_at_a_time(
    outside: bool, tmp_path: Path
) -> None:
    made = Made(lambda i: (f"words {i} " * (i % 7), i), 300)
    tiers, chosen = f"{tmp_path}:16MiB", list(range(0, 300, 3))
    if outside:
        data: Any = torch.utils.data.Subset(made, chosen)
        assert not abilities_of(open_reader(data)).multi_get
        made.asked[:] = 0
    else:
        data = dlio.open(made, tiers=tiers)[0:300:3]
    with dlio.DataLoader(data, 8, shuffle=True, tiers=tiers) as loader:
        for _ in range(2):
            assert sorted(int(n) for _, numbers in loader for n in numbers) == chosen
    assert made.asked[::3].tolist() == [1] * 100


@pytest.mark.parametrize("requests", [0, -1, 2.5, "many", 10_000])
def test_requests_that_are_no_number_of_requests_are_refused(requests: Any) -> None:
    with pytest.raises(UsageError, match="requests="):
        dlio.open(Made(lambda i: i), requests=requests)


def test_a_pass_that_ends_early_leaves_nothing_to_be_asked_for_again(tmp_path: Path) -> None:
    made = Made(lambda i: (f"words {i} " * (i % 7), i), 300)
    with dlio.DataLoader(made, 4, shuffle=True, tiers=f"{tmp_path}:16MiB") as loader:
        for _ in loader:
            break
        for _ in range(2):
            assert sum(len(numbers) for _, numbers in loader) == 300
    assert made.asked.tolist() == [1] * 300


def test_the_first_batch_does_not_wait_for_the_whole_data_set(tmp_path: Path) -> None:
    def make(i: int) -> tuple[str, int]:
        asked.append(i)
        if len(asked) > 120:
            gate.wait(60)
        return "word " * (i % 3), i

    gate, asked = threading.Event(), list[int]()
    with dlio.DataLoader(Made(make, 1000), 8, shuffle=True, tiers=f"{tmp_path}:16MiB") as loader:
        try:
            batches = iter(loader)
            assert len(next(batches)[1]) == 8
        finally:
            gate.set()
        assert sum(len(numbers) for _, numbers in batches) == 992
    assert sorted(asked) == list(range(1000))


@pytest.mark.parametrize("source_order", ["sample", "block(2)"])
@pytest.mark.parametrize("tiers", ["FOLDER:16MiB", "none"])
@pytest.mark.parametrize("requests", [1, 3])
def test_no_more_samples_are_asked_for_at_a_time_than_requests(
    requests: int, tiers: str, source_order: str, tmp_path: Path
) -> None:
    def make(i: int) -> int:
        with lock:
            under_way.append(len(under_way) - ended[0])
        time.sleep(0.001)
        with lock:
            ended[0] += 1
        return i

    lock, under_way, ended = threading.Lock(), list[int](), [0]
    with (
        dlio.open(
            Made(make, 200), tiers=tiers.replace("FOLDER", str(tmp_path)), requests=requests
        ) as data,
        dlio.DataLoader(data, 16, shuffle=True, num_workers=4, source_order=source_order) as loader,
    ):
        assert sum(len(batch) for batch in loader) == 200
    assert len(under_way) == 200
    assert max(under_way) < requests


def test_a_sample_that_fails_is_named_and_the_others_are_asked_for_once(tmp_path: Path) -> None:
    def make(i: int) -> tuple[str, int]:
        if i == 77:
            raise OSError("gone")
        return "word " * (i % 3), i

    made = Made(make, 200)
    with dlio.DataLoader(
        made, 8, shuffle=True, tiers=f"{tmp_path}:16MiB", on_error="skip", num_workers=2
    ) as loader:
        for _ in range(2):
            seen = [int(number) for _, numbers in loader for number in numbers]
            assert sorted(seen) == [i for i in range(200) if i != 77]
            assert [name.split("[")[1] for name in loader.stats()["skipped"]] == ["77]"]
    assert np.delete(made.asked, 77).tolist() == [1] * 199


def test_samples_larger_than_the_inspected_ones_do_not_exceed_the_tier(tmp_path: Path) -> None:
    probes = set(np.linspace(0, 399, 16).astype(int).tolist())
    made = Made(lambda i: ("x" * (10 if i in probes else 40_000), i), 400)
    with dlio.DataLoader(made, 8, shuffle=True, tiers=f"{tmp_path}:4MiB") as loader:
        for _ in range(2):
            assert sorted(int(n) for _, numbers in loader for n in numbers) == list(range(400))
        mounted = loader.data.mounted
        assert mounted is not None
        (tier,) = mounted.hierarchy.tiers
        names = [os.path.join(tier.path, name) for name in os.listdir(tier.path)]
        assert 2 << 20 < sum(map(os.path.getsize, names)) <= 5 << 20
        assert any("room" in note for note in mounted.hierarchy.notes())


class Drawing:
    """Random crops, as data sets of torchvision make them."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.rng = np.random.default_rng(0)
        self.transform = draw
        self.asked = np.zeros(1, np.int64).view(Counts)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.asked[0] += 1
        return self.transform(index)


def test_random_data_sets_are_noticed_by_the_generators_that_they_use() -> None:
    own = Drawing(lambda i: own.rng.random(3))
    for data in (
        own,
        Drawing(lambda _: torch.rand(3)),
        Drawing(lambda _: np.random.random()),  # noqa: NPY002
        Drawing(lambda _: random.random()),
        Drawing(lambda _: os.urandom(5)),
        Drawing(lambda _: np.random.default_rng().integers(2, size=40)),
    ):
        with pytest.raises(UsageError, match="different values each time"):
            open_reader(data)
    seeded = Drawing(lambda i: np.random.default_rng(i).random(3))
    open_reader(seeded)
    assert seeded.asked[0] == 16


def test_a_data_set_that_takes_several_indices_is_asked_for_several_at_a_time(
    tmp_path: Path,
) -> None:
    class Together(Made):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            calls.append(len(indices))
            return [self[index] for index in indices]

    calls: list[int] = []
    made = Together(lambda i: ("word " * (i % 3), i), 640)
    with dlio.DataLoader(made, 64, shuffle=True, tiers=f"{tmp_path}:16MiB") as loader:
        assert sum(len(numbers) for _, numbers in loader) == 640
    assert made.asked.tolist() == [1] * 640
    assert sum(calls) == 640
    assert len(calls) <= 160


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda i: np.random.default_rng().random(3), UsageError, "different values each time"),
        (lambda i: object(), UsageError, "without pickle"),
        (lambda i: torch.zeros(2, dtype=torch.bfloat16), UsageError, "convert it"),
        (lambda i: {"a": 1} if i else {"b": 1}, UsageError, "make them alike"),
        (lambda i: np.zeros(2, np.float32 if i else np.float64), UsageError, "make them alike"),
        (lambda i: np.array([{}]), UsageError, "object"),
        (lambda i: {3: 1}, UsageError, "name of a field"),
        (lambda i: 1 // 0, SourceError, "ZeroDivisionError"),
        (lambda i: None, UsageError, "NoneType"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(
    make: Callable[[int], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_reader(Made(make))


def test_a_sample_whose_fields_differ_from_the_inspected_ones_is_an_error() -> None:
    reader = open_reader(Made(lambda i: np.zeros(3 if i == 12 else 2, np.float32)))
    with pytest.raises(SourceError, match=r"\[12\] differs from"):
        reader.read(np.array([12]))


def test_an_iterable_is_not_a_data_set() -> None:
    with pytest.raises(SourceError, match="does not allow random access"):
        open_reader(iter([1]))
    with pytest.raises(SourceError, match="empty"):
        open_reader(Made(lambda i: i, 0))
    with pytest.raises(UsageError, match="no such option"):
        open_reader(Made(lambda i: i), select=())
