"""Raw token files, without a header, with that of llm.c, and with Megatron's index, against
numpy.memmap."""

import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dlio
from dlio.data.reader import Reader, open_reader
from dlio.data.source import Source
from dlio.errors import SourceError, UsageError
from dlio.testing import ReaderTests
from dlio_readers.tokens import _end_of_sequences

_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def _tokens(count: int, dtype: str = "uint16") -> npt.NDArray[Any]:
    return np.random.default_rng(count).integers(0, 120, count).astype(dtype)


def write_headed(path: Path, tokens: npt.NDArray[Any], magic: int) -> None:
    """Write tokens behind a header, as llm.c does."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(tokens)
    path.write_bytes(head.tobytes() + tokens.tobytes())


def write_megatron(path: Path, documents: list[npt.NDArray[Any]]) -> None:
    """Write documents as Megatron-LM's IndexedDatasetBuilder does, `path` without a suffix."""
    dtype = documents[0].dtype
    lengths = np.array([len(each) for each in documents], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * dtype.itemsize
    ends = np.arange(len(documents) + 1, dtype="<i8")
    head = b"MMIDIDX\0\0" + struct.pack(
        "<QBQQ", 1, _CODES[dtype.name], len(documents), len(documents) + 1
    )
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).tobytes())
    index = head + lengths.tobytes() + places.tobytes() + ends.tobytes()
    path.with_suffix(".idx").write_bytes(index)


class TestTokens(ReaderTests):
    def make(self, folder: Path) -> Reader:
        _tokens(50).tofile(folder / "train.bin")
        return open_reader(f"{folder}/train.bin", dtype="uint16")


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64", ">u2"])
def test_windows_are_those_of_a_memory_map(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    (np.arange(5000) * 7 % 4001).astype(dtype).tofile(path)
    stored = np.memmap(path, dtype=dtype, mode="r")
    with dlio.open(path, dtype=dtype, window=(65, 64), tiers="none") as data:
        assert len(data) == (5000 - 65) // 64 + 1
        for k in (0, 1, 40, len(data) - 1):
            window = stored[64 * k : 64 * k + 65].astype(np.int64)
            assert data[k]["tokens"].long().tolist() == window.tolist()
        with dlio.DataLoader(data, batch_size=8, shuffle=True, seed=0, num_workers=2) as loader:
            firsts = [int(row[0]) for batch in loader for row in batch["tokens"].long()]
    assert sorted(firsts) == sorted(int(stored[64 * k]) for k in range(len(firsts)))


@pytest.mark.parametrize("given", ["uint16", np.uint16, np.dtype("uint16"), torch.uint16, "<u2"])
def test_a_type_is_given_in_any_of_its_names(given: object, tmp_path: Path) -> None:
    _tokens(30).tofile(tmp_path / "x.bin")
    with dlio.open(tmp_path / "x.bin", dtype=given, window=30) as data:
        assert data[0]["tokens"].tolist() == _tokens(30).tolist()


def test_a_missing_type_and_a_wrong_one_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    _tokens(31).tofile(path)
    with pytest.raises(UsageError, match=r"x\.bin has no header .* give dtype='uint16'"):
        dlio.open(path)
    with pytest.raises(UsageError, match="did you mean uint16"):
        dlio.open(path, dtype="unit16")
    with pytest.raises(UsageError, match="give one of"):
        dlio.open(path, dtype="float32")
    with pytest.raises(SourceError, match="62 bytes does not hold whole numbers of uint32"):
        dlio.open(path, dtype="uint32")


def test_a_type_that_looks_wrong_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _tokens(2000).tofile(tmp_path / "narrow.bin")
    _tokens(2000, "uint32").tofile(tmp_path / "wide.bin")
    with dlio.open(tmp_path / "wide.bin", dtype="uint32"):
        assert not caplog.records
    with dlio.open(tmp_path / "narrow.bin", dtype="uint32"):
        assert "narrow.bin: read as uint32 its tokens have the number" in caplog.text
    with dlio.open(tmp_path / "wide.bin", dtype="uint16"):
        assert "wide.bin: read as uint16 every second token is 0" in caplog.text


@pytest.mark.parametrize(
    ("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32"), (7, "uint16"), (7, "uint32")]
)
def test_a_header_is_no_tokens(magic: int, dtype: str, tmp_path: Path) -> None:
    path, tokens = tmp_path / "x.bin", _tokens(700, dtype)
    write_headed(path, tokens, magic)
    with dlio.open(path, window=700) as data:
        assert data[0]["tokens"].long().tolist() == tokens.tolist()
    other = "int64" if dtype == "uint32" else "uint32"
    with pytest.raises(UsageError, match=f"says {dtype}: leave dtype= out"):
        dlio.open(path, dtype=other)
    if magic != 7:
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(SourceError, match="its header counts 700 tokens"):
            dlio.open(path)


@pytest.mark.parametrize("dtype", list(_CODES))
def test_megatrons_index_says_the_type(dtype: str, tmp_path: Path) -> None:
    documents = [_tokens(n, dtype) for n in (5, 1, 30, 17)]
    write_megatron(tmp_path / "text_document", documents)
    with dlio.open(tmp_path / "text_document.bin", window=(8, 8)) as data:
        read = [data[k]["tokens"].tolist() for k in range(len(data))]
    assert np.concatenate(read).tolist() == np.concatenate(documents)[:48].tolist()
    with pytest.raises(UsageError, match=r"text_document\.idx says"):
        dlio.open(tmp_path / "text_document.bin", dtype="uint32")


def test_an_index_that_is_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write_megatron(tmp_path / "x", [_tokens(9)])
    (tmp_path / "mine" / "x.bin").write_bytes(_tokens(9).tobytes())
    (tmp_path / "mine" / "x.idx").symlink_to("../x.idx")
    with pytest.raises(SourceError, match="outside of the data set's folder"):
        dlio.open(tmp_path / "mine" / "x.bin")
    with dlio.open(tmp_path / "mine" / "x.bin", follow_links=True, window=9) as data:
        assert data[0]["tokens"].tolist() == _tokens(9).tolist()


def test_damaged_indexes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_megatron(path, [_tokens(9), _tokens(4)])
    sound = path.with_suffix(".idx").read_bytes()
    second = 34 + 2 * 4 + 8
    for damaged, said in (
        (b"NO" + sound[2:], "not an index of Megatron"),
        (sound[:20], "not an index of Megatron"),
        (sound[:60], "is cut off"),
        (sound[:17] + b"\x06" + sound[18:], "version 1 and type 6 are not read"),
        (sound[:second] + b"\1" + sound[second + 1 :], "do not lie one after another"),
    ):
        path.with_suffix(".idx").write_bytes(damaged)
        with pytest.raises(SourceError, match=said):
            dlio.open(path.with_suffix(".bin"))
    path.with_suffix(".idx").write_bytes(sound)
    path.with_suffix(".bin").write_bytes(b"12")
    with pytest.raises(SourceError, match="is not the file of"):
        dlio.open(path.with_suffix(".bin"))


def test_shards_and_archives_are_read(tmp_path: Path) -> None:
    shards = [_tokens(40), _tokens(33)]
    for number, shard in enumerate(shards):
        write_headed(tmp_path / f"fineweb_{number:06d}.bin", shard, 20240520)
    with dlio.open(f"{tmp_path}/fineweb_*.bin", window=(10, 10)) as data:
        read = [data[k]["tokens"].tolist() for k in range(len(data))]
    starts = [(0, k) for k in (0, 10, 20, 30)] + [(1, k) for k in (0, 10, 20)]
    assert read == [shards[number][k : k + 10].tolist() for number, k in starts]
    write_megatron(tmp_path / "m", shards)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for suffix in (".bin", ".idx"):
            archive.write(tmp_path / f"m{suffix}", f"m{suffix}")
    with dlio.open(f"zip://m.bin::{tmp_path}/z.zip", window=73) as data:
        assert data[0]["tokens"].tolist() == np.concatenate(shards).tolist()
    write_headed(tmp_path / "wide.bin", _tokens(9, "uint32"), 20240801)
    with pytest.raises(UsageError, match="open them one by one"):
        dlio.open([f"{tmp_path}/m.bin", f"{tmp_path}/wide.bin"])


def test_an_index_of_many_sequences_takes_memory_for_a_part_of_them(tmp_path: Path) -> None:
    path, sequences = tmp_path / "text.bin", 1 << 23
    path.touch()
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, sequences, 0)
    with open(path.with_suffix(".idx"), "wb") as file:
        file.write(head)
        file.truncate(len(head) + 12 * sequences)  # Zeros, which take no room on the disk.
    index = Source(str(tmp_path)).file("text.idx")
    tracemalloc.start()
    try:
        assert _end_of_sequences(index, sequences, 2) == 0
        assert tracemalloc.get_traced_memory()[1] < 3 * sequences  # Of 12 that are read.
    finally:
        tracemalloc.stop()
