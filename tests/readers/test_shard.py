"""Shards: packing writes the samples unchanged; damaged or incomplete shards are refused."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlio.data.reader import Reader, open_reader
from dlio.errors import CorruptBlock, SourceError, TierFull, UsageError
from dlio.storage.shard_file import ShardIndex
from dlio_readers.folder import FolderReader
from dlio_readers.shard import ShardReader
from dlio_staging.pack_folder import pack
from dlio_staging.verify import verify

FullDisk = Callable[[int], AbstractContextManager[None]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def _folder(root: Path, sizes: list[int]) -> Path:
    for label in "ab":
        (root / label).mkdir(parents=True)
        (root / label / "first.jpg").write_bytes(label.encode())
    for k, size in enumerate(sizes):
        (root / "ab"[k % 2] / f"{k}.jpg").write_bytes(os.urandom(size // 2) + bytes(size // 2))
    return root


def _content(reader: Reader) -> dict[str, bytes]:
    payloads = reader.read(np.arange(len(reader), dtype=np.int64))
    return {reader.name(k): bytes(payload) for k, payload in enumerate(payloads)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _folder(tmp_path / "source", [3000 + 11 * k for k in range(150)])


@pytest.fixture
def packed(source: Path, tmp_path: Path) -> Path:
    pack(str(source), str(tmp_path / "packed"), shard_bytes=1 << 17)
    return tmp_path / "packed"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.lists(st.integers(0, 5000), max_size=40),
    st.sampled_from(["shuffled", "source"]),
    st.sampled_from(["auto", "lz4", "none"]),
    st.integers(1 << 12, 1 << 18),
)
def test_a_round_trip_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    order: str,
    compress: str,
    shard_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("trip")
    source = open_reader(str(_folder(root / "source", sizes)))
    pack(
        source.path,
        str(root / "packed"),
        order=order,
        compress=compress,
        shard_bytes=shard_bytes,
    )
    packed = open_reader(str(root / "packed"))
    assert packed.format == "shard"
    assert _content(packed) == _content(source)
    assert packed.classes == tuple(source.classes)
    if order == "source":
        assert [packed.name(k) for k in range(len(packed))] == [
            source.name(k) for k in range(len(source))
        ]


def test_samples_are_read_in_any_order_and_number(packed: Path) -> None:
    reader = ShardReader(str(packed))
    assert len(list(packed.iterdir())) > 2
    whole = reader.read(np.arange(len(reader), dtype=np.int64))
    chosen = np.random.default_rng(0).integers(0, len(reader), 60)
    for sample, payload in zip(chosen, reader.read(chosen), strict=True):
        assert bytes(payload) == bytes(whole[sample])


def test_names_are_read_in_any_order_and_only_those_that_are_asked_for(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ShardReader(str(packed))
    names = [reader.name(sample) for sample in range(len(reader))]
    assert len(set(names)) == len(reader)
    counts = []
    real = ShardIndex.names_of

    def counted(index: ShardIndex, first: int, stop: int) -> list[bytes]:
        counts.append(stop - first)
        return real(index, first, stop)

    monkeypatch.setattr(ShardIndex, "names_of", counted)
    ahead = ShardReader(str(packed))
    assert [ahead.name(sample) for sample in range(len(ahead))] == names
    assert len(counts) <= 2 * len(list(packed.iterdir()))  # Neighbours are read together.
    counts.clear()
    # A shuffled order of two shards, in turn, as those of a large data set are.
    places = np.random.default_rng(0).integers(0, 20, 60) + np.resize([0, len(reader) - 20], 60)
    assert [reader.name(sample) for sample in places] == [names[sample] for sample in places]
    assert sum(counts) == len(places)


def test_packing_mixes_classes(tmp_path: Path) -> None:
    from dlio.cli.ls import describe

    source = _folder(tmp_path / "source", [2000] * 400)
    pack(str(source), str(tmp_path / "mixed"))
    pack(str(source), str(tmp_path / "sorted"), order="source")
    mixed = describe(str(tmp_path / "mixed"))["class_mix"]
    by_class = describe(str(tmp_path / "sorted"))["class_mix"]
    assert mixed is not None
    assert mixed < 1.3
    assert by_class is not None
    assert by_class > 1.4


def test_a_flipped_bit_is_detected_and_named(packed: Path) -> None:
    content = _content(open_reader(str(packed)))
    file = packed / "shard-00001.dlio"
    good = file.read_bytes()
    generator = np.random.default_rng(1)
    detected = 0
    for at in generator.integers(0, len(good), 120).tolist():
        data = bytearray(good)
        data[at] ^= 1 << int(generator.integers(8))
        file.write_bytes(data)
        try:
            assert _content(open_reader(str(packed))) == content  # The flip was in padding.
        except CorruptBlock as error:
            assert "shard-00001.dlio" in str(error)  # noqa: PT017 - it may also be no error
            detected += 1
    assert detected > 110


def test_verify_lists_all_that_is_damaged(packed: Path, pictures: Path, tmp_path: Path) -> None:
    pack(str(pictures), str(tmp_path / "good"))
    assert verify(str(tmp_path / "good")).damaged == []
    assert verify(str(tmp_path / "good")).samples == 12
    file = tmp_path / "good" / "shard-00000.dlio"
    data = bytearray(file.read_bytes())
    for at in (len(data) // 3, len(data) // 2):
        data[at] ^= 16
    file.write_bytes(data)
    damaged = verify(str(tmp_path / "good")).damaged
    assert len(damaged) == 2
    assert all("shard-00000.dlio" in line and "checksum" in line for line in damaged)
    # Intact bytes that are not a picture count as damage too.
    assert len(verify(str(packed)).damaged) == len(open_reader(str(packed)))


def test_shards_that_are_cut_off_or_missing_are_refused(packed: Path, tmp_path: Path) -> None:
    file = packed / "shard-00001.dlio"
    good = file.read_bytes()
    for length in (0, 10, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:length])
        with pytest.raises(CorruptBlock, match="shard-00001"):
            open_reader(str(packed))
    file.unlink()
    with pytest.raises(SourceError, match=r"1 of .* shards missing"):
        open_reader(str(packed))
    other = _folder(tmp_path / "other", [3000] * 100)
    pack(str(other), str(tmp_path / "packed2"), shard_bytes=1 << 17)
    shutil.copy(tmp_path / "packed2" / "shard-00001.dlio", file)
    with pytest.raises(SourceError, match="several data sets"):
        open_reader(str(packed))


def test_an_existing_destination_is_kept(packed: Path, source: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        pack(str(source), str(packed))
    with pytest.raises(UsageError, match="does not exist"):
        pack(str(source), str(packed / "no" / "where"))


def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FolderReader.read

    def failing(self: FolderReader, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        if 100 in samples:
            raise SourceError("100.jpg cannot be read: Input/output error")
        return read(self, samples)

    monkeypatch.setattr(FolderReader, "read", failing)
    with pytest.raises(SourceError, match=r"100\.jpg"):
        pack(str(source), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_full_disk_is_one_clear_error(source: Path, tmp_path: Path, full_disk: FullDisk) -> None:
    with (
        full_disk(200_000),
        pytest.raises(TierFull, match="out cannot be written: File too large; raise the limit"),
    ):
        pack(str(source), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.cold
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_packing_leaves_nothing_for_long(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    text = f"""
import sys, time
sys.path[:0] = {[str(ROOT), str(ROOT / "readers"), str(ROOT / "staging")]!r}
from dlio_staging.pack import pack
def slowly(done, of):
    print(done, flush=True)
    time.sleep(0.02)
pack({str(source)!r}, {str(tmp_path / "out")!r}, progress=slowly)
"""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(number)
        run.wait(60)
    assert not (tmp_path / "out").exists()
    left = [path.name for path in tmp_path.iterdir() if path.name != "source"]
    assert left in ([], [".out.packing"])  # For a later run to continue.
    pack(str(source), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
