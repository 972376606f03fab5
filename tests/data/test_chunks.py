"""Chunks of arrays and numbers of patches, as readers; parts that stand for chunks."""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.chunked_array import ChunkedArray, plain_chunks
from dlio.data.chunks import ChunkReader
from dlio.data.patches import PatchOptions, PatchReader
from dlio.data.reader import Reader, open_parts
from dlio.testing import ReaderTests
from tests.loader.volumes import CHUNKS, PATCH, SHAPE, cut, drawn, store, touched


def _small(seed: int = 0) -> npt.NDArray[np.float32]:
    return drawn(seed)[:10, :12]


class TestChunks(ReaderTests):
    """The reader of chunks keeps the contract of readers."""

    def make(self, folder: Path) -> Reader:
        path = folder / "x.zarr"
        if not path.exists():
            store(path, "v3", _small())
        return ChunkReader(open_parts(path))

    def expected(self) -> list[dict[str, bytes]]:
        boxes = itertools.product(
            *(range(0, n, c) for n, c in zip(_small().shape, CHUNKS, strict=True))
        )
        return [{"chunk": cut(_small(), at, CHUNKS).tobytes()} for at in boxes]

    def change(self, folder: Path) -> None:
        store(folder / "x.zarr", "v3", _small(1))

    def damage(self, folder: Path, sample: int) -> None:
        for path in (folder / "x.zarr" / "image" / "c").rglob("*"):
            if path.is_file():
                path.write_bytes(b"\0" * 40)

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        """It has no format of its own."""


class TestPatches(ReaderTests):
    """So does the reader of their numbers."""

    def make(self, folder: Path) -> Reader:
        path = folder / "x.zarr"
        if not path.exists():
            store(path, "v3", drawn())
        options = PatchOptions.of(PATCH, 30, None, None, None, True)
        assert options is not None
        return PatchReader(ChunkReader(open_parts(path)), options)

    def expected(self) -> list[dict[str, int]]:
        return [{"patch": k} for k in range(30)]

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        """It has no format of its own."""


@pytest.mark.parametrize(
    "shape",
    [(7,), (1 << 20,), (3, 1 << 20), (512, 512, 512), (9, 4, 700, 700), (0, 5), (1, 1)],
)
@pytest.mark.parametrize("itemsize", [1, 4, 8])
def test_parts_of_arrays_without_chunks_are_small_and_consecutive(
    shape: tuple[int, ...], itemsize: int
) -> None:
    chunk = plain_chunks(shape, itemsize)
    assert itemsize * np.prod(chunk) <= 1 << 20
    assert all(1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True))
    whole = itemsize * np.prod(shape)
    run, axis = itemsize, len(shape)
    while axis:
        axis -= 1
        run *= chunk[axis]
        if chunk[axis] < shape[axis]:
            break
    assert run >= min(int(whole), (64 << 10) // 2)


def test_touched_chunks_are_those_of_the_part() -> None:
    array = ChunkedArray("x", SHAPE, np.dtype("f4"), CHUNKS, lambda _: np.zeros(0))
    for start in itertools.product(range(0, 13, 4), range(0, 24, 7), range(0, 32, 5)):
        box = tuple(slice(a, a + n) for a, n in zip(start, PATCH, strict=True))
        numbers = [number for number, _ in array.touched(box)]
        wanted = sorted(touched(start, PATCH, CHUNKS))
        assert numbers == [int(np.ravel_multi_index(place, array.grid)) for place in wanted]
