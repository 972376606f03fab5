"""The conformance suite of readers, for every format."""

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

from dlio.data.reader import Reader, open_reader
from dlio.data.schema import Value
from dlio.testing import ReaderTests
from dlio.util.settings import REHEARSAL
from dlio_staging.pack_folder import pack
from tests.readers import tfrecords

COUNT = 60
Rows = Sequence[Mapping[str, Value]]


@pytest.fixture(autouse=True)
def _cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))
    # A rehearsal takes longer than most of these tests: one test of each format has it.
    if request.node.name != "test_payloads_are_the_samples_that_were_written":
        monkeypatch.setenv(REHEARSAL, "1")


def image(k: int) -> bytes:
    """Return bytes that begin like a JPEG."""
    return b"\xff\xd8\xff\xe0" + bytes([k]) * (200 + k)


def numbers(k: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.arange(6, dtype=np.float32) + k


def cut_off(folder: Path) -> None:
    """Truncate each file of a data set to its first third."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            os.truncate(path, path.stat().st_size // 3)


class FormatTests(ReaderTests):
    """A data set of one format, in a folder of its own."""

    def write(self, data: Path, shift: int = 0) -> str:
        """Write samples, whose values depend on `shift`; return the path to open."""
        raise NotImplementedError

    def make(self, folder: Path) -> Reader:
        data, at = folder / "data", folder / "path"
        if not data.exists():
            data.mkdir()
            at.write_text(self.write(data))
        return open_reader(at.read_text())

    def change(self, folder: Path) -> None:
        files = [path for path in (folder / "data").rglob("*") if path.is_file()]
        old = {path: path.stat().st_mtime_ns for path in files}
        for path in files:
            path.unlink()
        self.write(folder / "data", shift=1)
        for path, changed in old.items():  # The file system's clock may be coarse.
            if path.exists() and path.stat().st_mtime_ns == changed:
                os.utime(path, (time.time() + 5, time.time() + 5))


class TestFolder(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        for k in range(COUNT):
            (data / "ab"[k % 2]).mkdir(exist_ok=True)
            (data / "ab"[k % 2] / f"{k:03d}.jpg").write_bytes(image(k) + bytes(shift))
        return str(data)

    def expected(self) -> Rows:
        order = [*range(0, COUNT, 2), *range(1, COUNT, 2)]
        return [{"image": image(k), "label": k % 2} for k in order]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestShard(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        source = data.parent / f"source{shift}"
        source.mkdir()
        TestFolder().write(source, shift)
        pack(str(source), str(data / f"packed{shift}"), order="source")
        os.replace(data / f"packed{shift}", data / "packed")
        return str(data / "packed")

    def change(self, folder: Path) -> None:
        (folder / "data" / "packed").rename(folder / "before")
        self.write(folder / "data", shift=1)

    def expected(self) -> Rows:
        return TestFolder().expected()

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestTar(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        with tarfile.open(data / "a.tar", "w") as archive:
            for k in range(COUNT):
                for extension, content in (("jpg", image(k)), ("cls", b"%d" % (k % 2))):
                    member = tarfile.TarInfo(f"{k + shift:06d}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return str(data)

    def expected(self) -> Rows:
        return [{"jpg": image(k), "cls": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestHdf5(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        with h5py.File(data / "a.h5", "w") as file:
            file["x"] = np.stack([numbers(k) for k in range(COUNT)]) + shift
            file["label"] = [k % 2 for k in range(COUNT)]
        return str(data / "a.h5")

    def expected(self) -> Rows:
        return [{"x": numbers(k), "label": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestZarr(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        group = zarr.open_group(str(data / "a.zarr"), mode="w")
        rows = np.stack([numbers(k) for k in range(COUNT)]) + shift
        group.create_array("x", data=rows, chunks=(20, 6))
        group.create_array("label", data=np.arange(COUNT) % 2, chunks=(20,))
        return str(data / "a.zarr")

    def expected(self) -> Rows:
        return [{"x": numbers(k), "label": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestParquet(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        table = pa.table(
            {
                "image": [image(k) + bytes(shift) for k in range(COUNT)],
                "label": [k % 2 for k in range(COUNT)],
            }
        )
        pq.write_table(table, data / "a.parquet", row_group_size=20)
        return str(data / "a.parquet")

    def expected(self) -> Rows:
        return [{"image": image(k), "label": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestArrow(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        table = pa.table(
            {
                "image": [image(k) + bytes(shift) for k in range(COUNT)],
                "label": [k % 2 for k in range(COUNT)],
                "x": [numbers(k).tolist() for k in range(COUNT)],
            }
        )
        with (
            pa.OSFile(str(data / "a.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=20)
        return str(data)

    def expected(self) -> Rows:
        return [{"image": image(k), "label": k % 2, "x": numbers(k)} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestTables(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        np.savez(
            data / "a.npz",
            x=np.stack([numbers(k) for k in range(COUNT)]) + shift,
            label=np.arange(COUNT) % 2,
        )
        return str(data / "a.npz")

    def expected(self) -> Rows:
        return [{"x": numbers(k), "label": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestFiles(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        for k in range(COUNT):
            (data / "ab"[k % 2]).mkdir(exist_ok=True)
            array = np.tile(numbers(k), (1 + k % 3, 1)) + shift
            np.save(data / "ab"[k % 2] / f"{k:03d}.npy", array)
        return str(data)

    def expected(self) -> Rows:
        order = [*range(0, COUNT, 2), *range(1, COUNT, 2)]
        return [{"data": np.tile(numbers(k), (1 + k % 3, 1)), "label": k % 2} for k in order]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class TestTfRecord(FormatTests):
    def write(self, data: Path, shift: int = 0) -> str:
        for shard in range(2):
            rows: Iterator[tfrecords.Values] = (
                {"image": [image(k) + bytes(shift)], "label": [k % 2], "x": numbers(k).tolist()}
                for k in range(shard * COUNT // 2, (shard + 1) * COUNT // 2)
            )
            tfrecords.write(data / f"a-{shard:05d}-of-00002", map(tfrecords.example, rows))
        return str(data)

    def expected(self) -> Rows:
        return [{"image": image(k), "label": k % 2, "x": numbers(k)} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        for path in (folder / "data").iterdir():
            os.truncate(path, 40)


class TestMds(FormatTests):
    """Shards as MosaicML's MDSWriter writes them."""

    def write(self, data: Path, shift: int = 0) -> str:
        bodies = []
        for k in range(COUNT):
            content = image(k + shift)
            head = np.uint32(len(content)).tobytes()
            bodies.append(head + content + np.int64(k % 2).tobytes())
        ends = np.cumsum([4 * (COUNT + 2), *map(len, bodies)]).astype("<u4")
        raw = np.uint32(COUNT).tobytes() + ends.tobytes() + b"".join(bodies)
        (data / "shard.0.mds").write_bytes(raw)
        shard = {
            "format": "mds",
            "samples": COUNT,
            "column_names": ["image", "label"],
            "column_encodings": ["jpeg", "int"],
            "column_sizes": [None, 8],
            "raw_data": {"basename": "shard.0.mds", "bytes": len(raw), "hashes": {}},
            "zip_data": None,
            "compression": None,
        }
        (data / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
        return str(data)

    def expected(self) -> Rows:
        return [{"image": image(k), "label": k % 2} for k in range(COUNT)]

    def damage(self, folder: Path, sample: int) -> None:
        cut_off(folder / "data")


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set that reads a file for each sample."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # Not np.load: in Python 3.11, threads that parse literals at a time may fail by chance
        # ("AST constructor recursion depth mismatch").
        rows = np.fromfile(self.path, np.float32).reshape(COUNT, -1)
        return torch.from_numpy(rows[index]), index % 2


class TestMapStyle(ReaderTests):
    def make(self, folder: Path) -> Reader:
        if not (folder / "x.bin").exists():
            np.stack([numbers(k) for k in range(COUNT)]).tofile(folder / "x.bin")
        return open_reader(Numbers(folder / "x.bin"))

    def expected(self) -> Rows:
        return [{"0": numbers(k), "1": k % 2} for k in range(COUNT)]

    def change(self, folder: Path) -> None:
        np.stack([numbers(k + 1) for k in range(COUNT)]).tofile(folder / "x.bin")

    def damage(self, folder: Path, sample: int) -> None:
        (folder / "x.bin").write_bytes(b"")
