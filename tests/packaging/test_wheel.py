"""The sdist is complete; the wheel built from it, once installed, has readers and commands."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dlio.image.native.build import compiler

ROOT = Path(__file__).resolve().parents[2]
READERS = [
    *("arrow", "coco", "files", "folder", "hdf5", "idx", "masks", "mds", "parquet", "shard"),
    *("tables", "tar", "tfrecord", "tokens", "torch", "voc", "yolo", "zarr"),
]
COMMANDS = ("pack", "stage", "ls", "verify", "train", "demo", "bench")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and this environment's packages except for dlio."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--disable-pip-version-check", "--prefix", str(home), "--ignore-installed"),
            "--no-compile",  # Few of its modules are imported.
            str(wheel),
        ],
        check=True,
    )
    # A plain path entry: Python ignores .pth files there, such as that of the editable install.
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


def test_the_wheel_has_the_decoder_of_its_platform(wheel: Path) -> None:
    if compiler() is None:
        pytest.skip("needs a C compiler")
    assert "dlio/image/native/_native.so" in zipfile.ZipFile(wheel).namelist()
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")  # one for every Python
    assert platform != "any"


def _built_with(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"), str(out)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_wheel_is_pure_python(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "CC": ""}
    done = _built_with(tmp_path, **nothing)
    assert done.returncode == 0, done.stderr
    assert "no C compiler was found" in done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.stem.endswith("-py3-none-any")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(path).namelist())
    assert _built_with(tmp_path, **nothing, DLIO_BUILD_NATIVE="1").returncode != 0


def test_the_sdist_holds_sources_tests_and_documentation(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "CITATION.cff",
        "README.md",
        "constraints.txt",
        "dlio/__init__.py",
        "dlio/image/native/scan.c",
        "hatch_build.py",
        "readers/dlio_readers/folder.py",
        "docs/assets/tiers.svg",
        "examples/drop_in.py",
        "tests/conftest.py",
    } <= names
    assert not any(name.startswith((".venv", ".cache", ".git/")) for name in names)


def test_the_wheel_names_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (place,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(place).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_lists_all_commands_and_loads_its_readers(
    installed: Path, tmp_path: Path
) -> None:
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


@pytest.mark.nightly
def test_folders_next_to_a_script_do_not_shadow_packages(
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


@pytest.mark.nightly
def test_the_installed_command_packs_stages_and_trains(
    installed: Path, tmp_path: Path, pictures: Path
) -> None:
    (tmp_path / "disk").mkdir()
    tiers = f"{tmp_path}/disk:64MiB"
    _run(installed, "dlio", "pack", str(pictures), "packed", "--workers", "1", cwd=tmp_path)
    _run(installed, "dlio", "stage", "packed", "--tiers", tiers, cwd=tmp_path)
    assert "12 samples" in _run(installed, "dlio", "ls", "packed", cwd=tmp_path).stdout
    small = ("--image-size", "32", "--batch-size", "4", "--epochs", "1", "--tiers", tiers)
    _run(installed, "dlio", "train", "packed", *small, "--report", "run.json", cwd=tmp_path)
    (epoch,) = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["epochs"]
    assert epoch["samples"] == 12
    assert epoch["bytes"]["source"] == 0
    assert _run(installed, "dlio", "--version", cwd=tmp_path).stdout.startswith("dlio 0.")
