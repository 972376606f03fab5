"""Pictures and masks drawn by hypothesis have the pixels and numbers that their formats' libraries
read, through folders, tars, tables and packed shards; a sound one is read without a warning."""

import io
import itertools
import re
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import dlio
from dlio.errors import DecodeError
from dlio.image.decoder import decode_whole
from dlio.image.image_warnings import WARNINGS
from dlio.image.segmentation_masks import decode_mask
from dlio_staging.pack_folder import pack
from dlio_staging.verify import verify
from tests.readers.picture_files import (
    PICTURES,
    TURNS,
    Numbers,
    PictureFile,
    pillows,
    shown,
    tiff_file,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("DLIO_TRUST", "1")  # Rehearsals have tests of their own.


def _name(drawn: PictureFile) -> str:
    """Class folders ignore GIFs that are named so."""
    return "jpg" if drawn.suffix == "gif" else drawn.suffix


def _as_folder(folder: Path, files: Sequence[PictureFile]) -> str:
    for k, drawn in enumerate(files):
        path = folder / "data" / str(k) / f"0.{_name(drawn)}"
        path.parent.mkdir(parents=True)
        path.write_bytes(drawn.data)
    return str(folder / "data")


def _as_tar(folder: Path, files: Sequence[PictureFile]) -> str:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for k, drawn in enumerate(files):
            for name, body in ((_name(drawn), drawn.data), ("cls", b"%d" % k)):
                info = tarfile.TarInfo(f"{k}.{name}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return str(folder / "a.tar")


def _as_table(folder: Path, files: Sequence[PictureFile]) -> str:
    rows = [{"bytes": drawn.data, "path": f"{k}.{drawn.suffix}"} for k, drawn in enumerate(files)]
    table = pa.table({"image": rows, "label": range(len(rows))})
    pq.write_table(table, folder / "a.parquet")
    return str(folder / "a.parquet")


def _as_pack(folder: Path, files: Sequence[PictureFile]) -> str:
    pack(_as_folder(folder, files), str(folder / "packed"))
    return str(folder / "packed")


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""Files of bytes shrink for minutes, and tell no more then."""
ROUTES = {"folder": _as_folder, "tar": _as_tar, "table": _as_table, "pack": _as_pack}
MASKS = [strategy for name, strategy in PICTURES.items() if name != "jpeg"]
FILES = st.lists(st.one_of(*PICTURES.values()), min_size=1, max_size=4)


def _sample(values: Any) -> tuple[int, Numbers]:
    """Return the label and the pixels of a sample, shape (rows, columns, 3)."""
    (image,) = (value for name, value in values.items() if name not in ("label", "cls"))
    return int(values.get("label", values.get("cls"))), np.asarray(image).transpose(1, 2, 0)


@settings(suppress_health_check=list(HealthCheck), phases=PHASES)
@given(files=FILES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_picture_has_the_pixels_that_its_library_reads(
    route: str, files: Sequence[PictureFile], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = ROUTES[route](tmp_path_factory.mktemp(route), files)
    left = dict(enumerate(files))
    with dlio.open(path, tiers="none", image_size=None) as data:
        assert len(data) == len(files)
        for k in range(len(files)):
            try:
                number, made = _sample(data[k])
            except DecodeError:
                continue
            drawn = left.pop(number)
            expected = shown(drawn)
            assert expected is not None, drawn.about
            assert np.array_equal(made, expected), drawn.about
    # What is refused is refused by Pillow as well.
    assert [drawn for drawn in left.values() if pillows(drawn.data) is not None] == []


@settings(suppress_health_check=list(HealthCheck), phases=PHASES)
@given(files=st.lists(st.one_of(MASKS), min_size=1, max_size=4))
def test_a_mask_has_the_numbers_that_are_stored(
    files: Sequence[PictureFile], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("masks")
    for name in ("images", "masks"):
        (folder / name).mkdir()
    refused = set()
    for k, drawn in enumerate(files):
        colours = shown(drawn)
        assert colours is not None, drawn.about
        Image.fromarray(colours).save(folder / "images" / f"{k}.png")
        (folder / "masks" / f"{k}.{_name(drawn)}").write_bytes(drawn.data)
        if drawn.numbers is None or not 0 <= drawn.numbers.min() <= drawn.numbers.max() < 256:
            refused.add(str(k))
    with dlio.open(folder, tiers="none", image_size=None) as data:
        assert len(data) == len(files)
        for k, drawn in enumerate(files):
            if str(k) in refused:
                with pytest.raises(DecodeError, match=r"in colour|masks are of 0 to 255|16 bits"):
                    data[k]
            else:
                assert np.array_equal(data[k][1], np.asarray(drawn.numbers)), drawn.about
    checked = verify(str(folder))
    named = [re.findall(r"mask of (?:\S*/)?(\d+)", line) for line in checked.damaged]
    assert {number for numbers in named for number in numbers} == refused


@given(drawn=st.one_of(*PICTURES.values()))
def test_a_sound_picture_is_read_without_a_warning(drawn: PictureFile) -> None:
    name = f"sound {drawn.about}"
    if pillows(drawn.data) is not None:
        decode_whole(drawn.data, name)
    said = WARNINGS.of(name) or ""
    assert not said or "only the first" in said or "become black" in said


# Files of which dlio once had other pixels


def _tiff_of(
    pixels: Numbers, planar: bool = False, tile: int = 0, turn: int = 1, big: bool = False
) -> bytes:
    """A TIFF of grey, or of colours, with one strip a plane or with tiles that it fills."""
    height, width, channels = pixels.shape
    planes = [pixels[..., k : k + 1] for k in range(channels)] if planar else [pixels]
    step = tile or height
    places = itertools.product(planes, range(0, height, step), range(0, width, tile or width))
    across = tile or width
    parts = [plane[y : y + step, x : x + across].tobytes() for plane, y, x in places]
    tags = {256: [width], 257: [height], 258: [8 * pixels.itemsize] * channels, 259: [1]}
    tags |= {262: [2 if channels > 2 else 1], 274: [turn], 277: [channels], 284: [1 + planar]}
    tags |= {322: [tile], 323: [tile], 324: [], 325: []} if tile else {278: [height], 273: []}
    if channels == 2:
        tags[338] = [2]
    return tiff_file("<", big, parts, tags if tile else {**tags, 279: []})


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("shape", [(32, 32, 3), (16, 48, 1)])
def test_tiles_are_turned(turn: int, big: bool, shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(turn).integers(0, 256, shape).astype(np.uint8)
    data = _tiff_of(pixels, tile=16, turn=turn, big=big)
    expected = np.broadcast_to(TURNS[turn](pixels), (*TURNS[turn](pixels).shape[:2], 3))
    assert np.array_equal(decode_whole(data, "x"), expected)


@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_planes_of_a_tiff_are_channels(channels: int, tile: int, dtype: type) -> None:
    pixels: Numbers = np.random.default_rng(0).integers(0, 256, (16, 32, channels)).astype(dtype)
    pixels[..., 1:3] = pixels[..., :1]
    data = _tiff_of(pixels, planar=True, tile=tile)
    eight = pixels[..., :1] >> 8 if dtype is np.uint16 else pixels[..., :1]
    assert np.array_equal(decode_whole(data, "x"), np.repeat(eight, 3, 2).astype(np.uint8))
    if channels == 2 and dtype is np.uint16:
        with pytest.raises(DecodeError, match="16 bits of grey and of alpha"):
            decode_mask(data, "x")
    else:
        assert np.array_equal(decode_mask(data, "x"), pixels[..., 0])


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_deep_grey_and_alpha_is_refused_whatever_its_codec(extra: int) -> None:
    planes = [np.arange(64, dtype="<u2").tobytes()] * 2
    tags = {256: [8], 257: [8], 258: [16, 16], 259: [8], 262: [1], 277: [2], 278: [8], 284: [2]}
    data = tiff_file("<", False, list(map(zlib.compress, planes)), tags | {273: [], 338: [extra]})
    if not extra:
        assert pillows(data) is not None  # Which gives the numbers of few such files.
    with pytest.raises(DecodeError, match="16 bits of grey and of alpha"):
        decode_mask(data, "x")


def test_a_bmp_of_os2_in_colour_is_no_mask() -> None:
    head = struct.pack("<2sIHHIIHHHH", b"BM", 26 + 16, 0, 0, 26, 12, 1, 2, 1, 24)
    colours = head + bytes([1, 2, 3, 0, 4, 5, 6, 0])
    with pytest.raises(DecodeError, match="in colour"):
        decode_mask(colours, "x")
    assert decode_mask(head + bytes([7, 7, 7, 0, 9, 9, 9, 0]), "x").tolist() == [[9], [7]]
    bits = struct.pack("<2sIHHIIHHHH", b"BM", 26 + 6 + 4, 0, 0, 32, 12, 3, 1, 1, 1)
    assert decode_mask(bits + bytes(6) + b"\xa0\0\0\0", "x").tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "PPM"])
def test_a_column_of_pictures_of_any_format_is_pictures(form: str, tmp_path: Path) -> None:
    memory = io.BytesIO()
    Image.new("RGB", (5, 4), (9, 9, 9)).save(memory, form)
    rows = [{"bytes": memory.getvalue(), "path": None}]
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet")
    with dlio.open(tmp_path / "a.parquet", tiers="none", image_size=None) as data:
        assert data[0]["image"].shape == (3, 4, 5)
