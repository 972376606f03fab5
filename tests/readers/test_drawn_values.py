"""Values of arrays and scans drawn by hypothesis are those that their formats' libraries read: of
any type, byte order and layout, scaled as headers say, as rows and as one file a sample."""

import gzip
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn_arrays

from dlio.data.reader import open_reader
from dlio_staging.pack_folder import pack
from tests.readers import test_differential

Array = npt.NDArray[Any]
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking, which writes hundreds of files."""
QUIET = settings(suppress_health_check=list(HealthCheck), phases=PHASES)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.


NUMBERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")


@st.composite
def arrays(
    draw: st.DrawFn, shape: Sequence[int], types: Sequence[str] = (*NUMBERS, "?", "c8")
) -> Array:
    """An array of one of these types, in either byte order, and in C's or Fortran's layout."""
    kind = draw(st.sampled_from(types))
    order = draw(st.sampled_from("<>")) if kind not in ("?", "i1", "u1") else "|"
    values = draw(drawn_arrays.arrays(f"{order}{kind}", tuple(shape)))
    return np.asfortranarray(values) if draw(st.booleans()) else values


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Array]:
    """One to three arrays of as many rows."""
    count = draw(st.integers(1, 6))
    sides = st.lists(st.integers(1, 4), max_size=3)
    return {
        name: draw(arrays([count, *draw(sides)]))
        for name in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]]))
    }


class Opened:
    """A data set's samples, labels and names, and the kinds of its fields."""

    def __init__(self, path: str) -> None:
        reader = open_reader(path)
        payloads = reader.read(np.arange(len(reader)))
        self.samples = [reader.schema.split(payload) for payload in payloads]
        self.kinds = {name: kind.text for name, kind in reader.schema.kinds.items()}
        self.labels = np.asarray(reader.labels).tolist()
        self.names = [reader.name(k) for k in range(len(reader))]
        reader.close()

    def has(self, k: int, field: str, theirs: Array) -> bool:
        """True if a sample has the same numbers, of the same type but for its byte order."""
        dtype = theirs.dtype.newbyteorder("=")
        ours = np.asarray(self.samples[k][field])
        if self.kinds[field].partition("[")[0] != dtype.name or ours.shape != theirs.shape:
            return False
        return bool(np.array_equal(ours, theirs.astype(dtype), equal_nan=dtype.kind != "b"))


# Rows of arrays


def _npz(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    save: Any = np.savez
    save(path, **columns)
    with np.load(path) as back:
        return dict(back)


def _packed_npz(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    save: Any = np.savez_compressed
    save(path, **columns)
    with np.load(path) as back:
        return dict(back)


def _hdf5(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            chunks = None if name == "a" else tuple(min(2, side) for side in column.shape)
            file.create_dataset(name, data=column, chunks=chunks)
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def _zarr(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    form: Any = 2 if "b" in columns else 3
    root: Any = zarr.open_group(str(path), mode="w", zarr_format=form)
    for name, column in columns.items():
        root.create_array(name, data=column, chunks=tuple(min(3, side) for side in column.shape))
    return {name: array[...] for name, array in root.arrays()}


def _npy(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    np.save(path, columns["a"])
    return {"data": np.load(path)}


def _tar(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    with tarfile.open(path, "w") as archive:
        for k in range(len(columns["a"])):
            for name, column in columns.items():
                memory = io.BytesIO()
                np.save(memory, column[k])
                info = tarfile.TarInfo(f"{k}.{name}.npy")
                info.size = len(memory.getvalue())
                archive.addfile(info, io.BytesIO(memory.getvalue()))
    return {f"{name}.npy": column for name, column in columns.items()}


def _as_pack(path: Path, columns: Mapping[str, Array]) -> Mapping[str, Array]:
    """As the packing of a `.npz`, whose samples come in the order of their numbers."""
    count = np.arange(len(columns["a"]))
    _npz(path.with_suffix(".npz"), {**columns, "label": count})
    pack(str(path.with_suffix(".npz")), str(path))
    return {**columns, "label": count}


Write = Callable[[Path, Mapping[str, Array]], Mapping[str, Array]]
WRITERS: dict[str, tuple[str, Write]] = {
    "npz": ("a.npz", _npz),
    "packed npz": ("b.npz", _packed_npz),
    "npy": ("a.npy", _npy),
    "hdf5": ("a.h5", _hdf5),
    "zarr": ("a.zarr", _zarr),
    "tar": ("a.tar", _tar),
    "shard": ("packed", _as_pack),
}


@QUIET
@given(columns=rows())
def test_rows_have_the_values_and_types_that_libraries_read(
    columns: dict[str, Array], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for form, (name, write) in WRITERS.items():
        theirs = write(folder / name, columns)
        opened = Opened(str(folder / name))
        assert sorted(opened.kinds) == sorted(theirs), form
        for field, values in theirs.items():
            assert len(opened.samples) == len(values)
            for k, value in enumerate(values):
                place = opened.labels.index(k) if form == "shard" else k
                assert opened.has(place, field, np.asarray(value)), (form, field, values.dtype)


# One file a sample


@st.composite
def volumes(draw: st.DrawFn) -> list[Array]:
    """Arrays of one type, of three dimensions of any size."""
    kind = [draw(st.sampled_from(("u1", "i2", "f4", "f8")))]
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=2, max_size=4))
    return [draw(arrays(shape, kind)) for shape in shapes]


@QUIET
@given(files=volumes(), data=st.data())
def test_arrays_one_a_file_in_class_folders(
    files: list[Array], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    form = data.draw(st.sampled_from(["npy", "npz", "h5"]))
    classes = [str(data.draw(st.sampled_from("ab"))) for _ in files[1:]] + ["c"]
    for k, (kind, values) in enumerate(zip(classes, files, strict=True)):
        path = folder / kind / f"{k}.{form}"
        path.parent.mkdir(exist_ok=True)
        if form == "npy":
            np.save(path, values)
        elif form == "npz":
            np.savez(path, data=values)
        else:
            with h5py.File(path, "w") as file:
                file["data"] = values
    opened = Opened(str(folder))
    assert len(opened.samples) == len(files)
    for place, (label, name) in enumerate(zip(opened.labels, opened.names, strict=True)):
        k = int(Path(name).stem)
        assert sorted(set(classes))[label] == classes[k]
        assert np.array_equal(opened.samples[place]["data"], files[k], equal_nan=True), form


@st.composite
def niftis(draw: st.DrawFn) -> tuple[str, bytes, Array]:
    """A scan: the end of its name, the file, and its values as nibabel reads them."""
    nibabel = pytest.importorskip("nibabel")
    kind = draw(st.sampled_from([nibabel.Nifti1Header, nibabel.Nifti2Header]))
    order = draw(st.sampled_from("<>"))
    types = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    dtype = np.dtype(f"{order}{draw(st.sampled_from(types))}")
    whole = drawn_arrays.from_dtype(dtype)
    numbers = st.floats(-1e6, 1e6, width=32) if dtype.kind == "f" else whole
    values = draw(drawn_arrays.arrays(dtype, tuple(shape), elements=numbers))
    header = kind(endianness=order)
    header.set_data_shape(values.shape)
    header.set_data_dtype(values.dtype)
    factors = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, 1000.0])
    if draw(st.booleans()):
        header["scl_slope"], header["scl_inter"] = draw(factors), draw(factors)
    header["magic"] = b"n+1" if kind is nibabel.Nifti1Header else header["magic"]
    gap = draw(st.sampled_from([0, 0, 16, 48]))
    header["vox_offset"] = header.single_vox_offset + gap
    head = header.binaryblock + bytes(header.single_vox_offset + gap - len(header.binaryblock))
    body = head + values.tobytes(order="F")
    image = nibabel.Nifti1Image if kind is nibabel.Nifti1Header else nibabel.Nifti2Image
    theirs = np.asarray(image.from_bytes(body).dataobj)
    if draw(st.booleans()):
        return ".nii.gz", gzip.compress(body, 1), theirs
    return ".nii", body, theirs


def _is_close(ours: object, theirs: Array) -> bool:
    """True for the values themselves, or, of those that are scaled, for their 32 bits."""
    made = np.asarray(ours)
    if made.dtype == theirs.dtype.newbyteorder("="):
        return bool(np.array_equal(made, theirs, equal_nan=True))
    with np.errstate(over="ignore"):
        wanted = theirs.astype(np.float32)
    assert made.dtype == np.float32
    return bool(np.allclose(made, wanted, rtol=1e-5, atol=1e-5, equal_nan=True))


@QUIET
@given(scans=st.lists(niftis(), min_size=1, max_size=4))
def test_scans_are_scaled_as_by_nibabel(
    scans: list[tuple[str, bytes, Array]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("scans")
    for k, (end, body, theirs) in enumerate(scans):
        (folder / f"{k}{end}").write_bytes(body)
        (sample,) = Opened(str(folder / f"{k}{end}")).samples
        assert _is_close(sample["image"], theirs), (end, theirs.dtype, theirs)


@QUIET
@given(seed=st.integers(0, 1 << 32))
def test_scans_have_the_values_of_pydicom(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("scans")
    rng = np.random.default_rng(seed)
    expected = {}
    for k in range(3):
        (folder / str(k)).mkdir()
        (folder / "drawn").mkdir()
        _, values, odd = test_differential.dicom(rng, folder / "drawn")
        (path,) = (folder / "drawn").iterdir()
        path.rename(folder / str(k) / path.name)
        (folder / "drawn").rmdir()
        if odd:
            (folder / str(k) / path.name).unlink()
            (folder / str(k)).rmdir()
        else:
            expected[str(k)] = values["image"][0]
    for name, theirs in expected.items():
        (sample,) = Opened(str(folder / name)).samples
        assert _is_close(sample["image"], np.asarray(theirs)), theirs.dtype
