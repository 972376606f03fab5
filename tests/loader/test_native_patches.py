"""Patches that native threads cut out of chunks are those of Python, to the last bit."""

import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import dlio
from dlio.data.patches import PatchReader
from dlio.errors import SourceError
from dlio.image.native import pool_library
from dlio.loader.planned_engine.patch_tables import tables_of
from dlio.storage.tier import Tier
from tests.loader.native_checks import Spy, check_same
from tests.loader.volumes import CHUNKS, PATCH, SHAPE, drawn

pytestmark = pytest.mark.skipif(pool_library.find() is None, reason=pool_library.name())


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Arrays of all formats that have chunks, by name."""
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    image = rng.random((5, 2, *SHAPE), np.float32)
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(2, 1, *CHUNKS))
        file.create_dataset("mask", data=(image[:, 0] > 0.5).astype(np.uint8))
        file["label"] = np.arange(5, dtype=np.int32)
        file["dose"] = rng.random(5, np.float32)
    with h5py.File(folder / "tokens.h5", "w") as file:
        file["tokens"] = rng.integers(0, 50_000, 30_000, np.uint16)
    np.savez(folder / "small.npz", image=drawn(), mask=np.ones(SHAPE, np.uint8))
    np.save(folder / "tokens.npy", rng.integers(0, 50_000, 30_000, np.int32))
    np.save(folder / "series.npy", rng.random((4_000, 3, 2)).astype(">f8"))
    for number, shape in enumerate([(9, 20, 12), (16, 8, 9), (30, 11, 8)]):
        volume = np.random.default_rng(number).integers(0, 9, shape, np.int16)
        zarr.create_array(str(folder / f"{number}.zarr"), data=volume, chunks=(7, 8, 9))
    for name in ("a", "b"):
        (folder / "classes" / name).mkdir(parents=True)
        for number in range(3):
            np.save(folder / "classes" / name / f"{number}.npy", rng.random((12, 10, 9)))
    return {
        "rows": folder / "rows.h5",
        "small": folder / "small.npz",
        "tokens": folder / "tokens.npy",
        "contiguous": folder / "tokens.h5",
        "series": folder / "series.npy",
        "stores": folder / "*.zarr",
        "classes": folder / "classes",
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "random": ("rows", {"patch": PATCH, "patches_per_volume": 6}),
    "grid": ("rows", {"patch": PATCH, "patch_stride": (5, 6, 9)}),
    "middle": ("rows", {"patch": (None, 6, 9), "train": False}),
    "padded": ("small", {"patch": (24, 8, 50), "pad": {"image": -1.0, "mask": 7}}),
    "padded grid": ("small", {"patch": (9, 9, 60), "patch_stride": (7, 7, 60), "pad": 0}),
    "windows": ("tokens", {"window": (1024, 300)}),
    "windows of hdf5": ("contiguous", {"window": (1024, 300)}),
    "large windows": ("tokens", {"window": (20_000, 900)}),
    "windows of rows": ("series", {"window": (7, 5)}),
    "files": ("stores", {"patch": (8, 8, 8), "patches_per_volume": 9}),
    "classes": ("classes", {"patch": (4, 4, 4), "patches_per_volume": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_native_patches_are_the_same(
    case: str, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    source, opened = CASES[case]
    check_same(sources[source], monkeypatch, opened, batch_size=5)
    assert spy.given > 0
    assert spy.refused == 0


def _half(data: dlio.Dataset) -> dlio.Dataset:
    return data.split(train=0.5, val=0.5)["val"]


def test_native_patches_of_views_and_few_tiers_are_the_same(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    opened = {"window": (1024, 300), "tiers": "ram:64KiB"}  # Of 120 kB.
    check_same(sources["tokens"], monkeypatch, opened, view=_half)
    assert spy.given > 0


@pytest.mark.parametrize("case", CASES)
def test_tables_say_what_the_formula_says(case: str, sources: dict[str, Path]) -> None:
    source, opened = CASES[case]
    with dlio.open(str(sources[source]), tiers="none", **opened) as data:
        recipe: Any = data.recipe
        reader: PatchReader = recipe.source.patches
    tables = tables_of(reader)
    assert tables is not None
    numbers = np.random.default_rng(1).permutation(len(reader))[:40]
    slots = np.arange(len(numbers))
    fields, volumes, starts = tables.pieces(numbers, slots, 3, 2, [0] * len(tables.fields))
    for slot, number in enumerate(numbers.tolist()):
        cuts, volume, start = reader.cuts(number, 3, 2)
        assert volumes[slot] == volume
        assert starts[slot].tolist() == start.tolist()
        for cut, table, parts in zip(cuts, tables.fields, fields, strict=True):
            rows = np.flatnonzero(parts.row == slot)
            touched = [cut.first + chunk for chunk, _ in cut.array.touched(cut.box)]
            assert parts.chunk[rows].tolist() == touched
            held = parts.piece["count"][rows].prod(1).sum()
            inside = [side.stop - side.start for side in cut.box]
            assert held == np.prod(inside, dtype=np.int64) * table.dtype.itemsize
            assert parts.padded[slot] == (tuple(inside) != cut.shape)


def test_fields_of_several_types_are_left_to_python(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((9, 9), np.float32))
    np.save(tmp_path / "1.npy", np.zeros((9, 9), np.float64))
    with dlio.open(str(tmp_path / "*.npy"), patch=(3, 3), tiers="none") as data:
        recipe: Any = data.recipe
        assert tables_of(recipe.source.patches) is None


def test_a_chunk_is_compared_with_its_checksum_once_a_pass(
    sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    """A chunk that is damaged later is found in the next pass, and made anew of the source."""
    paths: list[str] = []
    opening = Tier.__init__

    def init(self: Tier, *given: Any, **named: Any) -> None:
        opening(self, *given, **named)
        paths.append(self.path)

    monkeypatch.setattr(Tier, "__init__", init)
    tokens = np.load(sources["tokens"])
    with (
        dlio.open(str(sources["tokens"]), window=(1000, 1000), tiers="ram:8MiB") as data,
        dlio.DataLoader(data, 5) as loader,
    ):
        for passing in range(4):
            if passing == 2:
                (block, *_) = sorted(Path(paths[-1]).rglob("*.blk"))
                content = bytearray(block.read_bytes())
                content[-8:] = b"damaged!"
                block.chmod(0o600)
                block.write_bytes(content)
            made = np.concatenate([next(iter(batch.values())).numpy() for batch in loader])
            assert np.array_equal(made.reshape(-1), tokens)
            assert (spy.refused > 0) == (passing >= 2)


PLAIN = {"windows", "windows of hdf5", "large windows", "padded", "padded grid"}
"""Cases of arrays whose elements lie in a file as batches have them."""


@pytest.mark.parametrize("case", sorted(CASES))
def test_native_patches_without_tiers_are_the_same(
    case: str, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spy: Spy
) -> None:
    """They read no more of plain arrays than the patches; others are read by Python."""
    source, opened = CASES[case]
    check_same(sources[source], monkeypatch, opened | {"tiers": "none"}, batch_size=5)
    assert (spy.given > 0) == (case in PLAIN)
    assert spy.refused == 0


@pytest.mark.parametrize("byte_order", "<>")
def test_windows_of_a_file_without_tiers_cost_their_bytes(byte_order: str, tmp_path: Path) -> None:
    tokens = np.arange(300_000, dtype=f"{byte_order}i4")
    np.save(tmp_path / "x.npy", tokens)
    with (
        dlio.open(str(tmp_path / "x.npy"), window=(16, 1000), tiers="none") as data,
        dlio.DataLoader(data, 10, shuffle=True) as loader,
    ):
        made = np.concatenate([batch["data"].numpy() for batch in loader])
        firsts = np.sort(made[:, 0])
        read = loader.stats()["bytes"]["source"]
    assert np.array_equal(firsts, np.arange(0, 300_000, 1000))
    assert np.array_equal(made, made[:, :1] + np.arange(16))
    if byte_order == "<":
        assert read == 300 * 16 * 4
    else:
        assert read >= tokens.nbytes  # Whole parts, which are turned around.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tiers", ["none", "ram:32MiB"])
def test_a_batch_of_windows_takes_as_many_calls_whatever_its_size(
    tiers: str, workers: int, tmp_path: Path
) -> None:
    """Python's calls in all threads, in the second epoch (the first one fills the tier), without
    those of the first batch, which sets up the pass."""
    np.arange(700_000, dtype=np.uint16).tofile(tmp_path / "x.bin")

    def calls_of_a_batch(size: int) -> float:
        made, batches = 0, 10

        def count(frame: object, event: str, _: object) -> None:
            nonlocal made
            made += event == "call"

        options: Any = {"window": (65, 64), "dtype": "uint16", "tiers": tiers}
        before = sys.getprofile()
        with (
            dlio.open(tmp_path / "x.bin", **options) as data,
            dlio.DataLoader(data, size, shuffle=True, num_workers=workers) as loader,
        ):
            assert sum(1 for _ in loader) > batches
            threading.setprofile(count)
            sys.setprofile(count)
            try:
                iterator = iter(loader)
                next(iterator)
                begun = made
                assert all(len(next(iterator)["tokens"]) == size for _ in range(batches))
                return (made - begun) / batches
            finally:
                sys.setprofile(before)
                threading.setprofile(None)

    small, large = calls_of_a_batch(64), calls_of_a_batch(512)
    # A call for each sample would be 448 more; slow machines add some, as threads look again.
    assert large < 448, small


def test_a_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(100_000, dtype=np.int32))
    with (
        dlio.open(str(tmp_path / "x.npy"), window=(100, 100), tiers="none") as data,
        dlio.DataLoader(data, 10) as loader,
    ):
        assert len(list(loader)) == 100
        with open(tmp_path / "x.npy", "r+b") as file:
            file.truncate(200_000)
        with pytest.raises(SourceError, match=r"x\.npy"):
            list(loader)


def test_parts_of_an_array_without_chunks_share_blocks_if_all_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(40_000_000, np.uint16))
    blocks = {}
    cases: dict[str, dict[str, Any]] = {
        "windows": {"window": (1024, 1024)},
        "windows apart": {"window": (1024, 1025)},
        "patches": {"patch": 1024},
    }
    for name, options in cases.items():
        with dlio.open(str(tmp_path / "x.npy"), tiers="none", **options) as data:
            recipe: Any = data.recipe
            chunks = recipe.source.chunks
            blocks[name] = chunks.layout.blocks, len(chunks)
    assert blocks["windows apart"] == blocks["patches"] == (1221, 1221)
    assert blocks["windows"] == (512, 1221)
