"""TFRecord files: features as fields, checksums, shards, and all that is refused."""

import contextlib
import gzip
import io
import struct
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

import dlio
from dlio.data.reader import open_reader
from dlio.data.source import File
from dlio.errors import CorruptBlock, DlioError, SourceError, UsageError
from dlio.storage.file_system_kind import file_system_of
from dlio_readers import tfrecord
from dlio_readers.tfrecord import (
    RecordBytes,
    TfRecordReader,
    count_of,
    features_of,
    floats_of,
    ints_of,
    masked,
)
from dlio_staging.pack_folder import pack
from tests.conftest import examples
from tests.readers.tfrecords import Values, example, sequence_example, write


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


def _records(count: int = 10) -> list[Values]:
    return [
        {
            "id": [10 * k - 3],
            "weight": [k / 4],
            "name": [f"säule {k}".encode()],
            "raw": [bytes([0, k, 255])],
            "boxes": [float(n) for n in range(k % 3 * 4)],
            "token": [7, 2**62, -k],
        }
        for k in range(count)
    ]


def _picture(k: int) -> bytes:
    rng = np.random.default_rng(k)
    pixels = rng.integers(0, 255, (40 + k, 50, 3), np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, 90, "RGB"))


def test_features_are_fields_of_the_kinds_of_all_their_values(tmp_path: Path) -> None:
    records = _records()
    write(tmp_path / "x.tfrecord", map(example, records))
    with dlio.open(tmp_path / "x.tfrecord", tiers="ram:1MiB") as data:
        assert dict(data.reader.schema.fields) == {
            "boxes": "float32[?]",
            "id": "int64",
            "name": "text",
            "raw": "bytes",
            "token": "int64[3]",
            "weight": "float32",
        }
        assert data.targets == [10 * k - 3 for k in range(10)]
        for k, values in enumerate(records):
            sample = data[k]
            assert sample["boxes"].tolist() == values["boxes"]
            assert (sample["id"], sample["weight"]) == (values["id"][0], values["weight"][0])
            assert sample["name"] == f"säule {k}"
            assert sample["raw"] == values["raw"][0]
            assert sample["token"].tolist() == values["token"]
        assert data.reader.name(4) == "x.tfrecord:4"
    with dlio.open(f"{tmp_path}/x.tfrecord::weight,token", tiers="none") as data:
        batch = next(iter(dlio.DataLoader(data, batch_size=10)))
        assert batch["token"].shape == (10, 3)
        assert batch["weight"].tolist() == [k / 4 for k in range(10)]


@pytest.mark.parametrize("pattern", ["", "/train-*", "/train-{00000..00002}-of-00003"])
def test_pictures_in_shards_go_through_the_image_path(pattern: str, tmp_path: Path) -> None:
    for shard in range(3):
        write(
            tmp_path / f"train-{shard:05d}-of-00003",
            (
                example({"image/encoded": [_picture(k)], "image/class/label": [k % 4]})
                for k in range(4 * shard, 4 * shard + 4)
            ),
        )
    with dlio.open(str(tmp_path) + pattern, image_size=24, tiers="ram:1MiB") as data:
        assert data.reader.format == "tfrecord"
        assert len(data) == 12
        assert data.targets == [k % 4 for k in range(12)]
        loader = dlio.DataLoader(data, batch_size=6, shuffle=True)
        for images, labels in loader:
            assert images.shape == (6, 3, 24, 24)
            assert labels.tolist() == [int(k) % 4 for k in loader.last_samples]
        assert loader.stats()["engine"] == "planned"
    with dlio.open(str(tmp_path) + pattern, image_size=None, tiers="none") as data:
        assert data[7]["image/encoded"].shape == (3, 47, 50)


class Clock:
    """Time in which a read takes a latency, and its bytes at a bandwidth; counts bytes read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, latency_s: float, bandwidth: float) -> None:
        self.reads: list[int] = []
        self._now = 0.0
        real = File.read

        def timed(file: File, offset: int = 0, count: int | None = None) -> bytes:
            data = real(file, offset, count)
            self.reads.append(len(data))
            self._now += latency_s + len(data) / bandwidth
            return data

        monkeypatch.setattr(File, "read", timed)
        monkeypatch.setattr("dlio_readers.tfrecord.perf_counter", lambda: self._now)


def test_a_scan_skips_large_values_and_happens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "x.tfrecord",
        (example({"a": [bytes(1 << 20)], "z": [k]}) for k in range(8)),
    )
    clock = Clock(monkeypatch, 1e-4, 1e9)
    reader = TfRecordReader(str(tmp_path / "x.tfrecord"))
    assert reader.labels.tolist() == list(range(8))
    assert 0 < sum(clock.reads) < 8 * (1 << 20) / 10
    clock.reads.clear()
    assert TfRecordReader(str(tmp_path / "x.tfrecord")).labels.tolist() == list(range(8))
    assert not clock.reads


@pytest.fixture(scope="module")
def long_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 records of 100 kB."""
    path = tmp_path_factory.mktemp("records") / "x.tfrecord"
    write(path, (example({"a": [bytes(100_000)], "z": [k]}) for k in range(200)))
    return path


@pytest.mark.parametrize(
    ("latency_s", "bandwidth", "reads_through"),
    [
        (1e-4, 1e9, False),
        (20e-3, 1e9, True),
        (20e-3, 1e6, False),
        (0.0, 1e6, False),
    ],
)
def test_a_scan_reads_through_where_requests_are_slow_and_bytes_are_not(
    long_records: Path,
    monkeypatch: pytest.MonkeyPatch,
    latency_s: float,
    bandwidth: float,
    reads_through: bool,
) -> None:
    count, size = 200, 100_000
    clock = Clock(monkeypatch, latency_s, bandwidth)
    reader = TfRecordReader(str(long_records))
    assert reader.labels.tolist() == list(range(count))
    if reads_through:
        assert len(clock.reads) < 30
    else:
        assert count // 2 < len(clock.reads) <= 2 * count
        assert sum(clock.reads) < count * size / 2


def test_files_of_a_network_are_scanned_side_by_side_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Values] = [{"a": [], "n": [k], "t": [b"x" * 40]} for k in range(3)]
    write(tmp_path / "0.tfrecord", [])
    write(tmp_path / "1.tfrecord", map(example, first))
    write(tmp_path / "2.tfrecord", (example({"a": [1.5], "n": [k], "t": [b"y"]}) for k in range(2)))
    threads: set[str] = set()
    real = File.read

    def seen(file: File, offset: int = 0, count: int | None = None) -> bytes:
        threads.add(threading.current_thread().name)
        return real(file, offset, count)

    monkeypatch.setattr(File, "read", seen)
    with monkeypatch.context() as patch:
        place = file_system_of(str(tmp_path))
        patch.setattr(
            "dlio_readers.path_reader.file_system_of", lambda _: replace(place, kind="nfs")
        )
        networked = TfRecordReader(str(tmp_path))
    assert any(name.startswith("dlio-ask") for name in threads)
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "other"))
    local = TfRecordReader(str(tmp_path))
    assert networked.schema == local.schema
    assert networked.fingerprint == local.fingerprint
    assert networked.labels.tolist() == local.labels.tolist() == [0, 1, 2, 0, 1]
    assert [networked.name(k) for k in (0, 4)] == ["1.tfrecord:0", "2.tfrecord:1"]
    write(tmp_path / "3.tfrecord", (example({"a": [k], "n": [k], "t": [b"y"]}) for k in range(2)))
    with pytest.raises(SourceError, match=r"3\.tfrecord, record 0, has 'a' as int64, .* float32"):
        TfRecordReader(str(tmp_path))


def test_damage_is_named_with_file_and_record(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    write(path, map(example, _records()))
    intact = path.read_bytes()
    ends = np.cumsum([len(example(each)) + 16 for each in _records()])
    flipped = bytearray(intact)
    flipped[ends[3] + 40] ^= 1
    path.write_bytes(flipped)
    reader = TfRecordReader(str(path))
    with pytest.raises(CorruptBlock, match=r"x\.tfrecord, record 4, has a wrong checksum of its d"):
        reader.read(np.array([4]))
    flipped = bytearray(intact)
    flipped[ends[5] + 3] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CorruptBlock, match=r"record 6, has a wrong checksum of its length"):
        TfRecordReader(str(path))
    for cut in (ends[-1] - 1, ends[-2] + 5, ends[-2] + 20):
        path.write_bytes(intact[:cut])
        with pytest.raises(SourceError, match=r"x\.tfrecord, record 9, .*cut off.*restore"):
            TfRecordReader(str(path))
    head = struct.pack("<Q", 2**62)
    path.write_bytes(head + struct.pack("<I", masked(head)) + bytes(100))
    with pytest.raises(SourceError, match=rf"record 0, has {2**62} bytes, of which the file holds"):
        TfRecordReader(str(path))


def test_what_is_not_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    data = io.BytesIO()
    write(tmp_path / "plain", map(example, _records()))
    data.write((tmp_path / "plain").read_bytes())
    (tmp_path / "x.tfrecord.gz").write_bytes(gzip.compress(data.getvalue()))
    with pytest.raises(SourceError, match=r"x\.tfrecord\.gz is compressed as a whole.*gunzip"):
        dlio.open(tmp_path / "x.tfrecord.gz")
    write(tmp_path / "s.tfrecord", [sequence_example({"a": [1]})])
    with pytest.raises(SourceError, match=r"s\.tfrecord, record 0, is a tf\.train\.SequenceExampl"):
        dlio.open(tmp_path / "s.tfrecord")
    write(tmp_path / "n.tfrecord", [b"\xff" * 40])
    with pytest.raises(SourceError, match=r"record 0, is not a tf\.train\.Example"):
        dlio.open(tmp_path / "n.tfrecord")
    write(tmp_path / "l.tfrecord", [example({"a": [b"x", b"y"], "b": [1]})])
    with pytest.raises(SourceError, match=r"2 byte strings in 'a'.*::image,label"):
        dlio.open(tmp_path / "l.tfrecord")
    assert len(dlio.open(f"{tmp_path}/l.tfrecord::b", tiers="none")) == 1
    write(tmp_path / "m.tfrecord", [example({"label": [1]})])
    with pytest.raises(UsageError, match=r"no feature 'lable': it has label; did you mean label"):
        dlio.open(f"{tmp_path}/m.tfrecord::lable")
    write(tmp_path / "d.tfrecord", [example({"a": [1]}), example({"a": [1.0]})])
    with pytest.raises(SourceError, match=r"record 1, has 'a' as float32, others as int64"):
        dlio.open(tmp_path / "d.tfrecord")
    write(tmp_path / "e.tfrecord", [example({"a": [1]}), example({"a": [1], "b": [1]})])
    with pytest.raises(SourceError, match=r"record 1, has a feature 'b', which the first record"):
        dlio.open(tmp_path / "e.tfrecord")
    (tmp_path / "both").mkdir()
    for name in ("train", "validation"):
        write(tmp_path / "both" / f"{name}-00000-of-00001", map(example, _records()))
    with pytest.raises(UsageError, match=r"train \(1 file\), validation \(1 file\): choose"):
        dlio.open(tmp_path / "both")
    assert len(dlio.open(tmp_path / "both", split="val")) * 2 == len(
        dlio.open(tmp_path / "both", split="all")
    )
    for name in ("birds", "fish"):
        (tmp_path / "sets").mkdir(exist_ok=True)
        write(tmp_path / "sets" / f"{name}-00000-of-00001", map(example, _records()))
    with pytest.raises(UsageError, match=r"2 data sets, birds, fish: name one, as in .*bir"):
        dlio.open(tmp_path / "sets")


def test_packed_shards_hold_the_same_samples(tmp_path: Path) -> None:
    write(tmp_path / "x.tfrecord", map(example, _records()))
    pack(str(tmp_path / "x.tfrecord"), str(tmp_path / "packed"), order="source")
    with (
        dlio.open(tmp_path / "packed", tiers="none") as packed,
        dlio.open(tmp_path / "x.tfrecord", tiers="none") as plain,
    ):
        for k in range(10):
            assert packed[k]["name"] == plain[k]["name"]
            assert packed[k]["boxes"].tolist() == plain[k]["boxes"].tolist()


_numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
_floats = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)
_bytes = st.lists(st.binary(max_size=200), min_size=1, max_size=3)


@given(st.dictionaries(st.text(max_size=20), st.one_of(_numbers, _floats, _bytes), max_size=8))
@settings(max_examples=examples(60), deadline=None)
def test_the_parser_agrees_with_protobuf(values: dict[str, list[object]]) -> None:
    record = RecordBytes(memoryview(example(values)))
    features = features_of(record)
    assert features.keys() == values.keys()
    for name, each in values.items():
        feature = features[name]
        assert count_of(record, feature) == len(each)
        if feature.kind == "int64":
            assert ints_of(record, feature).tolist() == each
        elif feature.kind == "float32":
            assert floats_of(record, feature).tolist() == each
        else:
            assert [record.part(*span) for span in feature.spans] == each


def test_numbers_may_be_written_one_by_one() -> None:
    # Feature {int64_list {value: 1 value: 300}} without packing, as old writers do.
    ints = b"\x08\x01\x08\xac\x02"
    feature = b"\x1a" + bytes([len(ints)]) + ints
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    record = RecordBytes(memoryview(b"\x0a" + bytes([len(features)]) + features))
    assert ints_of(record, features_of(record)["a"]).tolist() == [1, 300]


@given(st.binary(max_size=120), st.integers(0, 200))
@settings(max_examples=examples(150), deadline=None)
def test_no_record_ends_in_anything_but_a_result_or_an_error(noise: bytes, at: int) -> None:
    plain = example(_records(1)[0])
    data = plain[:at] + noise + plain[at + len(noise) :]
    record = RecordBytes(memoryview(data))
    with contextlib.suppress(DlioError):
        assert all(count_of(record, each) <= len(data) for each in features_of(record).values())


@pytest.mark.parametrize("numbers", [[0], [127], [128], [999], [1, 300, 2], [-1], [2**63 - 1]])
def test_few_numbers_are_those_of_many(numbers: list[int]) -> None:
    record = RecordBytes(memoryview(example({"x": numbers})))
    feature = features_of(record)["x"]
    assert ints_of(record, feature).tolist() == numbers
    many = RecordBytes(memoryview(example({"x": numbers * 9})))
    assert ints_of(many, features_of(many)["x"]).tolist() == numbers * 9


def test_a_label_that_a_record_lacks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [example({"x": [1.0], "label": [1]}), example({"x": [2.0]})]
    write(tmp_path / "a.tfrecord", records)
    assert open_reader(str(tmp_path)).labels.tolist() == [0, 0]
    assert "its label is int64[?]" in caplog.text
    assert "or missing in some samples; so the data set has no labels" in caplog.text


def test_a_scan_holds_few_bytes_a_record(tmp_path: Path) -> None:
    path, count = tmp_path / "x.tfrecord", 4_000
    write(path, (example({"image": [bytes(300 + k % 50)], "label": [k]}) for k in range(count)))
    file = File(str(path))
    wanted = tfrecord._wanted(str(path), (), [file], None)
    tracemalloc.start()
    try:
        part = tfrecord._scanned(file, wanted)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(part.at) == count
    assert held / count < 24
