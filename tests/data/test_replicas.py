"""Several copies of a source: the fastest is read, one that fails is left, damage is healed."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlio
from dlio.cli import main
from dlio.data.reader import open_reader
from dlio.data.reader_contract import StoredBlocks
from dlio.data.replicas import ReadSpeed, ReplicatedReader, measured, replicated
from dlio.errors import SourceError, UsageError
from dlio_staging.pack_folder import pack
from tests.drawn import small_pictures


@pytest.fixture
def folders(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DLIO_NO_FORK", "1")  # Commands are run in this process.
    return [str(shutil.copytree(pictures, tmp_path / name)) for name in ("first", "second")]


def _run(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert not ended.value.code


def _slow(reader: Any, seconds: float) -> list[int]:
    """Have a reader's reads take longer; the count of them."""
    read, count = reader.read, [0]

    def slowed(samples: Any) -> Any:
        count[0] += 1
        time.sleep(seconds)
        return read(samples)

    reader.read = slowed
    return count


def test_reads_go_to_the_copy_that_is_faster(folders: list[str]) -> None:
    slow, fast = (open_reader(folder) for folder in folders)
    count = _slow(slow, 0.01)
    reader = replicated([slow, fast])
    assert isinstance(reader, ReplicatedReader)
    for k in range(60):
        sample = k % len(reader)
        assert reader.read(np.array([sample])) == fast.read(np.array([sample]))
    # Found out at the first; tried again now and then.
    assert 1 <= count[0] <= 12
    assert reader.shares()[1] > 3 * reader.shares()[0]
    assert folders[0] in reader.summary()
    reader.close()


def test_a_copy_that_was_slow_for_a_while_is_tried_again() -> None:
    speed, other = ReadSpeed(0.001, 1e9), ReadSpeed(0.002, 1e9)
    for _ in range(20):
        speed.ends((0, 0, time.monotonic() - 1.0))
    assert speed.expected_s(100) > 0.1 > other.expected_s(100)
    turns = 0
    while speed.expected_s(100) > other.expected_s(100):
        speed.forget()
        turns += 1
    assert 100 < turns < 2000


def test_waiting_reads_count() -> None:
    speed = ReadSpeed(0.001, 1e6)
    idle = speed.expected_s(1000)
    began = speed.begins(100_000)
    assert speed.expected_s(1000) == pytest.approx(idle + 0.1)
    speed.ends(began, failed=True)
    assert speed.expected_s(1000) == pytest.approx(idle)


def test_a_copy_that_fails_is_left_for_another(folders: list[str]) -> None:
    good, bad = (open_reader(folder) for folder in folders)
    shutil.rmtree(folders[1])
    reader = replicated([bad, good])
    for sample in range(len(reader)):
        assert reader.read(np.array([sample])) == good.read(np.array([sample]))
    assert isinstance(reader, ReplicatedReader)
    assert "1 failures" in reader.summary()
    assert reader.shares()[0] == 0
    shutil.rmtree(folders[0])
    with pytest.raises(SourceError):
        reader.read(np.array([0]))
    reader.close()


def test_a_folder_that_is_not_a_copy_is_refused(folders: list[str]) -> None:
    victim = next(Path(folders[1]).rglob("*.jpg"))
    victim.write_bytes(victim.read_bytes() + b"\0")
    with pytest.raises(UsageError, match="another size"):
        dlio.open(folders[0], replicas=[folders[1]])
    victim.unlink()
    with pytest.raises(UsageError, match="is not a copy of"):
        dlio.open(folders[0], replicas=[folders[1]])


def test_a_damaged_block_is_brought_from_another_copy(tmp_path: Path) -> None:
    # Jobs with the same samples share a tier: another test's would have the sound ones.
    small_pictures(tmp_path / "own", images=12, seed=os.getpid())
    packed = [str(tmp_path / name) for name in ("one", "two")]
    pack(str(tmp_path / "own"), packed[0])
    shutil.copytree(packed[0], packed[1])
    for shard in Path(packed[0]).rglob("*.dlio"):
        damaged = bytearray(shard.read_bytes())
        # Payloads alone: a shard with a damaged head or footer is refused when it is opened.
        for at in range(len(damaged) // 16, len(damaged) * 3 // 4, 97):
            damaged[at] ^= 16
        shard.write_bytes(bytes(damaged))
    notes = ""
    for _ in range(30):  # Either copy may be asked for a block, by the time that it takes.
        with (
            dlio.open(packed[0], replicas=[packed[1]], tiers="ram:64MiB", image_size=32) as data,
            dlio.DataLoader(data, 4, shuffle=True) as loader,
        ):
            assert isinstance(data.reader, StoredBlocks)
            assert sum(len(labels) for _, labels in loader) == len(data)
            notes += " ".join(loader.stats()["notes"])
        if "failures" in notes:
            break
    assert "failures" in notes


def test_it_goes_to_other_processes(folders: list[str]) -> None:
    with dlio.open(folders[0], replicas=[folders[1]], tiers="none", image_size=32) as data:
        copy = pickle.loads(pickle.dumps(data))
        assert (copy[3][0] == data[3][0]).all()
        assert isinstance(copy.reader, ReplicatedReader)
        copy.close()


def test_staging_tells_what_each_copy_gave(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tier").mkdir()
    argv = ["stage", folders[0], "--replica", folders[1], "--tiers", f"{tmp_path}/tier:64MiB"]
    _run(argv)
    assert f"copies of the source gave {folders[0]}" in capsys.readouterr().out


def test_bandwidths_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dlio_bench.tier_bench._SECONDS", 0.05)
    folder = tmp_path / "tier"
    folder.mkdir()
    assert measured(str(folder)) is None
    argv = ["bench", "tiers", "--tiers", f"ram:4MiB,{folder}:8MiB", "--size", "4MiB"]
    _run([*argv, "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("ram", str(folder)):
        assert measured(name) == (report[name]["latency_s"], report[name]["bytes_per_s"])
    assert list(folder.iterdir()) == []
