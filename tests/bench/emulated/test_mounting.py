"""slowfs gives the files behind it, slowly, fails as its seed says, and goes with its owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlio_bench.emulated import emulated
from dlio_bench.emulated.emulated_folder import EmulatedFolder
from dlio_bench.emulated.emulated_mount import slow_mount, stats, why_not
from dlio_bench.emulated.profile import Profile
from tests.conftest import ROOT, in_time

needs_fuse = pytest.mark.skipif(why_not() is not None, reason=f"no FUSE: {why_not()}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "a").write_bytes(os.urandom(3_000_000))
    (tmp_path / "data" / "deep" / "b").write_bytes(b"b" * 10)
    os.symlink("a", tmp_path / "data" / "link")
    return tmp_path / "data"


@needs_fuse
def test_it_passes_everything_through_and_counts(source: Path) -> None:
    with slow_mount(str(source)) as mounted:
        assert sorted(os.listdir(mounted)) == ["a", "deep", "link"]
        assert Path(mounted, "a").read_bytes() == (source / "a").read_bytes()
        assert Path(mounted, "deep", "b").read_bytes() == b"b" * 10
        assert os.readlink(f"{mounted}/link") == "a"
        counts = stats(mounted)
        assert counts["bytes"] == 3_000_010
        assert counts["opens"] == 2
        # Nothing is cached: a second pass reads again.
        Path(mounted, "a").read_bytes()
        assert stats(mounted)["bytes"] == 6_000_010
        with pytest.raises(OSError, match="Read-only"):
            Path(mounted, "new").write_bytes(b"")
    assert not os.path.exists(mounted)


@needs_fuse
def test_errors_are_drawn_from_the_seed(source: Path) -> None:
    def failing(seed: int) -> list[int]:
        failed = []
        with slow_mount(str(source), eio_rate=0.5, seed=seed) as mounted:
            descriptor = os.open(f"{mounted}/a", os.O_RDONLY)
            for k in range(40):
                try:
                    os.pread(descriptor, 4096, k * 4096)
                except OSError:
                    failed.append(k)
            os.close(descriptor)
        return failed

    first = failing(1)
    assert 5 < len(first) < 35
    assert failing(1) == first
    assert failing(2) != first


@needs_fuse
@pytest.mark.cold
def test_it_goes_with_an_owner_that_is_killed(source: Path) -> None:
    body = (
        "import sys, time\n"
        "from dlio_bench.emulated.emulated_mount import slow_mount\n"
        "with slow_mount(sys.argv[1]) as mounted:\n"
        "    print(mounted, flush=True)\n"
        "    time.sleep(600)\n"
    )
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "bench"))
    owner = subprocess.Popen(
        [sys.executable, "-c", body, str(source)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert owner.stdout is not None
    mounted = owner.stdout.readline().strip()
    assert os.path.ismount(mounted)
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    owner.stdout.close()
    assert in_time(lambda: not os.path.ismount(mounted))
    os.rmdir(mounted)


def test_it_writes_nothing(source: Path) -> None:
    folder = EmulatedFolder(str(source), Profile())
    with pytest.raises(OSError, match="read only"):
        folder.open("/a", os.O_RDWR)
    with pytest.raises(OSError, match="read only"):
        folder.create("/b", 0o644, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="read only"):
        folder.unlink("/a")


@needs_fuse
def test_writes_pass_through_and_are_counted(source: Path) -> None:
    data = os.urandom(2_500_000)
    with emulated(str(source), "seed(1)+metadata(1000000)") as mounted:
        with open(f"{mounted}/new", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.mkdir(f"{mounted}/folder", 0o750)
        os.rename(f"{mounted}/new", f"{mounted}/folder/named")
        counts = stats(mounted)
        os.truncate(f"{mounted}/folder/named", 10)
        os.link(f"{mounted}/folder/named", f"{mounted}/second")
        os.unlink(f"{mounted}/folder/named")
        assert Path(mounted, "second").read_bytes() == data[:10]
        with open(f"{mounted}/second", "ab") as file:
            file.write(b"more")
    assert counts["written"] == len(data)
    assert counts["syncs"] == 1
    assert counts["changes"] == 2
    assert (source / "second").read_bytes() == data[:10] + b"more"
    assert os.stat(source / "folder").st_mode & 0o777 == 0o750
    assert not os.listdir(source / "folder")


def test_without_a_profile_the_folder_is_used_as_it_is(source: Path) -> None:
    with emulated(str(source), "none+seed(3)") as mounted:
        assert mounted == str(source)


def test_all_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "dlio_bench.emulated.emulated_mount"
    monkeypatch.setattr(f"{place}.find_library", lambda name: None)
    monkeypatch.setattr(f"{place}.find_spec", lambda name: None)
    reason = why_not()
    assert reason is not None
    assert "apt install fuse3" in reason
    assert "pip install" in reason
    assert "mfusepy" in reason
