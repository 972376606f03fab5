"""The wheel, installed by itself, finds its readers and commands."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READERS = ["folder", "hdf5", "mds", "parquet", "shard", "tables", "tar", "torch", "zarr"]
COMMANDS = ("pack", "stage", "ls", "verify", "train", "demo", "bench")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and this one's other packages but not this dlio."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--disable-pip-version-check", "--prefix", str(home), "--ignore-installed"),
            str(wheel),
        ],
        check=True,
    )
    # A plain path entry: the editable install's own .pth files are not followed from there.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return home


def _run(home: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(home / "bin" / args[0]), *args[1:]],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "dlio",
        "dlio_readers",
        "dlio_staging",
        "dlio_bench",
    }
    assert {"dlio/storage/FORMAT.md", "dlio/py.typed"} <= set(names)


def test_it_lists_all_commands_and_loads_its_readers(installed: Path, tmp_path: Path) -> None:
    said = _run(installed, "dlio", "--help", cwd=tmp_path).stdout
    assert all(f"\n  {command} " in said for command in COMMANDS)
    assert "cannot be loaded" not in said
    text = (
        "from importlib.metadata import entry_points; import dlio;"
        "print(dlio.__file__);"
        "print(sorted(e.load().format for e in entry_points(group='dlio.readers')))"
    )
    file, readers = _run(installed, "python", "-c", text, cwd=tmp_path).stdout.splitlines()
    assert file.startswith(str(installed))
    assert readers == str(sorted(READERS))


def test_a_users_own_folders_beside_the_script_break_nothing(
    installed: Path, tmp_path: Path, pictures: Path
) -> None:
    for name in ("readers", "staging", "bench", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user owns this')")
    (tmp_path / "script.py").write_text(
        "import dlio\n"
        f"data = dlio.open({str(pictures)!r}, tiers='none', image_size=32)\n"
        "print(sum(len(images) for images, _ in dlio.DataLoader(data, 5)))\n"
    )
    assert _run(installed, "python", "script.py", cwd=tmp_path).stdout.strip() == "12"
    assert "12 samples" in _run(installed, "dlio", "ls", str(pictures), cwd=tmp_path).stdout
