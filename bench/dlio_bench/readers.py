"""`dlio bench readers`: each reader compared with the format's own library on the same file."""

import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import simplejpeg

from dlio.cli.option_records import OutputOptions
from dlio.data.reader import open_reader
from dlio.util.options import CheckedOptions, Option
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.repeats import ratio, spread
from dlio_bench.results.terminal import advance, expect, table, working
from dlio_staging.pack_folder import pack

FORMATS = ("folder", "shard", "tar", "hdf5", "hdf5-gzip", "zarr", "parquet", "npy", "mds")
_BLOCK = 64


_PICTURE = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))


@dataclass(frozen=True, slots=True)
class ReaderCase(CheckedOptions):
    """Data that is read: samples of random bytes, or of float32 where a format is for arrays."""

    samples: Annotated[int, Option("Number of samples of each data set.", least=_BLOCK)] = 2000
    sample_bytes: Annotated[int, Option("Size of each sample.", unit="bytes", least=64)] = 110_000
    random_reads: int = 500
    repeats: Annotated[int, Option("Timed passes of each figure.", least=1)] = 5


@dataclass(frozen=True, slots=True)
class Formats(CheckedOptions):
    """Formats to measure."""

    formats: Annotated[
        tuple[str, ...],
        Option("Format to measure. Repeatable.", name="format", choices=FORMATS),
    ] = FORMATS


@dataclass(frozen=True, slots=True)
class _Peer:
    """Reads samples with the format's own library."""

    library: str
    path: str
    one: Callable[[int], int]
    """Read a sample; returns its bytes."""
    all: Callable[[], int] | None = None
    """Read all in their order; returns the bytes. None to read them one by one."""
    close: Callable[[], None] = lambda: None


def measure(formats: Sequence[str], case: ReaderCase) -> dict[str, object]:
    """For each format: samples/s and MB/s of a pass in blocks and of `read` of random samples, of
    dlio and of the library, in turn within each repeat; and of `dlio pack` to native shards."""
    results: dict[str, Any] = {}
    chosen = np.random.default_rng(1).integers(0, case.samples, case.random_reads)
    for name in formats:
        with tempfile.TemporaryDirectory(prefix="readers-bench-") as folder:
            expect(2 + case.repeats)
            advance(f"{name}: writing", 0)
            peer = _WRITERS[name](folder, case)
            rates: dict[str, list[float]] = {
                key: [] for key in ("pass", "library_pass", "random", "library_random", "pack")
            }
            reader = open_reader(peer.path)
            size = int(reader.sizes.sum(dtype=np.int64))
            for repeat in range(case.repeats + 1):
                advance(f"{name}: repeat {repeat} of {case.repeats}")
                timed: dict[str, Callable[[], int]] = {
                    "pass": partial(_pass, reader),
                    "library_pass": peer.all or partial(_one_by_one, peer, range(case.samples)),
                    "random": partial(_random, reader, chosen),
                    "library_random": partial(_one_by_one, peer, chosen.tolist()),
                }
                for key, run in timed.items():
                    started = time.perf_counter()
                    run()
                    seconds = time.perf_counter() - started
                    count = case.samples if "pass" in key else case.random_reads
                    if repeat:
                        rates[key].append(count / seconds)
            advance(f"{name}: packing")
            started = time.perf_counter()
            pack(peer.path, os.path.join(folder, "packed"), compress="none", restart_rows=False)
            rates["pack"].append(case.samples / (time.perf_counter() - started))
            reader.close()
            peer.close()
            results[name] = {
                "library": peer.library,
                "bytes": size,
                "mean_bytes": size / case.samples,
                **{f"{key}_samples_per_s": spread(values) for key, values in rates.items()},
                "pass_over_library": ratio(rates["pass"], rates["library_pass"]),
                "random_over_library": ratio(rates["random"], rates["library_random"]),
            }
    packages = ("dlio", "h5py", "zarr", "pyarrow", "numpy", "webdataset", "mosaicml-streaming")
    return {
        "benchmark": "readers",
        "case": asdict(case),
        "formats": results,
        "machine": describe_machine(packages),
    }


def command(case: ReaderCase, formats: Formats, output: OutputOptions) -> None:
    """Measure each reader, compared with the format's own library on the same files.

    Files are in the page cache. Figures are samples/s of passes in blocks, of random samples, and
    of packing.
    """
    start = begin(output)
    case = replace(case, random_reads=min(case.random_reads, case.samples))
    with working("readers"):
        report: dict[str, Any] = measure(formats.formats, case)
    headings = ("format", "library", "pass", "its", "ratio", "random", "its", "ratio", "pack")
    rows = []
    for name, figures in report["formats"].items():
        row = [name, figures["library"]]
        for kind in ("pass", "random"):
            rates = (figures[f"{key}_samples_per_s"] for key in (kind, f"library_{kind}"))
            row += [f"{rate['median']:,.0f}" for rate in rates]
            row.append(f"{figures[f'{kind}_over_library']['median']:.2f}")
        rows.append([*row, f"{figures['pack_samples_per_s']['median']:,.0f}"])
    table("samples/s, median", headings, rows, left=2)
    results = results_of(
        "readers",
        report,
        settings={**asdict(case), "formats": formats.formats},
        seeds={"data": 0, "random": 1},
        paths=(tempfile.gettempdir(),),
    )
    finish(output, results, start)


def _pass(reader: Any) -> int:
    blocks = map(reader.layout.samples_of, range(reader.layout.blocks))
    return sum(len(payload) for block in blocks for payload in reader.read(block))


def _random(reader: Any, chosen: Any) -> int:
    return sum(len(reader.read(chosen[k : k + 1])[0]) for k in range(len(chosen)))


def _one_by_one(peer: _Peer, samples: Iterable[int]) -> int:
    return sum(map(peer.one, samples))


def _bodies(case: ReaderCase) -> Iterator[bytes]:
    generator = np.random.default_rng(0)
    for _ in range(case.samples):
        # Decoders skip bytes behind a picture's end, and `dlio pack` counts none as undecodable.
        yield _PICTURE + generator.bytes(max(0, case.sample_bytes - len(_PICTURE)))


def _folder(folder: str, case: ReaderCase) -> _Peer:
    files = []
    for i, body in enumerate(_bodies(case)):
        path = f"{folder}/data/class{i % 10}/{i:06d}.jpg"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(body)
        files.append(path)

    def one(i: int) -> int:
        with open(files[i], "rb") as file:
            return len(file.read())

    return _Peer("open().read()", f"{folder}/data", one)


def _shard(folder: str, case: ReaderCase) -> _Peer:
    peer = _folder(folder, case)
    pack(peer.path, f"{folder}/shards", restart_rows=False)
    return _Peer("open().read(), files", f"{folder}/shards", peer.one)


def _tar(folder: str, case: ReaderCase) -> _Peer:
    import tarfile

    path = f"{folder}/a.tar"
    with tarfile.open(path, "w") as archive:
        for i, body in enumerate(_bodies(case)):
            for extension, data in (("jpg", body), ("cls", b"%d" % (i % 10))):
                info = tarfile.TarInfo(f"{i:06d}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    opened = tarfile.open(path)  # noqa: SIM115 - for the whole measurement
    members = [member for member in opened.getmembers() if member.name.endswith("jpg")]

    def one(i: int) -> int:
        stream = opened.extractfile(members[i])
        assert stream is not None
        return len(stream.read())

    def whole() -> int:
        try:
            import webdataset
        except ImportError:
            return sum(map(one, range(len(members))))
        return sum(len(s["jpg"]) for s in webdataset.WebDataset(path, shardshuffle=False))

    return _Peer("webdataset; tarfile", path, one, whole, opened.close)


def _array_peer(
    library: str, path: str, opened: Any, close: Callable[[], None] = lambda: None
) -> _Peer:
    """Rows of an array; those of a mapped file are copied into memory."""
    count = opened.shape[0]

    def whole() -> int:
        return sum(np.array(opened[k : k + _BLOCK]).nbytes for k in range(0, count, _BLOCK))

    return _Peer(library, path, lambda i: np.array(opened[i]).nbytes, whole, close)


def _rows(case: ReaderCase) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first, rows) of blocks of an array of float32."""
    generator = np.random.default_rng(0)
    for start in range(0, case.samples, _BLOCK):
        rows = min(_BLOCK, case.samples - start)
        yield start, generator.integers(0, 99, (rows, case.sample_bytes // 4)).astype("f4")


def _hdf5(folder: str, case: ReaderCase, **options: Any) -> _Peer:
    import h5py

    width = case.sample_bytes // 4
    path = f"{folder}/a.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (case.samples, width), np.float32, **options)
        for start, rows in _rows(case):
            data[start : start + len(rows)] = rows
    stored = h5py.File(path, "r")
    opened = stored["x"]

    return _array_peer("h5py", path, opened, stored.close)


def _hdf5_gzip(folder: str, case: ReaderCase) -> _Peer:
    chunks = (8, case.sample_bytes // 4)
    return _hdf5(folder, case, chunks=chunks, compression="gzip", compression_opts=1)


def _zarr(folder: str, case: ReaderCase) -> _Peer:
    import zarr

    width = case.sample_bytes // 4
    path = f"{folder}/a.zarr"
    array = zarr.create_array(path, shape=(case.samples, width), chunks=(8, width), dtype="float32")
    for start, rows in _rows(case):
        array[start : start + len(rows)] = rows
    opened: Any = zarr.open_array(path, mode="r")

    return _array_peer("zarr", path, opened)


def _parquet(folder: str, case: ReaderCase) -> _Peer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = f"{folder}/a.parquet"
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": body, "path": None} for body in _bodies(case)]
    table = pa.table(
        {"image": pa.array(rows, kind), "label": [i % 10 for i in range(case.samples)]}
    )
    pq.write_table(table, path, row_group_size=100, compression="none")
    opened = pq.ParquetFile(path)

    def one(i: int) -> int:
        group = opened.read_row_group(i // 100, columns=["image"])
        return len(group.column("image")[i % 100]["bytes"].as_py())

    def whole() -> int:
        return sum(
            len(value["bytes"].as_py())
            for batch in opened.iter_batches(_BLOCK, columns=["image", "label"])
            for value in batch.column("image")
        )

    return _Peer("pyarrow", path, one, whole, opened.close)


def _npy(folder: str, case: ReaderCase) -> _Peer:
    path = f"{folder}/a.npy"
    np.save(path, np.concatenate([rows for _, rows in _rows(case)]))
    opened = np.load(path, mmap_mode="r")

    return _array_peer("numpy, mapped", path, opened)


def write_mds(folder: str, bodies: Iterable[bytes]) -> str:
    """Write a shard as MosaicML's writer has it, and return the path of the data set."""
    parts = [
        np.uint32(len(body)).tobytes() + body + np.int64(i % 10).tobytes()
        for i, body in enumerate(bodies)
    ]
    ends = np.cumsum([4 * (len(parts) + 2), *map(len, parts)]).astype("<u4")
    raw = np.uint32(len(parts)).tobytes() + ends.tobytes() + b"".join(parts)
    os.makedirs(f"{folder}/data")
    with open(f"{folder}/data/shard.mds", "wb") as shard:
        shard.write(raw)
    entry = {
        "format": "mds",
        "samples": len(parts),
        "column_names": ["image", "label"],
        "column_encodings": ["jpeg", "int"],
        "column_sizes": [None, 8],
        "raw_data": {"basename": "shard.mds", "bytes": len(raw), "hashes": {}},
        "zip_data": None,
        "compression": None,
    }
    with open(f"{folder}/data/index.json", "w", encoding="utf-8") as file:
        json.dump({"version": 2, "shards": [entry]}, file)
    return f"{folder}/data"


def _mds(folder: str, case: ReaderCase) -> _Peer:
    """Shards as MosaicML's writer has them, compared with a reader written from their description:
    MosaicML's own needs more packages than reading takes."""
    path = write_mds(folder, _bodies(case))

    def one(i: int) -> int:
        with open(f"{folder}/data/shard.mds", "rb", 0) as file:
            file.seek(4 * (1 + i))
            begin, end = np.frombuffer(file.read(8), np.uint32)
            file.seek(int(begin))
            return len(file.read(int(end - begin)))

    return _Peer("its reader's steps", path, one)


_WRITERS: dict[str, Callable[[str, ReaderCase], _Peer]] = {
    "folder": _folder,
    "shard": _shard,
    "tar": _tar,
    "hdf5": _hdf5,
    "hdf5-gzip": _hdf5_gzip,
    "zarr": _zarr,
    "parquet": _parquet,
    "npy": _npy,
    "mds": _mds,
}
