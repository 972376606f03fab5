"""Packing: samples survive from any format into any; the result appears complete or not at all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dlio
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.data.schema import DTYPES, ENCODED, TEXTS, Schema, array_kind
from dlio.errors import TierFull, UsageError
from dlio.image.decoder import decode_whole
from dlio.image.jpeg import parse_frame
from dlio.plan.layout import MAX_BLOCK_BYTES, cut_blocks
from dlio.plan.order import Order
from dlio.util.folders import MARK
from dlio_staging.pack_folder import pack, packed_path
from dlio_staging.pack_plan import PackOptions
from tests.conftest import FullDisk, MpiRun

FORMATS = ("native", "tar", "hdf5", "zarr")
CLI = [sys.executable, "-m", "dlio.cli"]


class MadeReader:
    """A reader of samples in memory, of any schema."""

    format, path, objects = "made", "made", False

    def __init__(self, schema: Schema, rows: list[dict[str, Any]]) -> None:
        self.schema = schema
        self.payloads = [schema.join(row) for row in rows]
        self.sizes = np.array([len(payload) for payload in self.payloads], np.int64)
        self.labels = np.zeros(len(rows), np.int64)
        self.classes = ["a", "b"]
        self.fingerprint = os.urandom(16).hex()
        self.layout = cut_blocks(self.sizes, Order(len(rows), 0, shuffled=False))

    def __len__(self) -> int:
        return len(self.payloads)

    def name(self, sample: int) -> str:
        return f"s{sample}"

    def read(self, samples: Any) -> list[bytes | memoryview]:
        return [self.payloads[int(sample)] for sample in samples]

    def close(self) -> None:
        pass


@st.composite
def made_readers(draw: st.DrawFn) -> MadeReader:
    count = draw(st.integers(1, 6))
    fields: list[tuple[str, str]] = []
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    names = draw(
        st.lists(
            st.sampled_from(["label", "image", "x", "y z", "0", "1.a"]), min_size=1, unique=True
        )
    )
    for name in names:
        if draw(st.booleans()):
            kind = draw(st.sampled_from(ENCODED))
            for row in rows:
                text = kind in TEXTS
                row[name] = draw(st.text(max_size=5) if text else st.binary(max_size=12))
        else:
            dtype = np.dtype(draw(st.sampled_from(DTYPES)))
            shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
            loose = [draw(st.booleans()) for _ in shape]
            kind = array_kind(
                dtype, [None if free else n for free, n in zip(loose, shape, strict=True)]
            )
            for row in rows:
                own = [
                    draw(st.integers(0, 3)) if free else n
                    for free, n in zip(loose, shape, strict=True)
                ]
                row[name] = draw(
                    hnp.arrays(dtype, tuple(own), elements={"allow_nan": False})
                    if dtype.kind in "fc"
                    else hnp.arrays(dtype, tuple(own))
                )
        fields.append((name, kind))
    return MadeReader(Schema(tuple(fields)), rows)


def _content(reader: Reader) -> list[bytes]:
    return [bytes(payload) for payload in reader.read(np.arange(len(reader)))]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(made_readers(), st.permutations(FORMATS), st.sampled_from(["auto", "lz4"]))
@pytest.mark.nightly
def test_samples_survive_every_pair_of_formats(
    tmp_path_factory: pytest.TempPathFactory,
    made: MadeReader,
    formats: list[str],
    compress: str,
) -> None:
    root = tmp_path_factory.mktemp("round")
    os.environ["DLIO_CACHE"] = str(root / "cache")
    source: Any = made
    try:
        for k, format_ in enumerate([*formats, formats[0]]):
            out = str(root / f"{k}")
            pack(
                source,
                out,
                format=format_,
                order="source",
                compress=compress,
                restart_rows=False,
                shard_bytes=1 << 16,
            )
            source = packed_path(out, format_)
            reader = open_reader(source)
            assert reader.schema == made.schema
            assert list(reader.classes) == made.classes
            assert _content(reader) == made.payloads
    finally:
        del os.environ["DLIO_CACHE"]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.daily("3-native", "1-tar", "1-hdf5", "1-zarr")
def test_every_sample_is_packed_once_by_any_number_of_workers(
    pictures: Path, tmp_path: Path, format_: str, workers: int
) -> None:
    options = PackOptions(format=format_, workers=workers, shard_bytes=1 << 17, restart_rows=False)
    done = pack(str(pictures), str(tmp_path / "out"), options=options)
    source = open_reader(str(pictures))
    packed = open_reader(packed_path(str(tmp_path / "out"), format_))
    assert done.samples == len(packed) == 12
    assert sorted(_content(packed)) == sorted(_content(source))
    assert sorted(packed.labels.tolist()) == sorted(source.labels.tolist())
    assert list(packed.classes) == list(source.classes)
    assert os.listdir(tmp_path) == ["out"]
    # Any number of processes writes the same bytes.
    again = PackOptions(format=format_, shard_bytes=1 << 17, restart_rows=False)
    pack(str(pictures), str(tmp_path / "again"), options=again)
    assert _content(open_reader(packed_path(str(tmp_path / "again"), format_))) == _content(packed)


def test_images_are_resized_and_restart_at_rows(pictures: Path, tmp_path: Path) -> None:
    pack(str(pictures), str(tmp_path / "out"), resize=260, order="source")
    source, packed = open_reader(str(pictures)), open_reader(str(tmp_path / "out"))
    assert packed.schema.kinds["image"].text == "jpeg"
    for before, after in zip(source.read(np.arange(12)), packed.read(np.arange(12)), strict=True):
        old, new = source.schema.split(before), packed.schema.split(after)
        assert old["label"] == new["label"]
        small, large = decode_whole(new["image"], "b"), decode_whole(old["image"], "a")
        assert min(small.shape[:2]) == min(260, min(large.shape[:2]))
        frame = parse_frame(new["image"])
        assert frame is not None
        assert frame.intervals_a_row


def test_a_split_puts_each_sample_into_one_part(pictures: Path, tmp_path: Path) -> None:
    split = (("train", 0.7), ("val", 0.3))
    pack(str(pictures), str(tmp_path / "out"), split=split, restart_rows=False)
    parts = [open_reader(str(tmp_path / "out" / name)) for name, _ in split]
    assert [len(part) for part in parts] == [8, 4]
    assert parts[0].fingerprint != parts[1].fingerprint
    payloads = [payload for part in parts for payload in _content(part)]
    assert sorted(payloads) == sorted(_content(open_reader(str(pictures))))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "floppy"}, "--format floppy"),
        ({"split": (("a", 0.5), ("b", 0.4))}, "should be 1"),
        ({"split": (("a", 0.5), ("a", 0.5))}, "differ"),
        ({"split": (("a", 0.999), ("b", 0.001))}, "too few"),
        ({"quality": 0}, "--quality 0"),
        ({"resize": 0}, "--resize 0"),
    ],
)
def test_invalid_options_are_refused_and_leave_no_file(
    pictures: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        pack(str(pictures), str(tmp_path / "out"), **changes)
    assert os.listdir(tmp_path) == []


def test_invalid_destinations_are_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="outside of it"):
        pack(str(pictures), str(pictures / "packed"))
    made = MadeReader(Schema((("x", "int8"),)), [{"x": 1}])
    with pytest.raises(UsageError, match="no images"):
        pack(made, str(tmp_path / "out"), resize=5)


@pytest.mark.cold
def test_a_killed_packing_is_continued(pictures: Path, tmp_path: Path) -> None:
    body = (
        "import os, sys, time\n"
        "from dlio_staging.pack import pack\n"
        "seen = []\n"
        "def slowly(done, total):\n"
        "    seen.append(done)\n"
        "    if len(os.listdir(sys.argv[3])) >= 2: print('two', flush=True); time.sleep(600)\n"
        "pack(sys.argv[1], sys.argv[2], shard_bytes=1 << 16, progress=slowly)\n"
    )
    staging = tmp_path / ".out.packing"
    argv = [str(pictures), str(tmp_path / "out"), str(staging / "done")]
    process = subprocess.Popen(
        [sys.executable, "-c", body, *argv], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "two\n"
    with pytest.raises(UsageError, match="by another process: wait for its end"):
        pack(argv[0], argv[1], shard_bytes=1 << 16)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    done = pack(argv[0], argv[1], shard_bytes=1 << 16)
    assert done.kept_shards == 2
    assert os.listdir(tmp_path) == ["out"]
    pack(argv[0], str(tmp_path / "whole"), shard_bytes=1 << 16)
    files = sorted(os.listdir(tmp_path / "whole"))
    assert files == sorted(os.listdir(tmp_path / "out"))
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_options_start_packing_again(pictures: Path, tmp_path: Path) -> None:
    staging = tmp_path / ".out.packing"
    staging.mkdir(mode=0o700)
    (staging / MARK).write_text("dlio packing 0\n")
    (staging / "done").mkdir()
    (staging / "plan.json").write_text('{"key": "of something else"}')
    (staging / "done" / "0-0.json").write_text('{"data_bytes": 1, "file_bytes": 1}')
    done = pack(str(pictures), str(tmp_path / "out"))
    assert done.kept_shards == 0
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_dlio_has_not_made_is_kept(pictures: Path, tmp_path: Path) -> None:
    staging = tmp_path / ".out.packing"
    staging.mkdir(mode=0o700)
    (staging / "letter").write_text("mine")
    with pytest.raises(UsageError, match="not made by dlio"):
        pack(str(pictures), str(tmp_path / "out"))
    assert (staging / "letter").read_text() == "mine"
    assert os.listdir(tmp_path) == [".out.packing"]


@pytest.mark.parametrize("format_", ["tar", "zarr"])
def test_a_full_disk_leaves_nothing(
    pictures: Path, tmp_path: Path, full_disk: FullDisk, format_: str
) -> None:
    open_reader(str(pictures))
    with full_disk(100_000), pytest.raises((TierFull, UsageError)):
        pack(str(pictures), str(tmp_path / "out"), format=format_)
    assert os.listdir(tmp_path) == []


@pytest.mark.mpi
def test_ranks_write_files_of_their_own(pictures: Path, tmp_path: Path, mpirun: MpiRun) -> None:
    argv = ["-m", "dlio.cli", "pack", str(pictures), str(tmp_path / "out")]
    done = mpirun(2, *argv, "--shard-size", "64KiB", "--no-restart-rows")
    assert done.returncode == 0, done.stderr
    pack(str(pictures), str(tmp_path / "one"), shard_bytes=1 << 16, restart_rows=False)
    for path in sorted((tmp_path / "one").iterdir()):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_command_prints_its_result(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [*CLI, "pack", str(pictures), str(out), "--format", "tar"]
    said = subprocess.run([*argv, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert "12 samples" in said
    assert not out.exists()
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["samples"] == 12
    with dlio.open(str(out), image_size=32, tiers="none") as data:
        assert data[0][0].shape == (3, 32, 32)
    again = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 2
    assert "exists" in again.stderr


@pytest.mark.parametrize(("sample_bytes", "most_calls"), [(40_000, 5), (3 << 20, 10)])
def test_small_blocks_are_read_many_at_a_time_and_large_ones_one_by_one(
    sample_bytes: int, most_calls: int, tmp_path: Path
) -> None:
    count = 9 if sample_bytes > 1 << 20 else 800
    rows = [{"x": k.to_bytes(4) + os.urandom(sample_bytes)} for k in range(count)]
    reader = MadeReader(Schema((("x", "bytes"),)), rows)
    calls: list[int] = []
    plainly = reader.read

    def read(samples: Any) -> list[bytes | memoryview]:
        calls.append(sum(len(payload) for payload in plainly(samples)))
        return plainly(samples)

    reader.read = read  # type: ignore[method-assign]
    pack(reader, str(tmp_path / "out"))
    assert len(calls) <= most_calls
    assert max(calls) <= 2 * MAX_BLOCK_BYTES
    packed = open_reader(str(tmp_path / "out"))
    assert packed.layout.blocks > len(calls) or sample_bytes > 1 << 20
    assert sorted(_content(packed)) == sorted(map(bytes, reader.payloads))
