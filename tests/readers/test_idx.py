"""IDX files, as MNIST and its like have them, against a parser of a few lines."""

import bz2
import gzip
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlio
from dlio.data.reader import Reader, open_reader
from dlio.errors import SourceError, UsageError
from dlio.testing import ReaderTests
from tests.conftest import examples

TYPES = {8: "u1", 9: "i1", 11: "i2", 12: "i4", 13: "f4", 14: "f8"}
MNIST = "{split}-{part}-idx{rank}-ubyte"


def idx(array: npt.NDArray[Any]) -> bytes:
    """Return an array as a file of the format."""
    code = next(code for code, kind in TYPES.items() if np.dtype(kind) == array.dtype)
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def judge(data: bytes) -> npt.NDArray[Any]:
    """Read a file as the format's description says."""
    rank = data[3]
    shape = struct.unpack_from(f">{rank}I", data, 4)
    return np.frombuffer(data, ">" + TYPES[data[2]], offset=4 + 4 * rank).reshape(shape)


def write_mnist(folder: Path, name: str = MNIST, suffix: str = "", shift: int = 0) -> None:
    """Write 12 pictures to train with, and 5 to test."""
    folder.mkdir(parents=True, exist_ok=True)
    packed: Any = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
    for split, count in (("train", 12), ("t10k", 5)):
        pictures = np.arange(count * 20, dtype=np.uint8).reshape(count, 4, 5) + np.uint8(shift)
        labels = (np.arange(count, dtype=np.uint8) * 3 + (split == "t10k")) % 10
        for part, array in (("images", pictures), ("labels", labels)):
            file = name.format(split=split, part=part, rank=array.ndim) + suffix
            (folder / file).write_bytes(packed(idx(array)))


def values(reader: Reader, field: str) -> npt.NDArray[Any]:
    """Return a field of all samples."""
    payloads = reader.read(np.arange(len(reader)))
    return np.stack([np.asarray(reader.schema.split(each)[field]) for each in payloads])


class TestIdx(ReaderTests):
    def make(self, folder: Path) -> Reader:
        if not (folder / "data").exists():
            write_mnist(folder / "data")
        return open_reader(str(folder / "data"), split="train")

    def change(self, folder: Path) -> None:
        write_mnist(folder / "data", shift=1)

    def damage(self, folder: Path, sample: int) -> None:
        os.truncate(folder / "data" / "train-images-idx3-ubyte", 16 + 20 * sample + 5)

    def expected(self) -> list[dict[str, Any]]:
        return [{"label": k * 3 % 10} for k in range(12)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
@pytest.mark.parametrize(
    "name",
    [MNIST, "{split}-{part}.idx{rank}-ubyte", "emnist-letters-{split}-{part}-idx{rank}-ubyte"],
)
def test_splits_are_read_with_their_labels(name: str, suffix: str, tmp_path: Path) -> None:
    write_mnist(tmp_path / "raw", name, suffix)
    with pytest.raises(UsageError, match=r"holds the splits train .2 files., test .2 files."):
        open_reader(str(tmp_path / "raw"))
    for split, word, count in (("train", "train", 12), ("test", "t10k", 5)):
        if "emnist" in name:  # As its authors name them.
            for each in (tmp_path / "raw").glob("*t10k*"):
                each.rename(each.with_name(each.name.replace("t10k", "test")))
            word = split
        reader = open_reader(str(tmp_path), split=split)
        file = name.format(split=word, part="images", rank=3) + suffix
        data = (tmp_path / "raw" / file).read_bytes()
        unpacked = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(suffix, bytes)(data)
        assert (values(reader, "image") == judge(unpacked)).all()
        assert len(reader) == count
        wanted = [(k * 3 + (split == "test")) % 10 for k in range(count)]
        assert reader.labels.tolist() == wanted == values(reader, "label").tolist()
        reader.close()


def test_both_splits_are_one_data_set_where_that_is_asked(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    reader = open_reader(str(tmp_path), split="all")
    assert (len(reader), len(set(reader.labels.tolist()))) == (17, 10)


def test_of_copies_of_a_file_the_compressed_one_is_left_out(tmp_path: Path) -> None:
    """torchvision leaves the downloaded files next to those that it unpacks."""
    write_mnist(tmp_path)
    write_mnist(tmp_path, suffix=".gz")
    with dlio.open(tmp_path, split="train", tiers="none") as data:
        assert len(data) == 12
        assert data[3]["label"] == 9


def test_the_only_folder_of_an_archive_is_read(tmp_path: Path) -> None:
    write_mnist(tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for file in (tmp_path / "raw").iterdir():
            archive.write(file, f"MNIST/raw/{file.name}")
    reader = open_reader(f"zip://::{tmp_path}/x.zip", split="test")
    assert reader.labels.tolist() == [(k * 3 + 1) % 10 for k in range(5)]
    reader.close()


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_arrays_of_all_types_are_those_of_the_description(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = data.draw(st.sampled_from(sorted(TYPES.values())))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    bits = np.random.default_rng(data.draw(st.integers(0, 99))).bytes(8 * int(np.prod(shape)))
    array = np.frombuffer(bits, kind, int(np.prod(shape))).reshape(shape)
    file = tmp_path_factory.mktemp("idx") / "x.idx3-ubyte"
    file.write_bytes(idx(array))
    reader = open_reader(str(file))
    read, wanted = values(reader, "data"), judge(file.read_bytes())
    assert reader.schema.kinds["data"].dtype == array.dtype
    assert np.array_equal(read, wanted, equal_nan=array.dtype.kind == "f")
    reader.close()


def test_labels_of_more_than_one_column_stay_an_array(tmp_path: Path) -> None:
    """As QMNIST has them."""
    (tmp_path / "qmnist-train-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 2, 2), np.uint8)))
    labels = np.arange(24, dtype=np.int32).reshape(3, 8)
    (tmp_path / "qmnist-train-labels-idx2-int").write_bytes(idx(labels))
    reader = open_reader(str(tmp_path))
    assert (values(reader, "label") == labels).all()
    assert "several labels" in getattr(reader, "unlabelled", "")


SOUND = idx(np.arange(24, dtype=np.int16).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not an IDX file: it begins with nothing"),
        (b"\x80\x02}.", "is not an IDX file: it begins with 80 02 7d 2e"),
        (SOUND[:2] + b"\x0a" + SOUND[3:], "is not an IDX file: it begins with 00 00 0a 03"),
        (SOUND[:-1], "is cut off: 63 bytes instead of 64"),
        (SOUND[:9], "is cut off: 9 bytes"),
        (SOUND[:4] + b"\xff" * 12 + SOUND[16:], "is cut off: 64 bytes instead of"),
        (idx(np.zeros((0, 3), np.uint8)), "holds no samples"),
    ],
)
def test_a_damaged_file_is_named(data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.idx3-ubyte").write_bytes(data)
    with pytest.raises(SourceError, match=f"x.idx3-ubyte.*{text}" if data[3:] else text) as caught:
        open_reader(str(tmp_path / "x.idx3-ubyte"))
    if "cut off" in text and len(data) > 16:
        with pytest.raises(ValueError, match=r"cannot reshape|buffer"):
            judge(data)
    assert "\n" not in str(caught.value)


def test_bytes_behind_the_array_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.idx3-ubyte").write_bytes(SOUND + b"12")
    assert len(open_reader(str(tmp_path / "x.idx3-ubyte"))) == 2
    assert "2 bytes behind its array left out" in caplog.text


def test_pictures_and_labels_of_other_numbers_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(7, np.uint8)))
    with pytest.raises(
        SourceError, match=r"12 rows in .*images-idx3-ubyte and 7 rows in .*: files of the"
    ):
        open_reader(str(tmp_path), split="train")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError, match="t10k has image and label, and train has image"):
        open_reader(str(tmp_path), split="all")


def test_labels_next_to_a_file_and_names_of_classes_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_mnist(tmp_path, "emnist-letters-{split}-{part}-idx{rank}-ubyte")
    (tmp_path / "emnist-letters-mapping.txt").write_text("1 65 97\n")
    open_reader(str(tmp_path / "emnist-letters-train-images-idx3-ubyte"))
    assert "1 file (emnist-letters-train-labels-idx1-ubyte) next to it left out" in caplog.text
    assert "emnist-letters-mapping.txt names the classes, which is not read" in caplog.text


def test_several_data_sets_in_a_folder_are_named(tmp_path: Path) -> None:
    for kind in ("letters", "digits"):
        write_mnist(tmp_path, f"emnist-{kind}-{{split}}-{{part}}-idx{{rank}}-ubyte")
    with pytest.raises(UsageError, match=r"holds the data sets emnist-digits.*, emnist-letters"):
        open_reader(str(tmp_path), split="train")
    reader = open_reader(f"{tmp_path}/emnist-letters-*", split="train")
    assert len(reader) == 12
