"""Kills at any system call, power cuts and full disks: files are whole or absent."""

import fcntl
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlio.data.reader import open_reader
from dlio.errors import TierError, UsageError
from dlio.storage.inventory import stored_data
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from dlio_staging.verify import verify
from tests.conftest import in_time

CALLS = (
    "openat",
    "writev",
    "write",
    "rename",
    "renameat",
    "fsync",
    "fallocate",
    "mkdirat",
    "unlinkat",
)
# cold: strace and signals must reach the program itself.
pytestmark = pytest.mark.cold
ENV = {"DLIO_TEST_COLD": "1", **os.environ, "DLIO_NO_FORK": "1", "OMP_NUM_THREADS": "1"}


def _points(count: int, seed: int, argv: list[str], tmp_path: Path) -> list[tuple[str, int]]:
    """Draw moments at which to kill a run: (system call, n) for the n-th call of that kind."""
    if not shutil.which("strace"):
        return [(f"moment{k}", k) for k in range(count)]
    log = tmp_path / "calls"
    tracing = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={','.join(CALLS)}"]
    command = [*tracing, sys.executable, "-m", "dlio.cli", *argv]
    subprocess.run(command, env=ENV, capture_output=True, timeout=400, check=True)
    made = Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE))
    generator = random.Random(seed)
    calls = itertools.cycle(sorted(call for call in made if call in CALLS))
    points = []
    for _ in range(count):
        call = next(calls)
        # Imports open most of the files; the last ones are those of the command.
        points.append((call, generator.randrange(max(0, made[call] - 60), made[call]) + 1))
    return points


def _run_and_kill(argv: list[str], call: str, number: int) -> int:
    """Run a command; kill it at its n-th call of a kind, or without strace at a random moment."""
    command = [sys.executable, "-m", "dlio.cli", *argv]
    if shutil.which("strace"):
        inject = f"inject={call}:signal=KILL:when={number}"
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            os.devnull,
            "-e",
            f"trace={call}",
            "-e",
            inject,
            *command,
        ]
        done = subprocess.run(command, env=ENV, capture_output=True, timeout=400, check=False)
        return done.returncode
    with subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL) as process:
        time.sleep(random.Random(f"{call}{number}").uniform(0.1, 0.8))
        process.kill()
        return process.wait(60)


def _content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.blk"))
    }


def _check_stage_kills(pictures: Path, tmp_path: Path, count: int, seed: int) -> int:
    source = tmp_path / "packed"
    pack(str(pictures), str(source), restart_rows=False)
    (tmp_path / "traced").mkdir()
    argv = ["stage", str(source), "--tiers", f"{tmp_path}/traced:1GiB", "--workers", "2"]
    points = _points(3 * count, seed, argv, tmp_path)
    reader = open_reader(str(source))
    (tmp_path / "whole").mkdir()
    stage(str(source), StageOptions(tiers=f"{tmp_path}/whole:1GiB"))
    whole = _content(tmp_path / "whole")
    killed = 0
    for k, (call, number) in enumerate(points):
        # Points count the calls of all threads: one thread may make fewer and survive.
        if killed == count:
            break
        tier = tmp_path / f"tier{k}"
        tier.mkdir()
        argv = ["stage", str(source), "--tiers", f"{tier}:1GiB", "--workers", "2"]
        killed += _run_and_kill(argv, call, number) != 0
        some = _content(tier)
        assert some.items() <= whole.items(), (call, number)
        again = stage(str(source), StageOptions(tiers=f"{tier}:1GiB", workers=2))
        assert again.complete
        assert _content(tier) == whole
        # Published blocks are not read again.
        missing = sum(len(data) for name, data in whole.items() if name not in some)
        assert again.read_bytes == missing
        assert [path.name for path in tier.rglob("tmp.*")] == []
        assert verify(str(tier)).damaged == []
        shutil.rmtree(tier)
    assert len(reader) == 12
    return killed


def _check_pack_kills(pictures: Path, tmp_path: Path, count: int, seed: int) -> int:
    argv = ["pack", str(pictures), str(tmp_path / "traced"), "--shard-size", "128KiB"]
    argv += ["--no-restart-rows", "--workers", "1"]
    points = _points(3 * count, seed, argv, tmp_path)
    pack(str(pictures), str(tmp_path / "whole"), shard_bytes=1 << 17, restart_rows=False)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    killed = 0
    for k, (call, number) in enumerate(points):
        # Points count the calls of all threads: one thread may make fewer and survive.
        if killed == count:
            break
        inside = tmp_path / f"out{k}"
        inside.mkdir()
        out = inside / "packed"
        argv = ["pack", str(pictures), str(out), "--shard-size", "128KiB", "--no-restart-rows"]
        code = _run_and_kill([*argv, "--workers", "1"], call, number)
        killed += code != 0
        # Killed after the last rename, it is complete.
        if code and not out.exists():
            pack(str(pictures), str(out), shard_bytes=1 << 17, restart_rows=False)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
        left = [name for name in os.listdir(inside) if name != "packed"]
        assert left in ([], [".packed.packing"])
        shutil.rmtree(inside)
    return killed


def test_staging_that_is_killed_at_a_system_call_is_whole_or_absent(
    pictures: Path, tmp_path: Path
) -> None:
    assert _check_stage_kills(pictures, tmp_path, 2, 0) == 2


def test_packing_that_is_killed_at_a_system_call_is_whole_or_absent(
    pictures: Path, tmp_path: Path
) -> None:
    assert _check_pack_kills(pictures, tmp_path, 2, 1) == 2


@pytest.mark.nightly
def test_a_hundred_kills_of_staging(pictures: Path, tmp_path: Path) -> None:
    assert _check_stage_kills(pictures, tmp_path, 100, 2) == 100


@pytest.mark.nightly
def test_a_hundred_kills_of_packing(pictures: Path, tmp_path: Path) -> None:
    assert _check_pack_kills(pictures, tmp_path, 100, 3) == 100


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.daily("2")
def test_a_killed_eviction_is_finished_by_the_next_one(
    pictures: Path, tmp_path: Path, number: int
) -> None:
    (tmp_path / "tier").mkdir()
    stage(str(pictures), StageOptions(tiers=f"{tmp_path}/tier:1GiB"))
    argv = ["evict", "--all", "--tiers", f"{tmp_path}/tier"]
    _run_and_kill(argv, "unlinkat", number)
    for entry in stored_data(f"{tmp_path}/tier"):
        assert verify(entry.path).damaged == []
    stage(str(pictures), StageOptions(tiers=f"{tmp_path}/tier:1GiB"))
    subprocess.run([sys.executable, "-m", "dlio.cli", *argv], check=True, capture_output=True)
    left = [path.name for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    assert sorted(left) == [".dlio", "lock"]


@contextmanager
def _mounted(tmp_path: Path, size: str) -> Iterator[Path]:
    """Mount a small ext4 on a loop device."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not shutil.which("mount"):
        pytest.skip("mounting a file system needs root, mkfs.ext4 and mount")
    image, mount = tmp_path / "image", tmp_path / "mount"
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a loop device cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)


def test_published_blocks_survive_a_power_cut(pictures: Path, tmp_path: Path) -> None:
    """FS_IOC_SHUTDOWN without flushing drops everything that is not yet on the disk."""
    source = tmp_path / "packed"
    pack(str(pictures), str(source), restart_rows=False)
    with _mounted(tmp_path, "64M") as mount:
        (mount / "tier").mkdir()
        subprocess.run(["sync", "-f", str(mount)], check=True)
        argv = ["stage", str(source), "--tiers", f"{mount}/tier:1GiB", "--bwlimit", "400KiB"]
        with subprocess.Popen(
            [sys.executable, "-m", "dlio.cli", *argv],
            env=ENV,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            assert in_time(lambda: len(list(mount.rglob("*.blk"))) >= 3)
            descriptor = os.open(mount, os.O_RDONLY)
            try:
                fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))
            except OSError as error:
                process.kill()
                pytest.skip(f"this kernel cannot cut the power: {error}")
            finally:
                os.close(descriptor)
            process.kill()
            process.wait(60)
        subprocess.run(["umount", str(mount)], check=True)
        subprocess.run(["mount", "-o", "loop", str(tmp_path / "image"), str(mount)], check=True)
        if list(mount.rglob("*.blk")):
            damaged = verify(f"{mount}/tier").damaged
            assert damaged == []
        assert stage(str(source), StageOptions(tiers=f"{mount}/tier:1GiB")).complete
        assert verify(f"{mount}/tier").samples == 12


def test_a_disk_that_fills_up_is_reported_and_leaves_whole_blocks(
    imagenet: Path, tmp_path: Path
) -> None:
    with _mounted(tmp_path, "16M") as mount:
        (mount / "tier").mkdir()
        with pytest.raises(TierError, match=r"room|free"):
            stage(str(imagenet), StageOptions(tiers=f"{mount}/tier:1GiB"))
        # Other files grow on the disk, so it fills up while blocks are written.
        size = os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize
        done = stage(str(imagenet), StageOptions(tiers=f"{mount}/tier:{size - (2 << 20)}B"))
        assert 0 < done.kept_share < 1
        assert verify(f"{mount}/tier").damaged == []
        with pytest.raises(UsageError):
            pack(str(imagenet), f"{mount}/packed/inside")
        with pytest.raises(TierError, match="cannot be written: No space left on device"):
            pack(str(imagenet), f"{mount}/packed", restart_rows=False)
        assert sorted(os.listdir(mount)) == ["lost+found", "tier"]


def test_two_stagers_at_once_read_the_source_once(pictures: Path, tmp_path: Path) -> None:
    source = tmp_path / "packed"
    pack(str(pictures), str(source), restart_rows=False)
    (tmp_path / "tier").mkdir()
    reports = [tmp_path / f"r{k}.json" for k in range(2)]
    argv = [sys.executable, "-m", "dlio.cli", "stage", str(source)]
    argv += ["--tiers", f"{tmp_path}/tier:1GiB"]
    jobs = [subprocess.Popen([*argv, "--report", str(report)]) for report in reports]
    assert [job.wait(120) for job in jobs] == [0, 0]
    import json

    read = sum(json.loads(report.read_text())["read_bytes"] for report in reports)
    assert read == open_reader(str(source)).block_bytes.sum()  # type: ignore[attr-defined]
    assert verify(f"{tmp_path}/tier").samples == 12
