"""Every code block of README.md and docs/ runs, or names a requirement that tests cannot meet."""

import json
import os
import re
import select
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlio_docs.blocks import NEEDS, RUNNABLE, SHOWN, Block, blocks_of, commands_of, pages

from tests.conftest import ROOT, SOURCES

# `python`, `mpirun` and `dlio` are those of the tests' warm interpreter, where there is one.
FOLDERS = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), os.environ["PATH"]]
RULES = tomllib.loads((ROOT / "docs" / "blocks.toml").read_text(encoding="utf-8"))
PAGES = [
    path
    for path in pages(ROOT)
    if any(block.language in RUNNABLE for block in blocks_of(path))
    and str(path.relative_to(ROOT)) not in RULES["elsewhere"]
]
_DEADLINE_S = 900
_SHELL = re.compile(r"[|<>;&`]|\$\(|^(?!dlio )")
"""A command that needs a shell; the runner, which has imported torch, runs all others."""


class Runner:
    """The process that runs blocks, and the folders that they run in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("runner.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment(),
            start_new_session=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def page(self, number: int, pictures: Path) -> Path:
        """Begin a page: an empty namespace and a folder with pictures."""
        place = self._folder / str(number)
        for name, kind in RULES["places"].items():
            folder = place / name.lstrip("/")
            folder.parent.mkdir(parents=True, exist_ok=True)
            if kind in ("pictures", "boxes"):
                folder.symlink_to(pictures.parent / kind, target_is_directory=True)
            else:
                folder.mkdir(parents=True)
        self._ask({"kind": "page"})
        return place

    def python(self, text: str, block: Block, place: Path) -> None:
        request = {"kind": "python", "text": _placed(text, place), "place": block.place}
        self._checked(request, block, place)

    def command(self, command: str, block: Block, place: Path) -> None:
        for rule in RULES["rewrites"]:
            command = re.sub(rule["pattern"], rule["text"], command)
        command = _placed(command, place)
        if not _SHELL.search(command.split(" #")[0]):
            words = [os.path.expandvars(word) for word in shlex.split(command, comments=True)]
            self._checked({"kind": "dlio", "arguments": words[1:]}, block, place)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=place,
            env=self._environment(),
            timeout=_DEADLINE_S,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout}{done.stderr}"

    def _checked(self, request: dict[str, Any], block: Block, place: Path) -> None:
        variables = {"HOME": str(place), "DLIO_CACHE": str(place / ".cache")}
        answer = self._ask({**request, "folder": str(place), "variables": variables})
        said = request.get("arguments") or ""
        assert answer["status"] == 0, f"{block.place}: {said}\n{answer['output']}"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        assert line, f"the process that runs blocks has ended or hangs at {request}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **RULES["variables"],
            "PATH": os.pathsep.join(FOLDERS),
            "PYTHONPATH": SOURCES,
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_btl_sm_backing_directory": str(self._folder),
        }


def _placed(text: str, place: Path) -> str:
    """Move absolute paths of the documentation into the page's folder."""
    for name in RULES["places"]:
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?=[/:\"' ,)]|$)", f"{place}{name}", text)
    return text


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of drawn pictures, `train` and `val`; next to them, pictures with boxes."""
    from tests.drawn import draw_once
    from tests.loader.targets_data import drawn, painted, write, write_coco, write_masks, write_yolo

    folder = tmp_path_factory.mktemp("docs") / "pictures"
    draw_once(folder, images=48, validation=12, classes=3)
    rows, boxes = drawn(0, 8, boxes=2), folder.parent / "boxes"
    write_coco(boxes / "coco", rows)
    write_yolo(boxes / "yolo", rows)
    write_masks(boxes / "masks", rows)
    for k, (height, width, inside) in enumerate(rows):
        write(boxes / "photos" / f"{k}.jpg", painted(height, width, inside))
    return folder


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("pages"))
    try:
        yield made
    finally:
        made.close()


def test_every_block_says_how_it_is_tested() -> None:
    wrong = []
    for path in pages(ROOT):
        for block in blocks_of(path):
            if block.language not in RUNNABLE + SHOWN:
                wrong.append(f"{block.place}: the language {block.language!r} is not known")
            if block.markers.get("needs", NEEDS[0]) not in NEEDS:
                wrong.append(f"{block.place}: needs is one of {', '.join(NEEDS)}")
            if block.markers.get("given", "training") not in RULES["given"]:
                wrong.append(f"{block.place}: docs/blocks.toml has no such [given]")
    for page, test in RULES["elsewhere"].items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=(name := str(path.relative_to(ROOT))),
            marks=[pytest.mark.nightly] if name in RULES["nightly"]["pages"] else [],
        )
        for path in PAGES
    ],
)
def test_blocks_of_a_page_run(path: Path, runner: Runner, drawn: Path) -> None:
    _run_page(path, runner, runner.page(PAGES.index(path), drawn), nightly=False)


LONG = [path for path in PAGES if any("runs" in block.markers for block in blocks_of(path))]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", LONG, ids=[str(path.relative_to(ROOT)) for path in LONG])
def test_blocks_that_take_minutes_run(path: Path, runner: Runner, drawn: Path) -> None:
    _run_page(path, runner, runner.page(len(PAGES) + PAGES.index(path), drawn), nightly=True)


def _run_page(path: Path, runner: Runner, place: Path, nightly: bool) -> None:
    """Run a page's blocks; those that take minutes run only if `nightly`."""
    given: set[str] = set()
    for block in blocks_of(path):
        if block.language not in RUNNABLE or "needs" in block.markers:
            continue
        if block.markers.get("runs") == "nightly" and not nightly:
            continue
        name = block.markers.get("given")
        if name is not None and name not in given:
            given.add(name)
            runner.python(RULES["given"][name], block, place)
        if block.language == "python":
            runner.python(block.text, block, place)
            continue
        for command in commands_of(block.text):
            runner.command(command, block, place)
