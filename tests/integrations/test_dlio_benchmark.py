"""A loader for DLIO, of files as DLIO generates them; DLIO itself is played by a stub."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.reader import Reader
from dlio.data.schema import Value
from dlio.errors import SourceError, UsageError
from dlio.integrations.dlio_benchmark import DlioLoader
from dlio.integrations.dlio_files import DlioFiles
from dlio.testing import ReaderTests
from tests.conftest import MpiRun
from tests.integrations.dlio_stub import SIDE, arguments, installed, pictures, write

FILES = 12
EACH = [
    ("npz", 1),
    ("npz", 3),
    ("npy", 1),
    ("npy", 3),
    ("hdf5", 1),
    ("hdf5", 3),
    ("png", 1),
    ("csv", 1),
    ("csv", 3),
    ("indexed_binary", 1),
    ("indexed_binary", 3),
]


def samples_of(per_file: int, files: int = FILES) -> npt.NDArray[np.uint8]:
    """Return the samples in DLIO's order; shape (samples, SIDE, SIDE)."""
    return np.moveaxis(pictures(files, per_file), -1, 1).reshape(-1, SIDE, SIDE)


def passes(settings: SimpleNamespace, count: int = 2, kind: str = "train") -> list[list[Any]]:
    """Return the batches of some passes, as (numbers of the samples, batch)."""
    with installed(settings):
        loader = DlioLoader(settings.format, kind, 1)
        made = []
        try:
            loader.read()
            for _ in range(count):
                made.append([(loader.last_samples.tolist(), b.numpy()) for b in loader.next()])
                loader.finalize()
        finally:
            loader.close()
    return made


@pytest.mark.parametrize(("form", "per_file"), EACH)
def test_each_sample_comes_once_an_epoch_with_its_own_bytes(
    tmp_path: Path, form: str, per_file: int
) -> None:
    settings = arguments(write(tmp_path, form, FILES, per_file), form)
    settings.num_samples_per_file = per_file
    expected = samples_of(per_file)
    for epoch in passes(settings):
        numbers = [number for some, _ in epoch for number in some]
        assert sorted(numbers) == list(range(len(expected)))
        for some, batch in epoch:
            assert batch.dtype == np.uint8
            np.testing.assert_array_equal(batch, expected[some])


def test_the_order_follows_dlios_seed_and_epoch(tmp_path: Path) -> None:
    paths = write(tmp_path, "npy", FILES, 1)

    def order(**changes: object) -> list[list[int]]:
        made = passes(arguments(paths, "npy", **changes))
        return [[number for some, _ in epoch for number in some] for epoch in made]

    first, second = order()
    assert first != second
    assert order() == [first, second]
    assert order(seed=5)[0] != first
    same = order(seed_change_epoch=False)
    assert same[0] == same[1]
    assert order(sample_shuffle="off") == [list(range(FILES))] * 2


def test_samples_are_cut_or_filled_up_to_dlios_shape(tmp_path: Path) -> None:
    paths = write(tmp_path, "npz", 3, 1)
    plain = samples_of(1, 3).reshape(3, -1)
    for shape, used in (((5, 5), 25), ((20, 20), SIDE * SIDE)):
        settings = arguments(paths, "npz", resized_image=np.zeros(shape, np.uint8))
        settings.sample_shuffle = "off"
        ((_, batch),) = passes(settings, 1)[0]
        assert batch.shape == (3, *shape)
        np.testing.assert_array_equal(batch.reshape(3, -1)[:, :used], plain[:, :used])
        assert not batch.reshape(3, -1)[:, used:].any()


def test_evaluation_goes_through_its_own_files_in_order(tmp_path: Path) -> None:
    paths = write(tmp_path, "npy", 7, 1)
    settings = arguments([], "npy", file_list_eval=paths, do_eval=True)
    (epoch,) = passes(settings, 1, "valid")
    assert [some for some, _ in epoch] == [[0, 1], [2, 3], [4, 5]]


def test_steps_end_where_dlio_ends_them(tmp_path: Path) -> None:
    paths = write(tmp_path, "npy", FILES, 1)
    assert [len(epoch) for epoch in passes(arguments(paths, "npy", batch_size=5))] == [2, 2]
    limited = arguments(paths, "npy", total_training_steps=1)
    assert [len(epoch) for epoch in passes(limited)] == [1, 1]


def test_dlios_preparation_is_waited_for_once_a_sample(tmp_path: Path) -> None:
    settings = arguments(write(tmp_path, "npy", 3, 1), "npy", preprocess_time={"mean": 0.5})
    with installed(settings):
        from dlio_benchmark.utils import utility

        loader = DlioLoader("npy", "train", 1)
        loader.read()
        for _ in loader.next():
            pass
        loader.close()
        assert utility.slept == [{"mean": 0.5}] * 3


def test_the_last_finalize_closes_everything(tmp_path: Path) -> None:
    settings = arguments(write(tmp_path, "npz", FILES, 1), "npz")
    tier = tmp_path / "tier"
    tier.mkdir()
    settings.storage_options = {"dlio_tiers": f"{tier}:4MiB"}
    before = set(threading.enumerate())
    with installed(settings):
        loader = DlioLoader("npz", "train", 1)
        loader.read()
        for _ in range(2):
            assert len(list(loader.next())) == 4
            loader.finalize()
    assert set(threading.enumerate()) <= before
    assert len(loader.au) == 2
    assert all(0 <= au <= 100 for au in loader.au)
    said = settings.logger.lines
    assert [line.split(":")[1] for line in said] == [" epoch 1, training", " epoch 2, training"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "tfrecord"}, "format tfrecord: dlio reads npz, npy"),
        ({"storage_type": "s3"}, "storage_type=s3: DlioLoader reads files"),
        ({"odirect": True}, "reader.odirect"),
        ({"storage_options": {"dlio_tier": "none"}}, "did you mean dlio_tiers"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    settings = arguments(write(tmp_path, "npz", 3, 1), "npz", **changes)
    with installed(settings):
        loader = DlioLoader(settings.format, "train", 1)
        with pytest.raises(UsageError, match=message):
            loader.read()


@pytest.mark.parametrize(("form", "per_file"), [("npz", 2), ("hdf5", 2), ("csv", 5)])
def test_another_number_of_samples_per_file_is_named(
    tmp_path: Path, form: str, per_file: int
) -> None:
    paths = write(tmp_path, form, 2, 3)
    with pytest.raises(SourceError, match=r"img_00_of_2.*(samples|lines)"):
        DlioFiles(paths, form, per_file)


@pytest.mark.parametrize("form", ["npz", "npy", "hdf5", "png", "csv"])
def test_a_damaged_file_is_named(tmp_path: Path, form: str) -> None:
    paths = write(tmp_path, form, 3, 1)
    Path(paths[1]).write_bytes(b"\x80 nothing of the kind")
    settings = arguments(paths, form)
    with pytest.raises(Exception, match="img_01_of_3") as caught:
        passes(settings, 1)
    assert type(caught.value).__module__ == "dlio.errors"


def test_without_dlio_the_loader_says_where_it_belongs() -> None:
    with pytest.raises(UsageError, match="in the environment of dlio_benchmark"):
        DlioLoader("npz", "train", 1)


@pytest.mark.nightly
def test_ranks_share_each_epoch(tmp_path: Path, mpirun: MpiRun) -> None:
    write(tmp_path, "npz", FILES, 1)
    done = mpirun(2, "-m", "tests.integrations.dlio_stub", str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = dict(json.loads(line) for line in done.stdout.splitlines())
    expected = sorted(samples_of(1).reshape(FILES, -1).tolist())
    for epoch in range(2):
        assert len(parts[0][epoch]) == len(parts[1][epoch]) == 2
        seen = [sample for rank in (0, 1) for batch in parts[rank][epoch] for sample in batch]
        assert sorted(seen) == expected
    assert parts[0][0] != parts[0][1]


class TestWholeFiles(ReaderTests):
    """A sample a file."""

    form, files, per_file = "npz", 24, 1

    def make(self, folder: Path) -> Reader:
        if not list(folder.iterdir()):
            write(folder, self.form, self.files, self.per_file)
        paths = sorted(str(path) for path in folder.glob(f"*.{self.form}"))
        return DlioFiles(paths, self.form, self.per_file)

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [{} for _ in range(self.files * self.per_file)]

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        pytest.skip("DlioLoader names the reader, paths do not")

    def damage(self, folder: Path, sample: int) -> None:
        path = sorted(folder.glob(f"*.{self.form}"))[sample // self.per_file]
        path.write_bytes(path.read_bytes()[:20])


class TestSeveralSamplesAFile(TestWholeFiles):
    """Several samples a file, along the last dimension."""

    form, files, per_file = "npy", 6, 8

    def expected(self) -> Sequence[Mapping[str, Value]]:
        return [{"file": each.tobytes()} for each in samples_of(self.per_file, self.files)]
