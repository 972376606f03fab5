"""Memory and time that data take follow from the bytes that are there."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.data.source import File, file_at
from dlio.errors import DecodeError, SourceError, UsageError
from dlio.image.decoder import decode_whole
from dlio.image.segmentation_masks import draw_instance
from dlio.util import limits
from dlio_readers import compressed_files, rehearsal
from dlio_readers.compressed_files import in_memory
from dlio_readers.texttable import _TableScan
from dlio_readers.tfrecord import RecordBytes, features_of, ints_of
from dlio_staging.verify import verify
from tests.hostile.corpus import annotated, scans


def _varint(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _part(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


@pytest.mark.parametrize("packed", [True, False])
def test_numbers_of_a_tfrecord_take_a_few_times_their_bytes(packed: bool) -> None:
    values = b"\x05" * 50_000
    listed = _part(1, values) if packed else b"".join(b"\x08\x05" for _ in values)
    entry = _part(1, b"x") + _part(2, _part(3, listed))
    record = RecordBytes(memoryview(_part(1, _part(1, entry))))
    feature = features_of(record)["x"]
    assert feature.spans.nbytes <= 8 * len(record)
    tracemalloc.start()
    try:
        made = ints_of(record, feature)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.tolist() == [5] * 50_000
    # A number of a byte becomes eight; what else is needed is made in pieces of 64 KiB.
    assert peak <= 16 * len(record) + (6 << 20)


def test_masks_that_do_not_fit_into_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = annotated.coco_masks(tmp_path)
    made = annotated.annotations()
    made["annotations"] = [made["annotations"][0] | {"id": k} for k in range(60)]
    (tmp_path / annotated.COCO_FILE).write_text(json.dumps(made))
    with dlio.open(str(ask.path), tiers="none", format="coco", masks=True, seed=0) as data:
        assert len(data[0][1]["masks"]) == 60
        monkeypatch.setattr(limits, "usable_memory", lambda: 1000)
        monkeypatch.setattr(limits, "_FREE_BYTES", 0)
        monkeypatch.setattr(limits, "_EXPANSION", 1)
        with pytest.raises(DecodeError, match=r"masks of [0-9]+ bytes in 60 boxes"):
            data[0]


def test_an_outline_that_passes_a_picture_very_often_is_refused() -> None:
    crossing = [0, 0, 3000, 3000] * 400
    with pytest.raises(DecodeError, match="passes it too often"):
        draw_instance([crossing], 16, 16, "x")


def test_outlines_that_are_made_in_pieces_are_those_that_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    shapes = [[rng.uniform(-5, 70, 2 * count).tolist()] for count in (3, 5, 40, 200)]
    whole = [draw_instance(shape, 60, 50, "x") for shape in shapes]
    monkeypatch.setattr("dlio.image.segmentation_masks._AT_ONCE", 37)
    for shape, mask in zip(shapes, whole, strict=True):
        assert (draw_instance(shape, 60, 50, "x") == mask).all()


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    size = struct.pack(">HBHHB", 17, 8, 9000, 9000, 3)
    head = b"\xff\xd8\xff\xc2" + size + bytes([1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([1, 0, 1, 5, 0])
    with pytest.raises(DecodeError, match=r"100 scans of 9000 x 9000 pixels|header cannot be read"):
        decode_whole(head + scan * 100 + b"\xff\xd9", "x.jpg")


def test_verify_names_a_sample_that_does_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar"
    info = tarfile.TarInfo("a.bin")
    info.size = 3 << 30
    small = tarfile.TarInfo("b.bin")
    small.size = 5
    with open(path, "wb") as file:
        file.write(info.tobuf())
        file.truncate(512 + info.size)
        file.seek(0, os.SEEK_END)
        file.write(small.tobuf() + bytes(512) + bytes(1024))
    monkeypatch.setattr(limits, "usable_memory", lambda: 1 << 30)
    checked = verify(str(path))
    assert checked.samples == 1
    assert len(checked.damaged) == 1
    assert f"has {3 << 30} bytes" in checked.damaged[0]


def test_a_deflated_scan_is_counted_before_it_is_inflated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pydicom = pytest.importorskip("pydicom")
    ask = scans.deflated(tmp_path)
    monkeypatch.setattr(limits, "usable_memory", lambda: 100)
    monkeypatch.setattr(limits, "_FREE_BYTES", 0)
    monkeypatch.setattr(limits, "_EXPANSION", 0)
    monkeypatch.setattr(pydicom, "dcmread", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(SourceError, match=r"x\.dcm claims to hold"):
        dlio.open(str(ask.path), tiers="none")


@pytest.mark.parametrize(("size", "is_stuck"), [(0, True), (100_000_000, False)])
def test_a_library_that_reads_for_ever_is_stopped_by_its_processor_time(
    size: int, is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second of work, and a byte, each time that it is looked at; it ends after 60.
    turns = iter(range(10_000))
    monkeypatch.setattr(rehearsal, "_progress", lambda _: (k := next(turns), float(k)))
    monkeypatch.setattr(rehearsal, "_POLL_S", 0.0)
    left = iter(range(60, -1, -1))
    child: Any = SimpleNamespace(
        pid=1, returncode=None, stdout=io.BytesIO(), poll=lambda: None if next(left, 0) else 0
    )
    files: Any = [SimpleNamespace(name="a.arrow", size=size)]
    heard = rehearsal.ChildWords("a.arrow", "token")
    assert rehearsal._watched(child, heard, files, 600.0) == is_stuck


def test_members_of_an_npz_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: dict[str, Any] = {f"x{k}": np.zeros(1000, np.uint8) for k in range(20)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    monkeypatch.setattr(limits, "usable_memory", lambda: 8000)
    monkeypatch.setattr(limits, "_FREE_BYTES", 1500)
    monkeypatch.setattr(limits, "_EXPANSION", 1)
    with pytest.raises(SourceError, match=r"a\.npz::x1\.npy: .* kept in memory become"):
        dlio.open(str(tmp_path / "a.npz"), tiers="none")


def test_a_label_table_takes_no_memory_for_values_that_its_lines_lack(tmp_path: Path) -> None:
    """A wide first line above many short ones would take that of their product."""
    (tmp_path / "0.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(200))
    names = ["file_name", "label", *(f"c{k}" for k in range(1500))]
    (tmp_path / "labels.csv").write_text(",".join(names) + "\n" + "0.jpg,1\n" * 1500)
    tracemalloc.start()
    try:
        with dlio.open(str(tmp_path), tiers="none") as data:
            assert len(data) == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_a_table_is_read_in_parts_whatever_its_lines_end_with(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"a,b{end}{f'1,2{end}' * 700_000}".encode())
    with contextlib.closing(file_at(str(path)).opened()) as file:
        parts = list(_TableScan(file, ",", frozenset())._parts())
    assert b"".join(parts) == path.read_bytes()
    assert max(map(len, parts)) <= (1 << 20) + 10
    assert all(part.endswith(end.encode()) for part in parts)


def test_names_of_columns_are_bounded_before_columns_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",".join(f"c{k}" for k in range(5000)) + "\n" + ",".join("1" * 5000) + "\n")
    with pytest.raises(UsageError, match=r"a\.csv has 5,000 columns, more than 256: name those"):
        dlio.open(str(path), tiers="none")
    monkeypatch.setattr(limits, "usable_memory", lambda: 1000)
    monkeypatch.setattr(limits, "_FREE_BYTES", 0)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SourceError, match=r"a\.csv would need [0-9]+ bytes"):
        dlio.open(str(path), tiers="none")


class _Stored(File):
    """A file of these bytes."""

    def __init__(self, data: bytes) -> None:
        self.name = self.url = "a.csv.gz"
        self.size, self.times, self.local_path = len(data), "", None
        self._changed = ""
        self._data = data

    def read(self, offset: int = 0, count: int | None = None) -> bytes:
        return self._data[offset:][:count]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_what_is_decompressed_and_refused_takes_little_memory(
    pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_files, "_HELD_BYTES", 4 << 20)
    monkeypatch.setattr(limits, "usable_memory", lambda: 1000)
    monkeypatch.setattr(limits, "_FREE_BYTES", 40 << 20)
    monkeypatch.setattr(limits, "_EXPANSION", 1)
    data = pack(bytes(48 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="kept in memory become"):
            in_memory(_Stored(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("size", [6 << 20, 30 << 20])
def test_what_is_counted_first_is_read_as_it_is(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_files, "_HELD_BYTES", 4 << 20)
    data = bytes(range(256)) * (size >> 8)
    packed = gzip.compress(data)
    assert in_memory(_Stored(packed)).read() == data
    for other in (data + b"more", data[:-1]):
        parts = iter([[data], [other]])
        monkeypatch.setattr(compressed_files, "_parts", lambda *_, parts=parts: next(parts))
        with pytest.raises(SourceError, match="has changed while it was read"):
            in_memory(_Stored(packed))
