"""A tier: only whole blocks are visible, its folder is private, and its files are removed."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dlio.data.schema import IMAGE_LABEL, Buffer
from dlio.errors import CorruptBlock, TierError, TierFull, UsageError
from dlio.storage import tier as tier_module
from dlio.storage.block import encode_block
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.util import shared_folders
from dlio.util.folders import open_private
from dlio.util.shared_folders import SHARED_MEMORY, sweep_shared_memory, user_folder

FINGERPRINT = "00" * 16
FullDisk = Callable[[int], AbstractContextManager[None]]
ROOT = Path(__file__).resolve().parents[2]


def _pieces(block: int, size: int = 100) -> list[Buffer]:
    payloads = [bytes([place]) * size for place in range(5)]
    return encode_block(payloads, block=block, fingerprint=FINGERPRINT, schema=IMAGE_LABEL)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Tier]:
    with Tier(TierSpec("disk", str(tmp_path), 1 << 20), "data", "node") as tier:
        yield tier


def test_a_published_block_is_read_by_another_process_of_the_node(disk: Tier) -> None:
    disk.publish(3, _pieces(3))
    with Tier(disk.spec, "data", "node") as other:
        assert other.blocks() == {3}
        assert bytes(other.read(3, 2)) == b"\2" * 100
        with pytest.raises(FileNotFoundError):
            other.read(4, 0)


def test_folders_are_private_and_those_of_another_user_are_refused(
    disk: Tier, tmp_path: Path
) -> None:
    for folder, _, _ in os.walk(tmp_path / user_folder()):
        assert os.stat(folder).st_mode & 0o077 == 0
    (tmp_path / user_folder()).chmod(0o777)
    with pytest.raises(TierError, match="yours alone"):
        Tier(disk.spec, "data", "node")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / user_folder()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match=user_folder()):
        Tier(TierSpec("disk", str(tmp_path), 1), "data")


def test_a_folder_that_its_last_user_removes_during_opening_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir
    removed: list[str] = []

    def interrupted(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if len(removed) < 3:
            os.rmdir(name, dir_fd=dir_fd)
            removed.append(name)

    monkeypatch.setattr(os, "mkdir", interrupted)
    os.close(open_private(str(tmp_path), "a", "b"))
    assert removed == ["a"] * 3
    assert (tmp_path / "a" / "b").is_dir()


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"nowhere.*--tiers"):
        Tier(TierSpec("disk", str(tmp_path / "nowhere"), 1), "data")


def test_one_of_two_processes_fills_a_block(disk: Tier) -> None:
    with Tier(disk.spec, "data", "node") as other:
        assert disk.claim(5)
        assert not disk.claim(5)
        assert not other.claim(5)
        assert other.claim(6)
        disk.release(5)
        assert other.claim(5)


def test_a_flipped_bit_is_an_error_and_the_block_can_be_discarded(disk: Tier) -> None:
    disk.publish(0, _pieces(0))
    file = Path(disk.path) / "00000000.blk"
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(data)
    assert bytes(disk.read(0, 0)) == b"\0" * 100
    with pytest.raises(CorruptBlock):
        disk.read(0, 4)
    disk.discard(0)
    assert not disk.has(0)


@pytest.mark.parametrize(("share", "detected"), [("1", 20), ("0.5", 10), ("0", 0)])
def test_a_share_of_the_payloads_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, detected: int
) -> None:
    monkeypatch.setenv("DLIO_CHECK", share)
    with Tier(TierSpec("disk", str(tmp_path), 1 << 20), "data", "node") as tier:
        tier.publish(7, _pieces(7))
        path = Path(tier.path) / "00000007.blk"
        data = bytearray(path.read_bytes())
        data[-50] ^= 1
        path.write_bytes(data)
        errors = 0
        for _ in range(20):
            try:
                tier.read(7, 4)
            except CorruptBlock:
                errors += 1
        assert errors == detected
    monkeypatch.setenv("DLIO_CHECK", "often")
    with pytest.raises(UsageError, match="DLIO_CHECK=often"):
        Tier(TierSpec("disk", str(tmp_path), 1 << 20), "data", "node")


def test_a_block_under_a_wrong_name_is_refused(disk: Tier) -> None:
    disk.publish(0, _pieces(0))
    os.rename(Path(disk.path) / "00000000.blk", Path(disk.path) / "00000001.blk")
    with pytest.raises(CorruptBlock, match="holds block 0"):
        disk.read(1, 0)


def test_a_block_of_another_data_set_is_refused(disk: Tier) -> None:
    disk.publish(0, _pieces(0))
    with (
        Tier(disk.spec, "data", "node", fingerprint="11" * 16) as other,
        pytest.raises(CorruptBlock, match="of data set 0000"),
    ):
        other.read(0, 0)


def test_many_blocks_need_few_descriptors(disk: Tier) -> None:
    for block in range(300):
        disk.publish(block, _pieces(block, 1))
    for block in range(300):
        disk.read(block, 1)
    assert len(os.listdir("/proc/self/fd")) < 300


def test_a_full_disk_leaves_nothing_half_written(disk: Tier, full_disk: FullDisk) -> None:
    with full_disk(5000), pytest.raises(TierFull, match="no room for block 1"):
        disk.publish(1, _pieces(1, 2000))
    assert not [name for name in os.listdir(disk.path) if name != "claims"]


def test_files_of_a_killed_writer_are_removed(disk: Tier) -> None:
    left = Path(disk.path) / "tmp.00000009.1.1"
    left.write_bytes(b"half")
    assert disk.claim(9)  # While a live process fills the block, its file is left alone.
    Tier(disk.spec, "data", "node").close()
    assert left.exists()
    disk.release(9)
    Tier(disk.spec, "data", "node").close()
    assert not left.exists()


@pytest.fixture
def job() -> str:
    return f"test-{secrets.token_hex(4)}"


def _ram(job: str) -> Tier:
    return Tier(TierSpec("ram", SHARED_MEMORY, 1 << 20), job)


Soon = Callable[[Callable[[], bool]], bool]


def test_a_ram_tier_is_listed_again_only_after_a_change(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    listing = tier_module._blocks_in

    def counted(folder: int) -> set[int]:
        asked.append(folder)
        return listing(folder)

    monkeypatch.setattr(tier_module, "_blocks_in", counted)
    with _ram(job) as one, _ram(job) as two:
        one.publish(0, _pieces(0))
        assert one.blocks() == two.blocks() == {0}
        before = len(asked)
        assert one.blocks() == {0}
        assert len(asked) == before + 1  # Another change may have the same time.
        os.utime(one.folder, ns=(0, 10**9))  # As if long ago.
        assert one.blocks() == one.blocks() == {0}
        assert len(asked) == before + 2
        two.publish(1, _pieces(1))
        assert one.blocks() == {0, 1}
        two.discard(0)
        assert one.blocks() == {1}


def test_a_ram_tier_is_removed_with_its_last_process(job: str, soon: Soon) -> None:
    one, two = _ram(job), _ram(job)
    one.publish(0, _pieces(0))
    one.close()
    assert bytes(two.read(0, 1)) == b"\1" * 100
    two.close()
    # If the reaper gets the lock first, it removes the folder instead of the last holder.
    assert soon(lambda: not os.path.exists(two.path))


_JOB = """
import sys, time
sys.path.insert(0, {root!r})
from dlio.storage import tier as t
from dlio.storage.tier_spec import TierSpec
from dlio.util import shared_folders
if {unreaped!r}:
    shared_folders.SHARED_MEMORY = {unreaped!r}
    shared_folders._start_reaper = lambda *_: None
tier = t.Tier(TierSpec("ram", shared_folders.SHARED_MEMORY, 1 << 20), {job!r})
print(tier.path, flush=True)
time.sleep(600)
"""


def _killed_job(job: str, unreaped: str | None = None) -> str:
    """Kill a process that has a RAM tier, and return the tier's path.

    Args:
        unreaped: a folder to use instead of shared memory, without a reaper.
    """
    text = _JOB.format(root=str(ROOT), unreaped=unreaped, job=job)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        path = run.stdout.readline().strip()
        assert os.path.isdir(path)
        assert os.path.basename(path) not in sweep_shared_memory(), "it lives"
        run.kill()
    return path


@pytest.mark.cold
def test_a_killed_jobs_shared_memory_is_freed_by_its_reaper(job: str, soon: Soon) -> None:
    path = _killed_job(job)
    assert soon(lambda: not os.path.exists(path))


@pytest.mark.cold
def test_a_killed_jobs_shared_memory_without_a_reaper_is_freed_by_the_next_start(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In shared memory itself, any other dlio process that starts meanwhile frees it first.
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(shared_folders, "_start_reaper", lambda *_: None)
    path = _killed_job(job, unreaped=str(tmp_path))
    assert os.path.isdir(path)
    _ram(f"{job}-next").close()
    assert not os.path.exists(path)


@pytest.mark.alone
def test_an_idle_machine_has_no_folder_of_ours_in_shared_memory(job: str, soon: Soon) -> None:
    sweep_shared_memory()
    ours = os.path.join(SHARED_MEMORY, user_folder())
    if os.path.exists(ours):
        pytest.skip("another job runs on this machine")
    tier = _ram(job)
    assert os.path.isdir(ours)
    tier.close()
    if not soon(lambda: not os.path.exists(ours)):
        assert job not in os.listdir(ours)
        pytest.skip("another job began to run on this machine")


def test_folders_that_come_and_go_at_once_do_not_disturb_each_other(job: str) -> None:
    def come_and_go(name: str) -> None:
        for _ in range(10):
            with _ram(name) as tier:
                tier.publish(0, _pieces(0))
                assert bytes(tier.read(0, 1)) == b"\1" * 100

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come_and_go, [f"{job}-{k}" for k in range(3)]))
