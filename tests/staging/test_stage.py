"""Staging reads each byte of the source once, for any number of jobs; its blocks are verified."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dlio
from dlio.data.reader import open_reader
from dlio.errors import SourceError, TierError, UsageError
from dlio.storage.inventory import DatasetUse, evict, make_room, set_pinned, stored_data
from dlio.storage.manifest import NAME, Manifest, read_manifest
from dlio.util.trusted_files import closing_descriptor
from dlio.util.user_folders import open_folder
from dlio_staging.manage import find_roots
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from dlio_staging.verify import verify
from tests.conftest import MpiRun, in_time, is_running

CLI = [sys.executable, "-m", "dlio.cli"]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def _options(scratch: Path, **options: object) -> StageOptions:
    return StageOptions(tiers=f"{scratch}:1GiB", **options)  # type: ignore[arg-type]


def _dlio(*argv: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *map(str, argv)], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _blocks(scratch: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in scratch.rglob("*.blk")}


@pytest.mark.parametrize("packed", [False, True])
def test_the_source_is_read_once_and_never_again(
    pictures: Path, tmp_path: Path, scratch: Path, packed: bool
) -> None:
    source = str(pictures)
    if packed:
        source = str(tmp_path / "packed")
        pack(str(pictures), source)
    first = stage(source, _options(scratch))
    assert first.complete
    assert first.read_bytes >= first.data_bytes
    assert first.read_bytes <= 1.2 * first.data_bytes  # With twelve pictures, headers matter.
    before = _blocks(scratch)
    again = stage(source, _options(scratch, verify="all"))
    assert (again.read_bytes, again.healed_blocks) == (0, 0)
    assert _blocks(scratch) == before
    # A job with the same tiers reads nothing from the source.
    with (
        dlio.open(source, tiers=f"{scratch}:1GiB", image_size=32) as data,
        dlio.DataLoader(data, 5, shuffle=True) as loader,
    ):
        assert sum(len(images) for images, _ in loader) == 12
        assert loader.stats()["bytes"]["source"] == 0
    assert stored_data(str(scratch))[0].hits == 12


def test_a_dry_run_moves_nothing(pictures: Path, scratch: Path) -> None:
    said = _dlio("stage", pictures, "--tiers", f"{scratch}:1GiB", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "would be brought" in said.stdout
    assert not list(scratch.iterdir())


def test_a_dry_run_looks_at_earlier_data_and_changes_nothing(
    pictures: Path, scratch: Path, tmp_path: Path
) -> None:
    """Not a time, a lease or a lock's file; and no data set is evicted."""

    def entries() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in [scratch, *scratch.rglob("*")]}

    size = stage(str(pictures), _options(scratch)).planned
    (plans,) = size.values()
    room = plans[0]["bytes"] + 1000
    before = entries()
    again = stage(str(pictures), _options(scratch), dry=True)
    (plans,) = again.planned.values()
    assert (plans[0]["missing_blocks"], entries()) == (0, before)
    # Another data set for which the first has to go.
    other = tmp_path / "other"
    shutil.copytree(pictures, other)
    os.utime(next(other.rglob("*.jpg")), (1, 1))
    planned = stage(str(other), replace(_options(scratch), tiers=f"{scratch}:{room}B"), dry=True)
    (plans,) = planned.planned.values()
    assert plans[0]["missing_blocks"] == planned.blocks
    assert [note.split()[:2] for note in planned.evicted] == [["would", "evict"]]
    assert entries() == before


def test_the_report_counts_samples_and_blocks(
    pictures: Path, scratch: Path, tmp_path: Path
) -> None:
    done = _dlio(
        "stage", pictures, "--tiers", f"{scratch}:1GiB", "--report", tmp_path / "r.json", "--json"
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert report == json.loads(done.stdout.splitlines()[-1])
    assert report["complete"]
    assert report["samples"] == 12
    (plans,) = report["planned"].values()
    assert plans[0]["missing_blocks"] == report["blocks"] == len(_blocks(scratch))


@pytest.mark.parametrize("layout", ["partition", pytest.param("auto", marks=pytest.mark.nightly)])
def test_blocks_that_do_not_fit_are_an_exit_code_unless_that_is_allowed(
    imagenet: Path, scratch: Path, tmp_path: Path, layout: str
) -> None:
    half = stage(str(imagenet), _options(scratch), dry=True).data_bytes // 2
    argv = ["stage", str(imagenet), "--tiers", f"{scratch}:{half}B", "--layout", layout]
    argv += ["--report", str(tmp_path / "report.json")]
    done = _dlio(*argv)
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    report = json.loads((tmp_path / "report.json").read_text())
    assert f"{report['unplaced_blocks']:,} of {report['blocks']:,} blocks" in line
    assert "--allow-partial" in line
    assert not report["complete"]
    assert not report["stopped"]
    staged = _blocks(scratch)
    assert len(staged) + report["unplaced_blocks"] == report["blocks"]
    allowed = _dlio(*argv, "--allow-partial")
    assert (allowed.returncode, allowed.stderr) == (0, "")
    assert _blocks(scratch) == staged
    planned = _dlio(*argv, "--dry-run")
    assert planned.returncode == 0
    assert "do not fit" in planned.stdout


def test_chosen_samples_without_a_place_count_as_such(imagenet: Path, scratch: Path) -> None:
    whole = stage(str(imagenet), _options(scratch), dry=True)
    options = StageOptions(tiers=f"{scratch}:{whole.data_bytes // 2}B")
    part = stage(str(imagenet), options, dry=True)
    reader = open_reader(str(imagenet))
    blocks = [
        {reader.name(int(k)) for k in reader.layout.samples_of(b)} for b in range(part.blocks)
    ]
    chosen = [replace(options, include=tuple(names)) for names in blocks[:8]]
    fits = [1 - stage(str(imagenet), each, dry=True).unplaced_blocks for each in chosen]
    assert 0 < part.unplaced_blocks < part.blocks
    assert set(fits) <= {0, 1}
    assert len(blocks) > 8 or sum(fits) == part.blocks - part.unplaced_blocks


def test_samples_that_do_not_match_are_not_staged(pictures: Path, scratch: Path) -> None:
    reader = open_reader(str(pictures))
    name = reader.name(3)
    stage(str(pictures), _options(scratch, include=[name]))
    assert len(_blocks(scratch)) == 1
    with pytest.raises(UsageError, match="no sample"):
        stage(str(pictures), _options(scratch, exclude=["*"]))


def test_a_run_ends_at_its_deadline_and_the_next_one_continues(
    imagenet: Path, scratch: Path
) -> None:
    tiers = f"{scratch}:1GiB"
    stopped = _dlio("stage", imagenet, "--tiers", tiers, "--bwlimit", "1MiB", "--deadline", "0.5")
    assert stopped.returncode == 3, stopped.stderr
    assert "run again" in stopped.stdout
    some = _blocks(scratch)
    done = stage(str(imagenet), _options(scratch))
    assert done.read_bytes <= done.data_bytes - sum(map(len, some.values())) + len(some) * 200
    assert some.items() <= _blocks(scratch).items()


def test_a_bandwidth_limit_holds(imagenet: Path, scratch: Path) -> None:
    """In one second at 2 MB/s, only a part of 20 MB is staged."""
    stage(str(imagenet), _options(scratch, bandwidth=2 << 20, deadline_s=1.0))
    assert sum(map(len, _blocks(scratch).values())) < 8 << 20


def test_every_flipped_byte_is_detected_and_healed_without_reading_the_rest(
    pictures: Path, scratch: Path
) -> None:
    stage(str(pictures), _options(scratch))
    sound = _blocks(scratch)
    generator = random.Random(0)
    for path, data in sound.items():
        place = generator.randrange(len(data))
        Path(path).write_bytes(
            data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]
        )
    check = verify(str(scratch))
    # A flip in the padding between payloads changes no sample.
    assert len(sound) - 3 <= len(check.damaged) <= len(sound)
    healed = verify(str(scratch), heal=True)
    assert healed.healed == len(check.damaged)
    assert verify(str(scratch)).damaged == []


def test_missing_and_outdated_blocks_are_detected_by_the_manifest(
    pictures: Path, scratch: Path
) -> None:
    stage(str(pictures), _options(scratch))
    blocks = sorted(scratch.rglob("*.blk"))
    blocks[0].unlink()
    (damage,) = verify(str(scratch)).damaged
    assert "block 0 is missing" in damage
    assert verify(str(scratch), heal=True).healed == 1
    folder = str(blocks[0].parent)
    with closing_descriptor(open_folder(folder)) as opened:
        manifest = read_manifest(opened, folder)
    assert manifest is not None
    old = Manifest(manifest.about, manifest.blocks, manifest.digests ^ np.uint64(1))
    (Path(folder) / NAME).write_bytes(old.encode())
    assert len(verify(str(scratch)).damaged) == len(blocks)
    encoded = old.encode()
    (Path(folder) / NAME).write_bytes(encoded[:-1] + bytes([encoded[-1] ^ 1]))
    assert "is damaged: remove it" in verify(str(scratch)).damaged[0]


def test_healing_from_another_data_set_is_refused(
    pictures: Path, scratch: Path, tmp_path: Path
) -> None:
    stage(str(pictures), _options(scratch))
    next(scratch.rglob("*.blk")).unlink()
    other = tmp_path / "other"
    pack(str(pictures), str(other), seed=5)
    with pytest.raises(SourceError, match="not the data set"):
        verify(str(scratch), heal=True, source=str(other))
    with pytest.raises(UsageError, match="is not a tier"):
        verify(str(pictures), heal=True)


def test_a_data_set_in_use_or_pinned_is_not_evicted(pictures: Path, scratch: Path) -> None:
    root = str(scratch)
    done = stage(str(pictures), _options(scratch))
    use = DatasetUse(root, done.fingerprint, {})
    with pytest.raises(TierError, match="in use by job"):
        evict(root, done.fingerprint)
    said = _dlio("evict", "--all", "--tiers", scratch).stdout
    assert said == "evicted 0 data sets, 0 B; in use or pinned, and left: 1\n"
    use.close()
    set_pinned(root, done.fingerprint, True)
    with pytest.raises(TierError, match="pinned"):
        evict(root, done.fingerprint)
    assert make_room(root, 1 << 40, 1 << 40, "") == []
    set_pinned(root, done.fingerprint, False)
    size = sum(path.stat().st_size for path in scratch.rglob("*.blk"))
    assert evict(root, done.fingerprint) == size > 0
    assert stored_data(root) == []


@pytest.mark.cold
def test_a_dead_jobs_lease_expires_and_its_data_is_evicted_by_its_number(
    pictures: Path, scratch: Path
) -> None:
    body = (
        "import sys, time, dlio\n"
        f"data = dlio.open({str(pictures)!r}, tiers={f'{scratch}:1GiB'!r}, image_size=32)\n"
        "loader = dlio.DataLoader(data, 4)\n"
        "next(iter(loader)); print('up', flush=True); time.sleep(600)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", body],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SLURM_JOB_ID": "4711"},
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        (entry,) = stored_data(str(scratch))
        assert [(lease.job, lease.pid, lease.alive) for lease in entry.leases] == [
            ("4711", job.pid, True)
        ]
        kept = _dlio("evict", "--job", "4711", "--tiers", f"{scratch}:1GiB")
        assert kept.returncode == 0
        assert stored_data(str(scratch))
    finally:
        job.kill()
        job.communicate(timeout=400)
    (entry,) = stored_data(str(scratch))
    assert not entry.in_use
    assert _dlio("evict", "--job", "1", "--tiers", scratch).stdout.startswith("evicted 0")
    assert _dlio("evict", "--job", "4711", "--tiers", scratch).stdout.startswith("evicted 1")
    assert not _blocks(scratch)


def test_room_is_made_by_evicting_the_least_recently_used_data_set(
    pictures: Path, scratch: Path, tmp_path: Path
) -> None:
    sources = []
    for seed in range(3):
        source = str(tmp_path / f"packed{seed}")
        pack(str(pictures), source, seed=seed)
        sources.append(source)
    stage(sources[0], _options(scratch))
    size = sum(path.stat().st_size for path in scratch.rglob("*.blk"))
    time.sleep(0.02)
    stage(sources[1], StageOptions(tiers=f"{scratch}:{2 * size + 1000}B"))
    time.sleep(0.02)
    done = stage(sources[2], StageOptions(tiers=f"{scratch}:{2 * size + 1000}B"))
    assert len(done.evicted) == 1
    assert sources[0] in done.evicted[0]
    assert {entry.source for entry in stored_data(str(scratch))} == set(sources[1:])


def test_status_shows_pins_and_uses(pictures: Path, scratch: Path) -> None:
    done = stage(str(pictures), _options(scratch, pin=True))
    status = json.loads(_dlio("status", "--tiers", scratch, "--json").stdout)
    (entry,) = status["tiers"][0]["data_sets"]
    assert entry["fingerprint"] == done.fingerprint
    assert entry["pinned"]
    assert not entry["in_use"]
    assert str(pictures) in _dlio("status", "--tiers", scratch).stdout
    assert find_roots(str(scratch)) == [str(scratch)]
    assert _dlio("evict").returncode == 2


@pytest.mark.cold
def test_a_reader_that_hangs_is_abandoned(pictures: Path, scratch: Path, tmp_path: Path) -> None:
    """The source is a pipe without a writer: opening it blocks for ever."""
    folder = tmp_path / "hanging"
    for path in pictures.rglob("*"):
        if path.is_file():
            into = folder / path.relative_to(pictures)
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_bytes(path.read_bytes())
    time.sleep(2.1)  # A listing is cached when the folders are no longer recent.
    env = {**os.environ, "DLIO_TIMEOUT": "1"}
    assert open_reader(str(folder))
    victim = next(path for path in folder.rglob("*") if path.is_file())
    victim.unlink()
    os.mkfifo(victim)
    command = [*CLI, "stage", str(folder), "--tiers", f"{scratch}:1GiB"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 2


def test_a_tier_that_became_read_only_is_named(
    pictures: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk failed between the lease and the first block."""

    def refuse(folder: int, name: str, *more: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("dlio.storage.tier.open_file", refuse)
    with pytest.raises(TierError, match=r"could not be staged: .* is on a read-only file system"):
        stage(str(pictures), StageOptions(tiers=f"{scratch}:1GiB"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.cold
def test_an_interrupted_run_leaves_whole_blocks_and_no_process(
    imagenet: Path, scratch: Path, number: signal.Signals
) -> None:
    argv = [*CLI, "stage", str(imagenet), "--tiers", f"{scratch}:1GiB", "--bwlimit", "2MiB"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert in_time(lambda: len(list(scratch.rglob("*.blk"))) > 3)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        _, said = process.communicate(timeout=400)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert said.strip() == "dlio: interrupted"
    assert in_time(lambda: not any(is_running(int(child)) for child in children))
    assert verify(str(scratch)).damaged == []


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["partition", "replicate"])
def test_nodes_share_the_source_and_copy_from_each_other(
    pictures: Path, scratch: Path, mpirun: MpiRun, tmp_path: Path, layout: str
) -> None:
    report = tmp_path / "r.json"
    argv = ["-m", "dlio.cli", "stage", str(pictures), "--tiers", f"{scratch}:1GiB"]
    argv += ["--layout", layout, "--pretend-nodes", "3", "--report", str(report)]
    done = mpirun(3, *argv)
    assert done.returncode == 0, done.stderr
    summary = json.loads(report.read_text())
    copies = 3 if layout == "replicate" else 1
    assert len(_blocks(scratch)) == copies * summary["blocks"]
    assert summary["read_bytes"] == summary["data_bytes"]  # Once for any number of nodes.
    assert (summary["copied_bytes"] > 0) == (layout == "replicate")
    check = verify(str(scratch))
    assert (check.damaged, check.samples) == ([], copies * 12)


def test_wrong_usage_is_refused_in_one_line(pictures: Path, scratch: Path, tmp_path: Path) -> None:
    for argv, words in (
        (["stage", pictures, "--tiers", "ram:1GiB"], "nothing to stage into"),
        (["stage", tmp_path / "none", "--tiers", f"{scratch}:1GiB"], "no such file"),
        (["stage", pictures, "--tiers", f"{tmp_path}/none:1GiB"], "cannot be opened"),
        (["stage", pictures, "--tiers", f"{scratch}:1GiB", "--bwlimit", "fast"], "is not a size"),
        (["stage", pictures, "--tiers", f"{scratch}:100B"], "too small"),
        (["evict", "nothing", "--tiers", scratch], "not staged here"),
        (["pin", "nothing", "--tiers", scratch], "not staged here"),
    ):
        done = _dlio(*argv)
        assert done.returncode == 2, argv
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_killed_staging_process_ends_its_command_with_the_same_status() -> None:
    body = "import os; from dlio_staging.stage import abandonable; abandonable(); "
    body += "os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=400, check=False
    )
    assert (done.returncode, done.stderr) == (-9, "")
