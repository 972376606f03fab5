"""A run from the page cache is detected, and a cold one is not accused."""

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import dlio
from dlio_bench.bench_processes import descendants
from dlio_bench.emulated import emulated_mount as slowfs
from dlio_bench.file_systems import FileSystem, file_system_of
from dlio_bench.storage_cases import page_cache, served_bytes
from dlio_bench.storage_cases.served_bytes import Meter, ServedBytes

SIZE = 16 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: pytest's own may be in memory."""
    for parent in (tempfile.gettempdir(), os.getcwd(), "/var/tmp"):
        if os.access(parent, os.W_OK) and served_bytes._device_of(file_system_of(parent)):
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                yield Path(folder)
            return
    pytest.skip("no folder here is on a block device")


@pytest.fixture
def memory() -> Iterator[Path]:
    if not file_system_of("/dev/shm").in_memory:
        pytest.skip("/dev/shm is not in memory here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def written(folder: Path, files: int = 2) -> list[str]:
    paths = [folder / f"{k}.bin" for k in range(files)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE // files))
    return list(map(str, paths))


@contextmanager
def held(paths: list[str]) -> Iterator[None]:
    """Keep files in the page cache: mapped pages stay, even if somebody drops all caches."""
    with ExitStack() as stack:
        for path in paths:
            with open(path, "rb") as file:
                window = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
            stack.enter_context(window)
            sum(window[:: mmap.PAGESIZE])
        yield


def read(paths: list[str]) -> None:
    for path in paths:
        Path(path).read_bytes()


def test_a_warm_cache_is_detected_and_a_cold_one_is_not_accused(disk: Path) -> None:
    paths = written(disk)
    meter = Meter(str(disk))
    dropped = page_cache.drop(paths)
    assert dropped.share < 0.01
    assert not dropped.unknown_files
    assert dropped.notes == ()
    before = meter.snapshot()
    read(paths)
    cold = meter.snapshot() - before
    assert cold.asked_bytes >= SIZE
    assert cold.fetched_bytes >= SIZE
    verdict = meter.verdict(cold, SIZE, dropped.share)
    assert not verdict.from_cache, verdict
    with held(paths):
        assert page_cache.residency(paths).share == 1.0
        before = meter.snapshot()
        read(paths)
        warm = meter.snapshot() - before
    verdict = meter.verdict(warm, SIZE, 1.0)
    assert verdict.from_cache
    assert verdict.cache_share is not None
    assert verdict.cache_share > 0.5
    assert "not of the storage" in verdict.describe()


def test_a_half_warm_cache_is_half_detected(disk: Path) -> None:
    paths = written(disk)
    page_cache.drop(paths)
    meter = Meter(str(disk))
    with held(paths[:1]):
        assert page_cache.residency(paths).share == 0.5
        before = meter.snapshot()
        read(paths)
        share = meter.verdict(meter.snapshot() - before, SIZE).cache_share
    assert share is not None
    assert 0.4 < share <= 0.5


def test_files_that_were_just_written_are_dropped_too(disk: Path) -> None:
    # Their pages are dirty: DONTNEED alone would leave them.
    paths = written(disk)
    assert page_cache.drop(paths).share == 0.0


def test_children_are_counted_while_they_run_and_afterwards(disk: Path) -> None:
    paths = written(disk)
    page_cache.drop(paths)
    meter = Meter(str(disk))
    before = meter.snapshot()
    with subprocess.Popen(
        ["cat", *paths, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        left = SIZE
        while left:
            left -= len(cat.stdout.read(min(left, 1 << 16)))
        for running in (True, False):
            counted = meter.snapshot() - before
            assert (cat.poll() is None) == running
            assert SIZE <= counted.fetched_bytes < 2 * SIZE
            assert not meter.verdict(counted, SIZE).from_cache
            if running:
                cat.stdin.close()
                cat.wait(60)


def test_files_in_memory_cannot_be_dropped_and_are_said_to_be_memory(memory: Path) -> None:
    paths = written(memory)
    dropped = page_cache.drop(paths)
    assert dropped.share == 1.0
    assert "its files are memory" in dropped.notes[0]
    meter = Meter(str(memory))
    before = meter.snapshot()
    read(paths)
    verdict = meter.verdict(meter.snapshot() - before, SIZE)
    assert verdict.from_cache
    assert "tmpfs" in verdict.describe()


@pytest.mark.skipif(slowfs.why_not() is not None, reason="needs FUSE")
def test_slowfs_counts_what_it_served_whatever_lies_in_the_cache_below(tmp_path: Path) -> None:
    paths = written(tmp_path)
    with slowfs.slow_mount(str(tmp_path)) as mounted:
        meter = Meter(mounted)
        seen = [os.path.join(mounted, os.path.basename(path)) for path in paths]
        dropped = page_cache.drop(seen)
        # Opened with direct I/O: the kernel keeps no pages of it.
        assert dropped.share == 0.0
        assert "fuse" in dropped.notes[0]
        before = meter.snapshot()
        read(seen)
        counted = meter.snapshot() - before
        assert counted.slowfs_bytes == SIZE
        assert counted.slowfs_opens == 2
        assert counted.slowfs_reads
        verdict = meter.verdict(counted, SIZE, 1.0)
        assert (verdict.cache_share, verdict.source) == (0.0, "slowfs")
        # Of a loader that had half of it from elsewhere.
        half = meter.verdict(counted, 2 * SIZE)
        assert half.cache_share == 0.5


NFS = FileSystem("/data", "nfs4", "server:/data", "0:77")
SSHFS = FileSystem("/data", "fuse.sshfs", "me@host:/data", "0:78")


@pytest.mark.parametrize(
    ("system", "fetched", "resident", "share"),
    [
        (NFS, SIZE, None, 0.0),
        (NFS, SIZE // 2, None, 0.5),
        (NFS, 0, None, None),
        (NFS, 0, 1.0, 1.0),
        (NFS, 0, 0.0, 0.0),
        (SSHFS, 0, None, None),
        # Of FUSE the kernel counts nothing: these bytes are of other files.
        (SSHFS, SIZE, None, None),
        (SSHFS, SIZE, 0.25, 0.25),
    ],
)
def test_nothing_is_claimed_where_nothing_counts(
    system: FileSystem,
    fetched: int,
    resident: float | None,
    share: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_bytes, "file_system_of", lambda _: system)
    meter = Meter("/data")
    verdict = meter.verdict(ServedBytes(asked_bytes=SIZE, fetched_bytes=fetched), SIZE, resident)
    assert verdict.cache_share == share
    if share is None:
        assert not verdict.from_cache
        assert "unknown" in verdict.describe()


def test_a_missing_file_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(dlio.UsageError, match="generate the data again"):
        page_cache.drop([str(tmp_path / "no.bin")])
    with pytest.raises(dlio.UsageError, match="generate the data again"):
        page_cache.residency([str(tmp_path / "no.bin")])


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert page_cache.residency([str(tmp_path / "empty")]) == page_cache.Residency(0, 0)
    assert page_cache.residency([]).share == 0.0


def test_pages_of_strangers_files_are_unknown_not_resident(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel would tell a stranger that all pages are resident.
    paths = written(disk)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(os, "access", lambda *_: False)
    left = page_cache.residency(paths)
    assert (left.pages, left.unknown_files) == (0, 2)
    dropped = page_cache.drop(paths)
    assert dropped.unknown_files == 2
    assert "only their owner may" in dropped.notes[0]


@pytest.mark.parametrize("writable", [True, False])
def test_drop_caches_is_written_where_it_may_be(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "drop_caches"
    if writable:
        switch.write_text("")
    monkeypatch.setattr(page_cache, "DROP_CACHES", str(switch))
    page_cache.drop(written(tmp_path), everything=True)
    assert switch.exists() == writable
    assert not writable or switch.read_text() == "3\n"


MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt rw - tmpfs none rw
31 22 0:41 / /mnt rw - nfs4 server:/a rw,vers=4.2
32 22 0:42 / /with\040blank rw - lustre mds@tcp:/fs rw
33 22 0:43 / /over rw - overlay overlay rw,lowerdir=/l,upperdir=/up\040per,workdir=/w
34 22 0:44 / /s rw - fuse.slowfs slowfs ro
"""


@pytest.mark.parametrize(
    ("path", "type_", "where"),
    [
        ("/", "ext4", "/"),
        ("/mnt/deep/folder", "nfs4", "/mnt"),  # The later mount hides the earlier one.
        ("/mntelse", "ext4", "/"),
        ("/with blank/x", "lustre", "/with blank"),
        ("/s", "fuse.slowfs", "/s"),
    ],
)
def test_the_file_system_of_a_path_is_known(path: str, type_: str, where: str) -> None:
    system = file_system_of(path, MOUNTS)
    assert (system.type, system.mountpoint) == (type_, where)
    assert system.remote == (type_ in ("nfs4", "lustre"))
    assert system.fuse == (type_ == "fuse.slowfs")


def test_an_overlay_counts_at_the_disk_below(tmp_path: Path) -> None:
    assert file_system_of("/over/x", MOUNTS).upper == "/up per"
    below = file_system_of(str(tmp_path))
    overlay = FileSystem("/", "overlay", "overlay", "0:9", upper=str(tmp_path))
    assert served_bytes._device_of(overlay) == served_bytes._device_of(below)


def test_counters_of_the_own_tree_are_read() -> None:
    tree = descendants(os.getpid())
    assert tree[0] == os.getpid()
    assert served_bytes._io_of(os.getpid())["rchar"] > 0
    assert served_bytes._io_of(2**22 + 1) == {}
    assert file_system_of(sys.executable).type != "unknown"
