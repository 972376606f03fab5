"""Sources that fail, corrupt data, hang or change: wrong bytes are named and reach no tier."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.errors import CorruptBlock, SourceError, TierError
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from dlio_staging.verify import verify
from tests.faults.faulty import FaultyFileSystem, fails, hangs, install


@pytest.fixture(autouse=True)
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    install()
    yield
    install()


@pytest.fixture
def packed(pictures: Path, tmp_path: Path) -> str:
    pack(str(pictures), str(tmp_path / "packed"), restart_rows=False)
    return f"faulty://{tmp_path}/packed"


@pytest.fixture
def options(tmp_path: Path) -> StageOptions:
    (tmp_path / "tier").mkdir()
    return StageOptions(tiers=f"{tmp_path}/tier:1GiB", workers=4)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_failed_read_skips_its_block_and_the_next_run_stages_it(
    packed: str, options: StageOptions, tmp_path: Path, number: int
) -> None:
    reader = open_reader(packed)
    FaultyFileSystem.fault = staticmethod(fails(number, 3, int(reader.block_bytes.sum())))  # type: ignore[attr-defined]
    with pytest.raises(TierError, match=f"{tmp_path}/packed.*cannot be read"):
        stage(packed, options)
    assert verify(f"{tmp_path}/tier").damaged == []
    FaultyFileSystem.reads.clear()
    done = stage(packed, options)
    assert done.complete
    assert 0 < done.read_bytes < reader.block_bytes.sum()  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", [False, True])
def test_short_reads_are_refused(
    packed: str, pictures: Path, options: StageOptions, tmp_path: Path, folder: bool
) -> None:
    source = f"faulty://{pictures}" if folder else packed
    open_reader(source)

    def short(path: str, offset: int, data: bytes) -> bytes:
        return data[:-1] if offset < 100_000 else data

    reader = open_reader(source)
    FaultyFileSystem.fault = staticmethod(short)
    with pytest.raises((SourceError, CorruptBlock)):
        reader.read(np.arange(3))
    with pytest.raises((TierError, SourceError, CorruptBlock)):
        stage(source, options)
    assert verify(f"{tmp_path}/tier").damaged == [] if _blocks(tmp_path) else True


def _blocks(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tier").rglob("*.blk"))


def test_wrong_bytes_are_detected_by_their_checksums(
    packed: str, options: StageOptions, tmp_path: Path
) -> None:
    """Name, size and time stay the same: only checksums detect the change."""
    reader = open_reader(packed)
    _, start, length = reader.file_of(2)  # type: ignore[attr-defined]

    def flipped(path: str, offset: int, data: bytes) -> bytes:
        place = start + length // 2 - offset
        if 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        return data

    FaultyFileSystem.fault = staticmethod(flipped)
    with pytest.raises(TierError, match="checksum does not match"):
        stage(packed, options)
    assert f"{2:08d}.blk" not in {path.name for path in _blocks(tmp_path)}
    assert verify(f"{tmp_path}/tier").damaged == []


def test_a_file_that_changed_under_the_same_name_size_and_time_is_named(
    pictures: Path, options: StageOptions, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    for path in sorted(pictures.rglob("*.jpg")):
        into = copy / path.relative_to(pictures)
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_bytes(path.read_bytes())
    reader = open_reader(str(copy))
    victim = copy / reader.name(5)
    status = victim.stat()
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceError, match="has changed"):
        reader.read(np.array([5]))


def test_a_listing_that_fails_deletes_nothing(
    pictures: Path, options: StageOptions, tmp_path: Path
) -> None:
    source = f"faulty://{pictures}"
    stage(source, options)
    before = {path: path.read_bytes() for path in _blocks(tmp_path)}

    def refuse(path: str) -> None:
        raise OSError(errno.EIO, "EIO")

    FaultyFileSystem.listing = staticmethod(refuse)
    with pytest.raises(SourceError, match="cannot be read"):
        stage(source, options)
    assert {path: path.read_bytes() for path in _blocks(tmp_path)} == before


def test_reading_from_a_source_that_hangs_ends_at_the_deadline(
    packed: str, options: StageOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = int(open_reader(packed).block_bytes.sum())  # type: ignore[attr-defined]
    monkeypatch.setenv("DLIO_TIMEOUT", "0.5")
    answered = threading.Event()
    threads = threading.active_count()
    wait = hangs(answered)

    def hang(path: str, offset: int, data: bytes) -> bytes:
        # The index lies behind the blocks and has been read before.
        return wait(path, offset, data) if offset < end else data

    FaultyFileSystem.fault = staticmethod(hang)
    try:
        with pytest.raises((SourceError, TierError), match=r"hangs|was not read within"):
            stage(packed, options)
    finally:
        answered.set()
    assert _threads_end(threads)


def _threads_end(count: int) -> bool:
    from tests.conftest import in_time

    return in_time(lambda: threading.active_count() <= count)
