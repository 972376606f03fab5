"""Files that were damaged by chance are called damaged only if their format's own library refuses
them, too; and where both read one, they read the same values."""

import bz2
import csv
import faulthandler
import gzip
import io
import lzma
import os
import struct
import tarfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from dlio.errors import DlioError, SourceError
from tests.readers import test_differential, tfrecords
from tests.readers.field_values import values_of
from tests.readers.mds_rows import mds_rows

Values = dict[str, list[Any]]
Draw = Callable[[np.random.Generator, Path], str]
DAILY, NIGHTLY = 6, 400
FEWER = {"hdf5": 150}
CRASHES = ("hdf5",)
"""Formats whose libraries end the process for some files: each file has a process of its own."""
WORDS = ("damaged", "restore it", "corrupt", "cut off")


@dataclass(frozen=True)
class Format:
    """A format: a function that writes a data set and returns its path, and its library."""

    draw: Draw
    read: Callable[[str], Values]
    """Returns the values that the library reads. Raises any error for a file that it refuses."""
    exact: bool = True
    """True if values are compared."""


def _numbers(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(0, 100, shape).astype(str(rng.choice(["<i2", "<f4", "|u1", ">i4"])))


# Columns


def _table(rng: np.random.Generator) -> pa.Table:
    words = [str(word) for word in rng.choice(["a", "bc", "", "long " * 9], 30)]
    numbers = rng.integers(0, 1000, 30)
    return pa.table({"n": numbers, "t": words, "l": [[1.5, k] for k in range(30)]})


def _parquet(rng: np.random.Generator, folder: Path) -> str:
    packed = str(rng.choice(["none", "snappy", "zstd", "gzip"]))
    pq.write_table(_table(rng), folder / "a.parquet", row_group_size=11, compression=packed)
    return str(folder / "a.parquet")


def _arrow(rng: np.random.Generator, folder: Path) -> str:
    table = _table(rng)
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    return str(folder / "a.arrow")


def _read_arrow(path: str) -> Values:
    with pa.OSFile(path) as file:
        table = pa.ipc.open_file(file).read_all()
    table.validate(full=True)
    return dict(table.to_pydict())


def _read_parquet(path: str) -> Values:
    table = pq.read_table(path)
    table.validate(full=True)
    return dict(table.to_pydict())


def _npz(rng: np.random.Generator, folder: Path) -> str:
    save: Any = np.savez_compressed if rng.integers(2) else np.savez
    save(folder / "a.npz", x=_numbers(rng, 20, 3), y=_numbers(rng, 20))
    return str(folder / "a.npz")


def _read_npz(path: str) -> Values:
    with np.load(path) as arrays:
        return {name: list(arrays[name]) for name in arrays.files}


def _hdf5(rng: np.random.Generator, folder: Path) -> str:
    with h5py.File(folder / "a.h5", "w") as file:
        packed: Any = [None, "gzip", "lzf"][int(rng.integers(3))]
        check = bool(rng.integers(2))
        data = _numbers(rng, 20, 3)
        file.create_dataset("x", data=data, chunks=(7, 3), compression=packed, fletcher32=check)
        file["y"] = _numbers(rng, 20)
    return str(folder / "a.h5")


def _read_hdf5(path: str) -> Values:
    with h5py.File(path) as file:
        return {name: list(file[name][...]) for name in file}


def _zarr(rng: np.random.Generator, folder: Path) -> str:
    form: Any = int(rng.choice([2, 3]))
    root: Any = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=form)
    more: dict[str, Any] = {"shards": (8, 4)} if form == 3 and rng.integers(2) else {}
    made = root.create_array("x", shape=(20, 3), dtype="<i4", chunks=(4, 2), **more)
    made[...] = rng.integers(0, 100, (20, 3))
    other = root.create_array("y", shape=(20,), dtype="<f4", chunks=(6,), compressors=None)
    other[...] = rng.random(20)
    return str(folder / "a.zarr")


def _read_zarr(path: str) -> Values:
    for each in Path(path).rglob("[0-9]*.[0-9]*"):
        data = each.read_bytes()
        # numcodecs reads on behind the end of such a chunk of Blosc (default of version 2).
        if len(data) >= 16 and struct.unpack_from("<I", data, 12)[0] > len(data):
            raise EOFError("cut off")
    root: Any = zarr.open_group(path, mode="r")
    return {name: list(array[...]) for name, array in root.arrays()}


def _csv(rng: np.random.Generator, folder: Path) -> str:
    pack: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    kind = str(rng.choice(sorted(pack)))
    rows = "".join(f"{a},{b}\n" for a, b in rng.integers(0, 1000, (40, 2)))
    path = folder / f"a.csv.{kind}"
    path.write_bytes(pack[kind](f"a,b\n{rows}".encode()))
    return str(path)


def _read_csv(path: str) -> Values:
    opens: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    with opens[path.rpartition(".")[2]](path, "rt", encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file, strict=True)
    columns = zip(*rows, strict=True)
    return {name: [int(x) for x in own] for name, own in zip(head, columns, strict=True)}


# Samples


def _mds(rng: np.random.Generator, folder: Path) -> str:
    streaming = pytest.importorskip("streaming")
    columns = {"y": "int", "t": "str", "b": "bytes"}
    packed = [None, "gz", "zstd", "br", "snappy", "bz2"][int(rng.integers(6))]
    with streaming.MDSWriter(
        out=str(folder / "a"), columns=columns, compression=packed, size_limit=300
    ) as writer:
        for k in range(20):
            writer.write({"y": k, "t": "t" * k, "b": rng.bytes(5)})
    return str(folder / "a")


def _read_mds(path: str) -> Values:
    rows = mds_rows(path)
    return {name: [row[name] for row in rows] for name in ("y", "t", "b")}


def _tar(rng: np.random.Generator, folder: Path) -> str:
    kind = str(rng.choice(["", ":gz", ":bz2", ":xz"]))
    path = folder / f"a.tar{kind.replace(':', '.')}"
    form = int(rng.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]))
    mode: Any = f"w{kind}"
    with tarfile.open(path, mode, format=form) as archive:
        for k in range(6):
            body = rng.bytes(int(rng.integers(1, 1500)))
            long = "d" * 90 + "/" if k % 2 and form != tarfile.USTAR_FORMAT else ""
            info = tarfile.TarInfo(f"{long}{k}.bin")
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return str(path)


def _read_tar(path: str) -> Values:
    opens: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    if (suffix := path.rpartition(".")[2]) in opens:
        with opens[suffix](path) as file:
            file.read()  # tarfile does not read to the end, where the checksum is.
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        bodies = [archive.extractfile(member) for member in members]
        values = [body.read() for body in bodies if body is not None]
        for member, value in zip(members, values, strict=True):
            if len(value) != member.size:
                raise EOFError("cut off")
        # tarfile ends without a word at a header that is none.
        assert archive.fileobj is not None
        archive.fileobj.seek(archive.offset)
        if any(archive.fileobj.read(512)):
            raise tarfile.ReadError("no header, and no end mark")
    return {"bin": values}


def _tfrecord(rng: np.random.Generator, folder: Path) -> str:
    rows = [tfrecords.example({"y": [k], "b": [rng.bytes(9)]}) for k in range(9)]
    tfrecords.write(folder / "a.tfrecord", rows)
    return str(folder / "a.tfrecord")


def _masked_crc(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_tfrecord(path: str) -> Values:
    data, at = Path(path).read_bytes(), 0
    while at < len(data):
        size, check = struct.unpack_from("<QI", data, at)
        body = data[at + 12 : at + 12 + size]
        if check != _masked_crc(data[at : at + 8]) or len(body) != size:
            raise ValueError("length")
        if struct.unpack_from("<I", data, at + 12 + size)[0] != _masked_crc(body):
            raise ValueError("data")
        at += 16 + size
    return {}


# Scans


def _nifti(rng: np.random.Generator, folder: Path) -> str:
    nibabel = pytest.importorskip("nibabel")
    data = rng.integers(0, 100, (4, 5, 6)).astype(str(rng.choice(["<i2", "<f4", "|u1"])))
    image = nibabel.Nifti1Image(data, np.eye(4))
    if rng.integers(2):
        image.header.set_slope_inter(2.0, 1.0)
    path = folder / str(rng.choice(["a.nii", "a.nii.gz"]))
    nibabel.save(image, path)
    return str(path)


def _read_nifti(path: str) -> Values:
    nibabel = pytest.importorskip("nibabel")
    return {"image": [np.asarray(nibabel.load(path).dataobj)]}


def _dicom(rng: np.random.Generator, folder: Path) -> str:
    return test_differential.dicom(rng, folder)[0]


def _read_dicom(path: str) -> Values:
    pydicom = pytest.importorskip("pydicom")
    return {"image": [pydicom.dcmread(each).pixel_array for each in Path(path).iterdir()]}


FORMATS = {
    "parquet": Format(_parquet, _read_parquet),
    "arrow": Format(_arrow, _read_arrow),
    "npz": Format(_npz, _read_npz),
    "hdf5": Format(_hdf5, _read_hdf5),
    "zarr": Format(_zarr, _read_zarr),
    "csv": Format(_csv, _read_csv),
    "mds": Format(_mds, _read_mds),
    "tar": Format(_tar, _read_tar),
    "tfrecord": Format(_tfrecord, _read_tfrecord, exact=False),
    "nifti": Format(_nifti, _read_nifti),
    # Values are rescaled by dlio alone.
    "dicom": Format(_dicom, _read_dicom, exact=False),
}


def damage(rng: np.random.Generator, path: Path) -> str:
    """Damage a file, or one of a folder, by chance; return the way."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    victim = files[int(rng.integers(len(files)))]
    data = bytearray(victim.read_bytes())
    at = int(rng.integers(len(data)))
    way = str(rng.choice(["flip", "flips", "cut", "cut end", "extend", "zeros", "hole", "lost"]))
    if way == "flip":
        data[at] ^= 1 << int(rng.integers(8))
    elif way == "flips":
        data[at : at + 4] = rng.bytes(len(data[at : at + 4]))
    elif way == "cut":
        del data[at:]
    elif way == "cut end":
        del data[-int(rng.integers(1, 9)) :]
    elif way in ("extend", "zeros"):
        data += rng.bytes(7) if way == "extend" else bytes(700)
    elif way == "hole":
        data[at : at + 40] = bytes(len(data[at : at + 40]))
    else:
        del data[at : at + int(rng.integers(1, 20))]
    victim.write_bytes(data)
    return f"{way} at {at} of {victim.name}"


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, bytes | str):
        return bytes(ours) == (theirs.encode() if isinstance(theirs, str) else theirs)
    if theirs is None:
        return True
    return bool(np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True))


def check(name: str, seed: int, folder: Path) -> None:
    """Damage a drawn file, and compare the two verdicts and values."""
    rng, form = np.random.default_rng(seed), FORMATS[name]
    path = form.draw(rng, folder)
    done = damage(rng, Path(path))
    refusal, theirs = "", None
    try:
        theirs = form.read(path)
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        refusal = f"{type(error).__name__}: {error}"
    try:
        ours = values_of(path)
    except DlioError as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        called = any(word in text for word in WORDS)
        assert refusal or not called, f"{done}: the library reads it; {text}"
        return
    if theirs is None or not form.exact:
        return
    assert sorted(ours) == sorted(theirs), done
    for field, values in theirs.items():
        assert len(ours[field]) == len(values), (done, field)
        for mine, value in zip(ours[field], values, strict=True):
            assert _same(mine, value), (done, field, mine, value)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_damage_is_called_so_only_where_the_library_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_many(name, range(DAILY), tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_and_for_many(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_many(name, range(DAILY, FEWER.get(name, NIGHTLY)), tmp_path, monkeypatch)


def _check_many(name: str, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.
    crashed: list[int] = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name not in CRASHES:
                check(name, seed, folder)
            elif _dies(partial(check, name, seed, folder)):
                crashed.append(seed)
    monkeypatch.delenv("DLIO_TRUST")
    for seed in crashed:
        with pytest.raises(SourceError, match=r"ends the process that reads it \(SIG[A-Z]+\)"):
            values_of(str(tmp_path / str(seed) / "a.h5"))


def _dies(work: Callable[[], None]) -> bool:
    """Do some work in a copy of this process; return True if a signal ends it. Fails as the work
    does."""
    child = os.fork()
    if child == 0:
        status = 1
        faulthandler.disable()
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see the child's traceback"
    return os.WIFSIGNALED(status)
