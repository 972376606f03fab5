"""Map-style data sets of torch: samples are stored without pickle and restored unchanged."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError, UsageError


class Made(torch.utils.data.Dataset[Any]):
    """Samples made by a function of the index; counts the reads of each."""

    def __init__(self, make: Callable[[int], Any], count: int = 50) -> None:
        self.make = make
        self.asked = np.zeros(count, np.int64)

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


def test_each_sample_is_read_once_when_tiers_hold_it() -> None:
    made = Made(lambda i: (torch.full((100,), float(i)), i))
    with (
        dlio.open(made, tiers="ram:16MiB") as data,
        dlio.DataLoader(data, 4, shuffle=True) as loader,
    ):
        before, single = made.asked.copy(), 0
        for _ in range(2):
            values = torch.cat([batch[1] for batch in loader])
            assert sorted(values.tolist()) == list(range(50))
            single += loader.stats()["single_bytes"] // int(data.reader.sizes[0])
        reads = made.asked - before
        assert reads.min() == 1
        # One that is wanted before its block has come may be read on its own, too.
        assert reads.sum() - 50 <= single <= 50
        assert len(set(data.reader.sizes.tolist())) == 1


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
