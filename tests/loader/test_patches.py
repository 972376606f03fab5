"""Patches of volumes and windows of time: their reads, counted, and where they are."""

import io
import json
import pickle
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import torch
import zarr

import dlio
from dlio.comm import world
from dlio.data.chunked_array import plain_chunks
from dlio.data.chunks import ChunkReader
from dlio.data.patches import PatchReader
from dlio.data.source import File
from dlio.errors import SourceError, UsageError
from dlio_readers.zarrstore import LocalFiles
from tests.loader.patches_checks import patches_and_state
from tests.loader.volumes import CHUNKS, PATCH, SHAPE, Part, cut, drawn, store, touched

BODY = str(Path(__file__).with_name("patches_checks.py"))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def store_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(key, range) of each read of a Zarr store."""
    reads: list[tuple[str, Any]] = []
    real = LocalFiles._read

    def read(self: LocalFiles, key: str, part: Any) -> bytes | None:
        reads.append((key, part))
        return real(self, key, part)

    monkeypatch.setattr(LocalFiles, "_read", read)
    return reads


@pytest.fixture
def file_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of each read of a part of a file."""
    reads: list[tuple[int, int]] = []
    real = File.read_into

    def read(self: File, offset: int, into: memoryview) -> None:
        reads.append((offset, len(into)))
        real(self, offset, into)

    monkeypatch.setattr(File, "read_into", read)
    return reads


@pytest.mark.parametrize("tiers", ["none", "ram:4MiB"])
@pytest.mark.parametrize("kind", ["v2", "v3", "sharded"])
def test_a_patch_reads_the_chunks_that_it_touches_and_each_once(
    kind: str, tiers: str, tmp_path: Path, store_reads: list[tuple[str, Any]]
) -> None:
    volume = drawn()
    path = store(tmp_path / "x.zarr", kind, volume)
    with dlio.open(path, patch=PATCH, patch_stride=PATCH, tiers=tiers) as data:
        data.mount(world())
        seen: set[Part] = set()
        for k in range(len(data)):
            store_reads.clear()
            sample = data[k]
            start = sample["position"].tolist()
            assert np.array_equal(sample["image"], cut(volume, start, PATCH))
            wanted = touched(start, PATCH, CHUNKS) - seen
            seen |= wanted
            others = ("json", ".zarray", ".zattrs")
            chunks = [(key, part) for key, part in store_reads if not key.endswith(others)]
            if kind == "sharded":
                # An index is read of each shard; chunks have ranges of their own.
                chunks = [(key, part) for key, part in chunks if hasattr(part, "start")]
                assert len(set(chunks)) == len(chunks) == len(wanted)
                shards = {tuple(n // 2 for n in place) for place in wanted}
                assert {_place(key) for key, _ in chunks} == shards
            else:
                assert sorted(_place(key) for key, _ in chunks) == sorted(wanted)
        assert len(seen) == np.prod([-(-n // c) for n, c in zip(SHAPE, CHUNKS, strict=True)])


def _place(key: str) -> Part:
    """Place of a chunk, from its key."""
    name = key.removeprefix("image/").removeprefix("c/")
    return tuple(int(part) for part in name.replace(".", "/").split("/"))


class _Counting(io.BufferedIOBase):
    """A stream that notes the bytes that are read from it."""

    def __init__(self, data: bytes, reads: list[tuple[int, int]]) -> None:
        self._inner, self._reads = io.BytesIO(data), reads

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()

    def readinto(self, into: Any) -> int:
        self._reads.append((self._inner.tell(), len(into)))
        return self._inner.readinto(into)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_patch_reads_the_chunks_of_an_hdf5_file_that_it_touches(
    compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, path = drawn(), tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("image", data=volume, chunks=CHUNKS, compression=compression)
        infos = [made.id.get_chunk_info(k) for k in range(made.id.get_num_chunks())]
    places = {
        tuple(n // c for n, c in zip(info.chunk_offset, CHUNKS, strict=True)): (
            info.byte_offset,
            info.byte_offset + info.size,
        )
        for info in infos
    }
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(File, "open", lambda _: _Counting(path.read_bytes(), reads))
    with dlio.open(f"file://{path}", patch=PATCH, patches_per_volume=40, tiers="none") as data:
        seen: set[Part] = set()
        for k in range(len(data)):
            reads.clear()
            sample = data[k]
            start = _start_of(data, k)
            assert np.array_equal(sample["image"], cut(volume, start, PATCH))
            wanted = touched(start, PATCH, CHUNKS) - seen
            seen |= wanted
            chunks = {
                place
                for place, (begin, end) in places.items()
                if any(at < end and begin < at + size for at, size in reads)
            }
            assert chunks == wanted


def _start_of(data: dlio.Dataset, sample: int, epoch: int = 0) -> list[int]:
    assert isinstance(data.reader, PatchReader)
    starts: list[int] = data.reader.cuts(sample, data.seed, epoch)[2].tolist()
    return starts


@pytest.mark.parametrize("kind", ["npy", "npz", "h5"])
def test_a_patch_of_an_array_without_chunks_reads_parts_of_it(
    kind: str, tmp_path: Path, file_reads: list[tuple[int, int]]
) -> None:
    volume = np.arange(64 * 96 * 128, dtype=np.float32).reshape(64, 96, 128)
    path, side = tmp_path / f"x.{kind}", (8, 8, 8)
    if kind == "h5":
        with h5py.File(path, "w") as file:
            file["data"] = volume
    elif kind == "npz":
        np.savez(path, data=volume)
    else:
        np.save(path, volume)
    chunk = plain_chunks(volume.shape, 4)
    assert 4 * np.prod(chunk) <= 1 << 20
    with dlio.open(path, patch=side, patches_per_volume=20, tiers="none") as data:
        seen: set[Part] = set()
        for k in range(len(data)):
            file_reads.clear()
            sample = data[k]
            start = _start_of(data, k)
            assert np.array_equal(sample["data"], cut(volume, start, side))
            wanted = touched(start, side, chunk) - seen
            seen |= wanted
            parts = [
                [min(c, n - p * c) for p, c, n in zip(place, chunk, volume.shape, strict=True)]
                for place in wanted
            ]
            assert sum(size for _, size in file_reads) == 4 * sum(map(np.prod, parts))
        file_reads.clear()
        assert sum(1 for _ in data.reader.read(np.arange(3))) == 3
        assert not file_reads  # The number of a patch is all that its payload holds.


def test_a_tier_brings_a_chunk_once_for_all_patches_and_epochs(
    tmp_path: Path, store_reads: list[tuple[str, Any]]
) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    with dlio.open(path, patch=PATCH, patches_per_volume=64, tiers="ram:4MiB", seed=0) as data:
        loader = dlio.DataLoader(data, batch_size=8, shuffle=True, num_workers=4)
        store_reads.clear()
        first = [batch["image"].clone() for batch in loader]
        second = [batch["image"].clone() for batch in loader]
        keys = [key for key, _ in store_reads if key.startswith("image/c/")]
        assert len(keys) == len(set(keys)) == 3 * 4 * 3
        assert not torch.equal(torch.cat(first), torch.cat(second))
        places = loader.stats()["bytes"]
        # The numbers of patches are 8 bytes each; native threads need none.
        assert places["source"] in (0, 64 * 8)
        assert places["ram"] > 0


def test_places_are_uniform_and_belong_to_seed_epoch_and_sample(tmp_path: Path) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    given: dict[str, Any] = {"patch": PATCH, "patches_per_volume": 4000, "tiers": "none"}
    with dlio.open(path, seed=1, **given) as data:
        starts = np.array([_start_of(data, k) for k in range(4000)])
        for axis, (n, side) in enumerate(zip(SHAPE, PATCH, strict=True)):
            counts = np.bincount(starts[:, axis], minlength=n - side + 1)
            assert len(counts) == n - side + 1
            expected = 4000 / len(counts)
            chi = ((counts - expected) ** 2 / expected).sum()
            assert chi < 2 * len(counts)
        assert abs(np.corrcoef(starts.T)[0, 1]) < 0.06
        again = np.array([_start_of(data, k) for k in range(100)])
        assert np.array_equal(again, starts[:100])
        assert not np.array_equal([_start_of(data, k, 1) for k in range(100)], again)
    with dlio.open(path, seed=2, **given) as data:
        assert not np.array_equal([_start_of(data, k) for k in range(100)], again)


def test_a_grid_covers_every_element(tmp_path: Path) -> None:
    volume = drawn()
    path = store(tmp_path / "x.zarr", "v3", volume)
    with dlio.open(path, patch=PATCH, patch_stride=(5, 6, 9), tiers="none") as data:
        count = np.zeros(SHAPE, int)
        for sample in (data[k] for k in range(len(data))):
            assert sample["volume"] == 0
            part = tuple(
                slice(a, a + n) for a, n in zip(sample["position"].tolist(), PATCH, strict=True)
            )
            assert np.array_equal(sample["image"], volume[part])
            count[part] += 1
        assert count.min() == 1
        assert len(data) == 4 * 5 * 5


def test_a_window_is_consecutive_steps_at_every_so_many(tmp_path: Path) -> None:
    steps = np.arange(21 * 5, dtype=np.float32).reshape(21, 5)
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="w")
    group.create_array("x", data=steps, chunks=(4, 5))
    group.create_array("hour", data=np.arange(21), chunks=(21,))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["hour"] = steps, np.arange(21)
    for path in (tmp_path / "x.zarr", tmp_path / "x.h5"):
        with dlio.open(path, window=(8, 2), tiers="none") as data:
            assert len(data) == 7
            for k in range(7):
                assert np.array_equal(data[k]["x"], steps[2 * k : 2 * k + 8])
                assert data[k]["hour"].tolist() == list(range(2 * k, 2 * k + 8))
            batch = next(iter(dlio.DataLoader(data, batch_size=3)))
            assert batch["x"].shape == (3, 8, 5)
    with pytest.raises(UsageError, match=r"no file holds a whole window of 22: .* 21 rows; give"):
        dlio.open(path, window=22)
    with pytest.raises(UsageError, match=r"^stride of window 0: give"):
        dlio.open(path, window=(8, 0))


def test_windows_do_not_cross_files(tmp_path: Path) -> None:
    for name, rows in (("a", 10), ("b", 7)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(rows) + (100 if name == "b" else 0)
    with dlio.open(tmp_path, window=(4, 3), tiers="none") as data:
        assert [data[k]["x"].tolist() for k in range(len(data))] == [
            [0, 1, 2, 3],
            [3, 4, 5, 6],
            [6, 7, 8, 9],
            [100, 101, 102, 103],
            [103, 104, 105, 106],
        ]


def test_targets_are_cut_alike_and_rows_are_volumes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    image = rng.random((5, 2, *SHAPE), np.float32)
    mask = (image[:, 0] > 0.5).astype(np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(2, 1, *CHUNKS))
        file.create_dataset("mask", data=mask, chunks=(1, *CHUNKS))
        file["label"] = np.arange(5)
    with dlio.open(tmp_path / "x.h5", patch=PATCH, patches_per_volume=3, tiers="none") as data:
        assert len(data) == 15
        for k in range(15):
            sample = data[k]
            assert sample["image"].shape == (2, *PATCH)
            assert sample["label"] == k // 3
            assert np.array_equal(sample["image"][0] > 0.5, sample["mask"])
            part = cut(image[k // 3, 1], _start_of(data, k), PATCH)
            assert np.array_equal(sample["image"][1], part)


def test_a_volume_smaller_than_a_patch_is_an_error_or_padded(tmp_path: Path) -> None:
    volume = drawn()
    np.savez(tmp_path / "x.npz", image=volume, mask=np.ones(SHAPE, np.uint8))
    with pytest.raises(UsageError, match=r"x\.npz.*\(24, 8, 8\).*pad=0"):
        dlio.open(tmp_path / "x.npz", patch=(24, 8, 8))
    with dlio.open(
        tmp_path / "x.npz", patch=(24, 8, 50), pad={"image": -1.0, "mask": 7}, tiers="none"
    ) as data:
        sample = data[0]
        inside = np.zeros((24, 8, 50), bool)
        inside[2:22, :, 4:45] = True
        at = _start_of(data, 0)[1]
        assert np.array_equal(sample["mask"] == 1, inside)
        assert (sample["mask"].numpy()[~inside] == 7).all()
        assert (sample["image"].numpy()[~inside] == -1).all()
        assert np.array_equal(
            sample["image"].numpy()[inside].reshape(20, 8, 41), volume[:, at : at + 8]
        )


def test_files_of_other_shapes_and_chunks_make_one_data_set(tmp_path: Path) -> None:
    shapes = [(9, 20, 12), (16, 8, 9), (30, 11, 8)]
    volumes = [np.random.default_rng(k).random(s, np.float32) for k, s in enumerate(shapes)]
    for k, volume in enumerate(volumes):
        zarr.create_array(str(tmp_path / f"{k}.zarr"), data=volume, chunks=(7, 8, 9))
        np.save(tmp_path / f"{k}.npy", volume)
    for pattern in ("*.zarr", "*.npy"):
        with dlio.open(
            str(tmp_path / pattern), patch=(8, 8, 8), patches_per_volume=4, tiers="ram:1MiB"
        ) as data:
            assert len(data) == 12
            loader = dlio.DataLoader(data, batch_size=4)
            for number, batch in enumerate(loader):
                (parts,) = batch.values()
                for k, part in enumerate(parts):
                    start = _start_of(data, 4 * number + k)
                    assert np.array_equal(part, cut(volumes[number], start, (8, 8, 8)))


def test_the_middle_is_taken_without_train(tmp_path: Path) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    with dlio.open(path, patch=(None, 6, 9), train=False, tiers="none") as data:
        assert np.array_equal(data[0]["image"], drawn()[:, 12:18, 16:25])


def test_views_and_functions_keep_the_places(tmp_path: Path) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    with dlio.open(path, patch=PATCH, patches_per_volume=9, tiers="ram:1MiB") as data:
        whole = [batch["image"][0].clone() for batch in dlio.DataLoader(data, batch_size=1)]
        parts = data.split(a=0.5, b=0.5, by=lambda name: name)
        doubled = data.map(lambda sample: 2 * sample["image"])
        assert np.array_equal(doubled[4], 2 * whole[4])
        for part in parts.values():
            for k, batch in enumerate(dlio.DataLoader(part, batch_size=1)):
                number = PatchReader.number_of(part.reader.read(np.array([k]))[0])
                assert np.array_equal(batch["image"][0], whole[number])
            part.close()
        copy = pickle.loads(pickle.dumps(data))
        assert np.array_equal(copy[3]["image"], whole[3])
        copy.close()
        with pytest.raises(UsageError, match="one result a sample"):
            data.map(lambda sample: sample, kept=True)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "after"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_ranks_and_resumption_give_the_same_patches(
    mpirun: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    ranks: int,
    after: int,
) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())

    def run(ranks: int, state: str, stop: int) -> tuple[dict[int, str], str]:
        batch = 8 // ranks
        if ranks == 1:
            rows = [patches_and_state(path, batch, state, stop)]
        else:
            done = mpirun(ranks, "-W", "error", BODY, path, str(batch), state, str(stop))
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in done.stdout.splitlines()]
        patches = {int(k): each for row in rows for k, each in row["patches"].items()}
        return patches, json.dumps(rows[0]["state"])

    whole, _ = run(1, "", 99)
    assert len(whole) == 48
    assert len(set(whole.values())) > 40
    begun, state = run(ranks, "", 3)
    assert len(begun) == 24
    rest, _ = run(after, state, 99)
    assert {**begun, **rest} == whole
    assert len(rest) == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patch": 0}, "patch=0"),
        ({"patch": (4, 4, 4), "select": (slice(0, 2),)}, "exclude each other"),
        ({"patch": (4, 4, 4, 4)}, "4 dimensions"),
        ({"patch": (None, None, None)}, "one axis at least"),
        ({"patch": (8, 8, 8), "window": 3}, "exclude each other"),
        ({"patch_stride": 3}, "give patch="),
        ({"patches_per_volume": 3}, "give patch= alone"),
        ({"patch": (4, 4, 4), "patches_per_volume": 3, "patch_stride": 2}, "give patch= alone"),
        ({"patch": (4, 4, 4), "patch_stride": (2, 2)}, "3 dimensions"),
        ({"patch": (4, 4, 4), "pad": "edge"}, "give a number"),
        ({"window": (8, 2, 1)}, r"give a number of steps, or \(8, 2\) for eight consecutive"),
        ({"patch": (4, 4, 4), "patches_per_volume": 3, "train": False}, "on a grid"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", drawn())
    with pytest.raises(UsageError, match=words):
        dlio.open(tmp_path / "x.npy", **options)


def test_formats_without_arrays_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"\(tables\) has none"):
        dlio.open(tmp_path / "x.csv", patch=(8,))
    with pytest.raises(UsageError, match=r"cut out of arrays.*torch"):
        dlio.open(torch.utils.data.TensorDataset(torch.zeros(4, 3)), patch=(2,))


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    with dlio.open(path, patch=PATCH, patch_stride=PATCH, tiers="none") as data:
        victim = tmp_path / "x.zarr" / "image" / "c" / "0" / "0" / "0"
        victim.write_bytes(b"\0" * 40)
        with pytest.raises(SourceError, match=r"x\.zarr::image\[0,0,0\]"):
            data[0]


def test_copies_of_a_store_and_mixtures(tmp_path: Path) -> None:
    one, two = (store(tmp_path / f"{name}.zarr", "v3", drawn()) for name in "ab")
    with dlio.open(one, replicas=two, patch=PATCH, patches_per_volume=8, tiers="none") as data:
        for k in range(8):
            assert np.array_equal(data[k]["image"], cut(drawn(), _start_of(data, k), PATCH))
        with pytest.raises(UsageError, match=r"not mixed: open all volumes as one data set"):
            dlio.mix([(data, 0.5), (two, 0.5)])
    with pytest.raises(UsageError, match=r"not mixed"):
        dlio.mix({one: 0.5, two: 0.5}, patch=PATCH)
    with dlio.open([one, two], patch=PATCH, patches_per_volume=3, tiers="none") as data:
        assert len(data) == 6


def test_the_chunks_of_a_patch_are_requests_at_a_time_over_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "x.zarr", "v3", drawn())
    remote = fsspec.filesystem("memory")
    remote.put(str(path), "/patches/x.zarr", recursive=True)
    gate = threading.Barrier(4)
    real = ChunkReader._read

    def read(self: ChunkReader, sample: int) -> memoryview:
        gate.wait(60)  # Fewer readers at a time would wait for ever.
        return real(self, sample)

    there = "memory://patches/x.zarr"
    with dlio.open(there, patch=(8, 16, 32), patch_stride=(8, 16, 32)) as data:
        monkeypatch.setattr(ChunkReader, "_read", read)
        data.mount(world())
        assert np.array_equal(data[0]["image"], drawn()[:8, :16, :32])
    left = [thread.name for thread in threading.enumerate() if "dlio-chunks" in thread.name]
    assert left == []
