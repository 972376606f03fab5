"""Batches of native threads are those of Python's, whatever format and tiers the samples lie in."""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import dlio
from dlio.data.schema import Kind, Schema
from dlio.errors import SourceError
from dlio.image.native import pool_library
from dlio.loader.planned_engine.native_pool import NativeArrays, NativeJob, NativePool
from dlio.loader.planned_engine.sample_builders import TextBatchBuilder
from dlio_staging.pack_folder import pack
from tests.conftest import MpiRun, in_time
from tests.loader.native_checks import Spy, check_same

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())

BODY = str(Path(__file__).with_name("native_checks.py"))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pictures and rows in each format that holds samples of several kinds, by name."""
    folder = tmp_path_factory.mktemp("formats")
    random = np.random.default_rng(3)
    for number in range(48):
        height, width = random.integers(30, 90, 2)
        path = folder / "pictures" / "abc"[number % 3] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    columns = {f"x{k}": random.standard_normal(96).astype("float32") for k in range(3)}
    columns["label"] = random.integers(0, 5, 96)
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    texts = ["", "ä", *("text " * (k % 7) + str(k) for k in range(94))]
    table = {
        "first": texts,
        "score": random.standard_normal(96),
        "second": texts[::-1],
        "raw": pa.array([text.encode() for text in texts], pa.binary()),
        "pair": pa.array([[k, -k] for k in range(96)], pa.list_(pa.int32(), 2)),
        "label": random.integers(0, 5, 96),
    }
    pq.write_table(pa.table(table), folder / "texts.parquet", row_group_size=20)
    ragged = {
        "values": [list(range(k % 5)) for k in range(96)],
        "tags": [["a"] * (k % 3) for k in range(96)],
    }
    pq.write_table(pa.table({**ragged, "text": texts}), folder / "ragged.parquet")
    (folder / "texts.csv").write_text(
        "text,label\n" + "".join(f"some text {k},{k % 4}\n" for k in range(96))
    )
    for name, compress in (("plain", "none"), ("lz4", "lz4")):
        pack(str(folder / "texts.parquet"), str(folder / f"texts-{name}"), compress=compress)
        pack(str(folder / "pictures"), str(folder / name), compress=compress)
        pack(str(folder / "rows.parquet"), str(folder / f"rows-{name}"), compress=compress)
    for format_ in ("tar", "hdf5", "zarr"):
        pack(str(folder / "pictures"), str(folder / format_), format=format_)
    made = {each.name: each for each in folder.iterdir()}
    return {**made, "zarr": folder / "zarr" / "data.zarr"}


PICTURES = ("pictures", "plain", "lz4", "tar", "hdf5", "zarr")
ROWS = ("rows.parquet", "rows.csv", "rows-plain", "rows-lz4")


@pytest.mark.parametrize("source", [*PICTURES, *ROWS])
def test_batches_of_every_format_are_the_same(
    source: str, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    check_same(sources[source], monkeypatch, {"image_size": 24} if source in PICTURES else {})
    assert spy.given >= 48
    assert spy.refused < spy.given // 4


@pytest.mark.parametrize(
    ("source", "tiers", "least"),
    [
        ("plain", "none", 96),  # Shards are read where they lie.
        ("lz4", "none", 96),
        ("rows-lz4", "none", 192),
        ("plain", "ram:48KiB", 80),  # Some are asked for while their block comes or goes.
        ("pictures", "ram:48KiB", 1),  # Half of them have room.
        ("pictures", "{disk}:8MiB", 48),
        ("pictures", "ram:48KiB,{disk}:8MiB", 48),
    ],
)
def test_batches_of_all_tiers_are_the_same(
    source: str,
    tiers: str,
    least: int,
    sources: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    spy: Spy,
    tmp_path: Path,
) -> None:
    opened: dict[str, Any] = {"tiers": tiers.format(disk=tmp_path)}
    if source in PICTURES:
        opened["image_size"] = 24
    check_same(sources[source], monkeypatch, opened)
    assert spy.given >= least
    assert spy.refused < max(2, spy.given // 4)


def _halved(picture: torch.Tensor) -> torch.Tensor:
    return picture[:, :16, :16] // 2 + int(torch.randint(9, ()))


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none", "{disk}:8MiB"])
@pytest.mark.parametrize(
    ("source", "opened", "loaded"),
    [
        ("texts.csv", {}, {}),
        ("texts.parquet", {}, {}),
        ("texts.parquet", {"transform": lambda row: {**row, "score": row["score"] + 1}}, {}),
        ("texts-plain", {}, {}),
        ("texts-lz4", {}, {"batch_size": 7}),
        ("ragged.parquet", {}, {"collate_fn": list}),
        ("pictures", {"transform": _halved}, {}),
        ("plain", {"image_size": None}, {"collate_fn": list}),
    ],
)
def test_payloads_of_other_samples_are_read_natively(
    source: str,
    opened: dict[str, Any],
    loaded: dict[str, Any],
    tiers: str,
    sources: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    spy: Spy,
    tmp_path: Path,
) -> None:
    opened = {**opened, "tiers": tiers.format(disk=tmp_path)}
    check_same(sources[source], monkeypatch, opened, **loaded)
    assert spy.given >= (0 if tiers == "none" else 48)
    assert spy.refused <= spy.given // 4


def test_a_text_that_is_none_fails_as_without_native_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    """The error names the sample, and `on_error="skip"` leaves it out."""
    table = pa.table({"text": [f"row {k}" for k in range(40)], "label": list(range(40))})
    pq.write_table(table, tmp_path / "texts.parquet")
    bodies = Schema.bodies

    def damaged(schema: Schema, view: memoryview) -> Iterator[tuple[str, Kind, memoryview]]:
        for name, kind, body in bodies(schema, view):
            yield name, kind, memoryview(b"\xff") if bytes(body) == b"row 7" else body

    monkeypatch.setattr(Schema, "bodies", damaged)
    for _ in range(2):
        with (
            dlio.open(tmp_path / "texts.parquet", tiers="ram:1MiB") as data,
            dlio.DataLoader(data, 8, on_error="skip") as loader,
        ):
            rows = [text for _ in range(2) for batch in loader for text in batch["text"]]
            assert rows == 2 * [f"row {k}" for k in range(40) if k != 7]
            assert [name.rpartition("/")[2] for name in loader.stats()["skipped"]] == ["000000007"]
    assert spy.given >= 40
    with (
        dlio.open(tmp_path / "texts.parquet", tiers="ram:1MiB") as data,
        dlio.DataLoader(data, 8) as loader,
        pytest.raises(SourceError, match=r"7.*cannot be decoded"),
    ):
        list(loader)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("source", "mode"), [("pictures", "batch"), ("pictures", "global"), ("texts-lz4", "global")]
)
def test_ranks_make_the_batches_of_one_process(
    source: str, mode: str, sources: dict[str, Path], mpirun: MpiRun, tmp_path: Path
) -> None:
    digests = []
    for ranks, native in ((1, "0"), (2, "1"), (4, "1"), (4, "0")):
        env = {"DLIO_NATIVE": native, "DLIO_CACHE": str(tmp_path / f"{ranks}{native}")}
        done: subprocess.CompletedProcess[str] = mpirun(
            ranks, BODY, str(sources[source]), str(16 // ranks), mode, env=env
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        digests.append({name: each for row in rows for name, each in row["samples"].items()})
        assert all((row["given"] > 0) == (native == "1") for row in rows)
    assert len(digests[0]) == 2 * (48 if source == "pictures" else 96)
    assert all(each == digests[0] for each in digests)


def test_samples_of_transforms_are_made_while_the_loop_computes(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch is complete before it is asked for; native jobs hold the memory they write."""
    made: list[str] = []
    jobs: list[NativeJob] = []
    submit = NativePool.submit

    def noted(pool: NativePool, job: NativeJob) -> None:
        memory: NativeArrays = job._held[2]
        assert memory.images is not None
        assert all(
            any(each.ctypes.data <= at <= each.ctypes.data + each.nbytes for each in memory.crops)
            for at in memory.images[job._given.slots].tolist()
        )
        jobs.append(job)
        submit(pool, job)

    def noted_row(row: dict[str, Any]) -> dict[str, Any]:
        made.append(row["text"])
        return row

    def is_made(count: int) -> bool:
        return len(made) >= min(count, 96)

    monkeypatch.setattr(NativePool, "submit", noted)
    with (
        dlio.open(
            sources["texts.csv"],
            tiers="ram:64MiB",
            transform=noted_row,
        ) as data,
        dlio.DataLoader(data, 4, num_workers=1, prefetch_factor=2) as loader,
    ):
        list(loader)
        made.clear()
        jobs.clear()
        for k, _ in enumerate(loader):
            assert in_time(lambda: not any(job.c.left for job in jobs))
            if k:
                assert in_time(partial(is_made, 4 * (k + 2)))


def test_an_error_of_a_decode_thread_ends_in_the_loop(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> float:
        raise MemoryError("none left")

    monkeypatch.setattr(TextBatchBuilder, "transform", fails)
    with (
        dlio.open(sources["texts.csv"], tiers="ram:64MiB") as data,
        dlio.DataLoader(data, 16) as loader,
        pytest.raises(MemoryError, match="none left"),
    ):
        list(chain(loader, loader))
