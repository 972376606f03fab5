"""No command runs code of the current folder, which may be a data set of anyone's."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SOURCES

PLANTED = [
    "dlio/__init__.py",
    "dlio_readers/__init__.py",
    "dlio_staging/__init__.py",
    "dlio_bench/__init__.py",
    "multiprocessing/__init__.py",
    "concurrent/__init__.py",
    "torch/__init__.py",
    "numpy/__init__.py",
    "mpi4py/__init__.py",
    "selectors.py",
    "socket.py",
    "json.py",
    "runpy.py",
    "signal.py",
    "typing.py",
    "struct.py",
    "sitecustomize.py",
    "usercustomize.py",
    "timeit.py",
    "colorsys.py",
]
"""Modules that some process of dlio's imports, or may import, soon or late."""

pytestmark = pytest.mark.cold


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A data set whose folder has modules that leave a mark when they are imported."""
    folder = tmp_path / "pictures"
    rng = np.random.default_rng(0)
    # Each package that is planted is a class of its own.
    for label in ("a", "b", *(name.split("/")[0] for name in PLANTED if "/" in name)):
        (folder / label).mkdir(parents=True)
        for number in range(2):
            picture = rng.integers(0, 255, (32, 32, 3), np.uint8)
            Image.fromarray(picture).save(folder / label / f"{number}.png")
    (tmp_path / "tier").mkdir(mode=0o700)
    mark = f"import os\nos.mkdir({str(tmp_path / 'marks')!r} + '-' + __name__)\n"
    for name in PLANTED:
        path = folder / name
        path.write_text(mark, encoding="utf-8")
    return folder


def _run(pictures: Path, argv: Sequence[str]) -> str:
    """Run `dlio` as the installed command would, in the data set's folder."""
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    environment["DLIO_CACHE"] = str(pictures.parent / "cache")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlio.cli", *argv],
        cwd=pictures,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TRAIN = "train . --model resnet(width=4) --epochs 1 --batch-size 4 --image-size 32 --tiers ram:1MiB"


@pytest.mark.parametrize(
    "line",
    [
        # By day, the test below does the same, and may import still more.
        pytest.param(TRAIN, marks=pytest.mark.nightly),
        pytest.param(f"{TRAIN} -n 2", marks=[pytest.mark.mpi, pytest.mark.nightly]),
        pytest.param(
            f"{TRAIN} -n 2 --fault-tolerance shrink", marks=[pytest.mark.mpi, pytest.mark.nightly]
        ),
        pytest.param(f"{TRAIN} -n 2 --backend torch", marks=pytest.mark.nightly),
        "pack . ../packed --shard-size 64KiB --workers 2",
        "stage . --tiers ../tier:10MiB",
        "view . --transform copy:copy --no-browser --count 1 --output ../page.html",
    ],
)
# SECURITY.md: S8
def test_no_module_of_the_current_folder_is_imported(pictures: Path, line: str) -> None:
    _run(pictures, line.split())
    assert [path.name for path in pictures.parent.glob("marks-*")] == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    "more",
    [
        # By day one process: each rank imports torch anew, in 2 s.
        (),
        pytest.param(("-n", "2"), marks=pytest.mark.nightly),
        pytest.param(("-n", "2", "--backend", "torch"), marks=pytest.mark.nightly),
    ],
)
def test_a_model_of_the_current_folder_is_imported_and_nothing_else(
    pictures: Path, more: Sequence[str]
) -> None:
    """`--model mine:make` asks for the user's own module, which may import its neighbours."""
    (pictures / "mine.py").write_text(
        "import torch\nimport helper\n\n\ndef make(classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, classes))\n",
        encoding="utf-8",
    )
    (pictures / "helper.py").write_text("", encoding="utf-8")
    line = TRAIN.replace("--model resnet(width=4)", "--model mine:make")
    _run(pictures, [*line.split(), *more])
    assert [path.name for path in pictures.parent.glob("marks-*")] == []


def test_a_transform_of_the_current_folder_is_imported_and_nothing_else(pictures: Path) -> None:
    """A module of the user's that imports one of Python's gets that one."""
    (pictures / "mine.py").write_text(
        "import colorsys\n\n\ndef keep(picture):\n    return picture\n", encoding="utf-8"
    )
    _run(pictures, "view . --transform mine:keep --no-browser --count 1 --output ../p.html".split())
    assert [path.name for path in pictures.parent.glob("marks-*")] == []


def test_the_planted_modules_would_be_seen(pictures: Path) -> None:
    subprocess.run([sys.executable, "-c", "import colorsys"], cwd=pictures, check=True)
    assert [path.name for path in pictures.parent.glob("marks-*")] == ["marks-colorsys"]
