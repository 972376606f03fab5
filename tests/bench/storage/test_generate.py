"""Data of every format is read back, by dlio and by the format's own library, to the same bytes."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import dlio
from dlio.data.schema import Buffer
from dlio_bench.emulated import emulated_mount as slowfs
from dlio_bench.storage_cases.generate import GeneratedData, generate
from dlio_bench.storage_cases.generate.content import payload, sample_sizes
from dlio_bench.storage_cases.generate.format_writers import WRITERS, FilePart
from dlio_bench.storage_cases.generate.stamp import STAMP
from dlio_bench.storage_cases.workload import FORMATS, Format, Workload

Bytes = Buffer | npt.NDArray[np.uint8]


def shape(format_: Format, files: int = 4, per_file: int = 3, stdev: float = 0.0) -> Workload:
    return Workload(
        name="tried",
        format=format_,
        files=files,
        samples_per_file=per_file,
        sample_bytes=3000,
        sample_bytes_stdev=stdev,
        batch_size=2,
        step_s=0.01,
        seed=5,
    )


SHAPES = [
    *(shape(each) for each in FORMATS if each != "folder"),
    *(shape(each, 5, 1) for each in FORMATS),
    *(shape(each, 5, 1, stdev=900) for each in FORMATS if each != "zarr"),
    *(shape(each, stdev=900) for each in ("tar", "parquet", "tfrecord", "native")),
    *(shape(each, 1, 1) for each in FORMATS),
]


def name_of(workload: Workload) -> str:
    varied = "varied" if workload.sample_bytes_stdev else "equal"
    return f"{workload.format}-{workload.files}x{workload.samples_per_file}-{varied}"


def _check(made: GeneratedData, sample: int, data: Bytes) -> None:
    wanted = payload(made.workload, sample, int(made.sizes[sample]))
    assert np.array_equal(np.frombuffer(data, np.uint8), wanted)


@pytest.mark.parametrize("workload", SHAPES, ids=name_of)
@pytest.mark.daily(
    *(f"{each}-5x1-varied" for each in FORMATS if each != "zarr"),
    *(f"{each}-4x3-equal" for each in ("hdf5", "npz", "zarr")),
    *(f"{each}-4x3-varied" for each in ("native", "parquet", "tar", "tfrecord")),
)
def test_dlio_and_the_formats_library_read_what_was_generated(
    workload: Workload, tmp_path: Path
) -> None:
    made = generate(workload, str(tmp_path / "data"), threads=2)
    assert len(made.files) == made.written_files == workload.files
    assert made.file_bytes >= made.data_bytes
    read = 0
    for data in LIBRARIES[workload.format](made):
        _check(made, read, data)
        read += 1
    assert read == workload.samples
    with dlio.open(made.source, tiers="none", image_size=None, **made.options) as opened:
        reader = opened.reader
        assert len(reader) == workload.samples
        for k in range(len(reader)):
            values = reader.schema.split(reader.read(np.array([k]))[0])
            _check(made, k, np.asarray(values[made.field]).reshape(-1))


def test_files_are_named_as_dlios_own_generator_names_them(tmp_path: Path) -> None:
    generate(shape("npz", 12, 1), str(tmp_path))
    assert sorted(os.listdir(tmp_path / "train")) == [f"img_{k:02d}_of_12.npz" for k in range(12)]
    # DLIO lists this folder even if it evaluates nothing.
    assert os.listdir(tmp_path / "valid") == []


def test_the_seed_decides_all_bytes(tmp_path: Path) -> None:
    workload = shape("npz", 3, 1, stdev=500)
    one, two = (
        generate(workload, str(tmp_path / name), threads=k) for k, name in ((1, "a"), (3, "b"))
    )
    other = generate(replace(workload, seed=6), str(tmp_path / "c"))
    for a, b, c in zip(one.files, two.files, other.files, strict=True):
        assert np.array_equal(np.load(a)["x"], np.load(b)["x"])
        assert not np.array_equal(np.load(a)["x"].ravel()[:64], np.load(c)["x"].ravel()[:64])


def test_data_cannot_be_compressed(tmp_path: Path) -> None:
    import zlib

    made = generate(shape("folder", 8, 1), str(tmp_path / "data"))
    data = b"".join(Path(path).read_bytes() for path in made.files)
    assert len(zlib.compress(data)) > len(data) * 0.99


def test_complete_data_is_not_written_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    workload = shape("tar")
    before = generate(workload, folder)
    times = [os.stat(path).st_mtime_ns for path in before.files]
    # What the accelerator does changes nothing of the data.
    again = generate(replace(workload, name="other", batch_size=9, step_s=2.0), folder)
    assert again.written_files == 0
    assert [os.stat(path).st_mtime_ns for path in again.files] == times


@pytest.mark.skipif(slowfs.why_not() is not None, reason="needs FUSE")
def test_complete_data_is_taken_from_a_read_only_file_system(tmp_path: Path) -> None:
    generate(shape("npz"), str(tmp_path / "data"))
    with slowfs.slow_mount(str(tmp_path)) as mounted:
        made = generate(shape("npz"), f"{mounted}/data")
        assert made.written_files == 0
        with pytest.raises(dlio.UsageError, match=r"cannot be written .*read-only"):
            generate(shape("npz"), f"{mounted}/other")


@pytest.mark.parametrize("format_", ["npz", "zarr"])
def test_an_interrupted_generation_is_continued(
    format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "data")
    workload = shape(format_, 6, 1)
    plain = WRITERS[format_]

    def interrupted(path: str, part: FilePart) -> None:
        plain(path, part)
        if part.number == 3:
            raise KeyboardInterrupt

    monkeypatch.setitem(WRITERS, format_, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(workload, folder, threads=1)
    left = [name for _, _, names in os.walk(folder) for name in names]
    assert not [name for name in left if name.endswith(".writing")]
    monkeypatch.undo()
    made = generate(workload, folder, threads=1)
    assert 0 < made.written_files < 6
    for k, data in enumerate(LIBRARIES[format_](made)):
        _check(made, k, data)


def test_ranks_share_the_files(tmp_path: Path) -> None:
    import threading

    workload = shape("hdf5", 5, 1)
    meeting = threading.Barrier(2, timeout=400)
    made: list[GeneratedData] = []

    def run(rank: int) -> None:
        made.append(
            generate(workload, str(tmp_path / "data"), rank=rank, ranks=2, barrier=meeting.wait)
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.written_files for each in made) == [2, 3]
    assert made[0].files == made[1].files
    for k, data in enumerate(_hdf5(made[0])):
        _check(made[0], k, data)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    strange = tmp_path / "thesis"
    strange.mkdir()
    (strange / "chapter1.tex").write_text("x")
    with pytest.raises(dlio.UsageError, match=r"holds chapter1\.tex.*name another folder"):
        generate(shape("npz"), str(strange))
    assert os.listdir(strange) == ["chapter1.tex"]
    generate(shape("npz"), str(tmp_path / "data"))
    with pytest.raises(dlio.UsageError, match="data of another workload"):
        generate(shape("tar"), str(tmp_path / "data"))
    with pytest.raises(dlio.UsageError, match="does not exist; create it"):
        generate(shape("npz"), str(tmp_path / "no" / "data"))


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    made = generate(shape("npz"), str(folder))
    with open(made.files[1], "ab") as file:
        file.write(b"more")
    with pytest.raises(dlio.UsageError, match="other sizes than those that were generated"):
        generate(shape("npz"), str(folder))
    # A file that was lost is written again.
    os.unlink(made.files[1])
    assert generate(shape("npz"), str(folder)).written_files == 1
    (folder / STAMP).write_text("{")
    with pytest.raises(dlio.UsageError, match="cannot be read"):
        generate(shape("npz"), str(folder))


def test_no_file_is_written_without_room(tmp_path: Path) -> None:
    huge = replace(shape("npz", 2**5, 1), sample_bytes=2**46)
    with pytest.raises(dlio.UsageError, match=r"EiB|TiB are to be written, but .* are free"):
        generate(huge, str(tmp_path / "data"))
    assert os.listdir(tmp_path / "data") in ([STAMP], [])


def test_no_file_is_written_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.statvfs

    def few(path: str) -> os.statvfs_result:
        values = list(plain(path)[:10])
        values[5:8] = [1000, 3, 3]  # Inodes, and those that are free.
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", few)
    with pytest.raises(dlio.UsageError, match="4 files to write, but room for 3 inodes"):
        generate(shape("npz"), str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (shape("folder", 4, 3), "a file of class folders is one sample"),
        (shape("zarr", 4, 3, stdev=5), "rows of zarr have one size"),
        (shape("npz", 4, 3, stdev=5), "rows of npz have one size"),
        (shape("tar", 0, 3), "hold nothing"),
        (replace(shape("tar"), sample_bytes=3), "too small"),
    ],
)
def test_a_shape_that_a_format_cannot_have_is_refused(
    workload: Workload, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(dlio.UsageError, match=reason):
        generate(workload, str(tmp_path / "data"))


@given(
    st.sampled_from(["normal", "lognormal"]),
    st.floats(1e3, 1e8),
    st.floats(0.01, 0.5),
    st.integers(0, 2**32),
)
def test_sizes_have_the_mean_and_the_deviation(
    distribution: str, mean: float, relative: float, seed: int
) -> None:
    workload = replace(
        shape("tar", 200, 100),
        sample_bytes=mean,
        sample_bytes_stdev=relative * mean,
        seed=seed,
        distribution="lognormal" if distribution == "lognormal" else "normal",
    )
    sizes = sample_sizes(workload)
    assert sizes.min() >= 64
    assert abs(sizes.mean() / mean - 1) < 0.05 * 0.5
    # Normal sizes are cut off at 1/8 and 15/8 of the mean: at 1.75 deviations in the worst case.
    assert 0.8 * relative < sizes.std() / mean < 1.1 * relative + 1e-3


def _folder(made: GeneratedData) -> Iterator[Bytes]:
    from PIL import Image

    for path in made.files:
        with Image.open(path) as image:
            image.load()  # A complete image.
        yield Path(path).read_bytes()


def _npz(made: GeneratedData) -> Iterator[Bytes]:
    for path in made.files:
        with np.load(path, allow_pickle=False) as arrays:
            x = arrays["x"]
            assert len(arrays["y"]) == made.workload.samples_per_file
        if made.workload.samples_per_file == 1:
            yield x[..., 0].reshape(-1)  # As DLIO's reader has it.
        else:
            yield from x


def _hdf5(made: GeneratedData) -> Iterator[Bytes]:
    for path in made.files:
        with h5py.File(path) as file:
            for k in range(made.workload.samples_per_file):
                yield file["records_0"][k].reshape(-1)


def _zarr(made: GeneratedData) -> Iterator[Bytes]:
    array = zarr.open_group(made.source.partition("::")[0], mode="r")["x"]
    assert isinstance(array, zarr.Array)
    for k in range(array.shape[0]):
        yield np.asarray(array[k], np.uint8)


def _parquet(made: GeneratedData) -> Iterator[Bytes]:
    for path in made.files:
        yield from pq.read_table(path).column("image").to_pylist()


def _tar(made: GeneratedData) -> Iterator[bytes]:
    for path in made.files:
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                if not member.name.endswith(".cls"):
                    stream = archive.extractfile(member)
                    assert isinstance(stream, io.BufferedReader)
                    yield stream.read()


def _tfrecord(made: GeneratedData) -> Iterator[Bytes]:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    from tests.readers.tfrecords import parse

    for path in made.files:
        records = PyRecordReader_New(path)
        for _ in range(made.workload.samples_per_file):
            records.GetNext()
            values = parse(records.record())
            assert values["size"] == [len(values["image"][0])]
            yield values["image"][0]


def _native(made: GeneratedData) -> Iterator[Bytes]:
    from dlio_staging.verify import verify

    assert verify(made.source).damaged == []
    with dlio.open(made.files, tiers="none") as opened:
        for k in range(len(opened)):
            yield opened[k]["image"]


LIBRARIES: dict[str, Callable[[GeneratedData], Iterator[Bytes]]] = {
    "folder": _folder,
    "npz": _npz,
    "hdf5": _hdf5,
    "zarr": _zarr,
    "parquet": _parquet,
    "tar": _tar,
    "tfrecord": _tfrecord,
    "native": _native,
}
