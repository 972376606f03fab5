"""Batches of native threads are those of Python's, whatever format and tiers the samples lie in."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dlio.image.native import pool_library
from dlio_staging.pack_folder import pack
from tests.conftest import MpiRun
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
    for name, compress in (("plain", "none"), ("lz4", "lz4")):
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


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["batch", "global"])
def test_ranks_make_the_batches_of_one_process(
    mode: str, sources: dict[str, Path], mpirun: MpiRun, tmp_path: Path
) -> None:
    digests = []
    for ranks, native in ((1, "0"), (2, "1"), (4, "1"), (4, "0")):
        env = {"DLIO_NATIVE": native, "DLIO_CACHE": str(tmp_path / f"{ranks}{native}")}
        done: subprocess.CompletedProcess[str] = mpirun(
            ranks, BODY, str(sources["pictures"]), str(16 // ranks), mode, env=env
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        digests.append({name: each for row in rows for name, each in row["samples"].items()})
        assert all((row["given"] > 0) == (native == "1") for row in rows)
    assert len(digests[0]) == 2 * 48
    assert all(each == digests[0] for each in digests)
