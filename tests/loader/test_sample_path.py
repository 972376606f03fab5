"""A sample goes the way from the source to a batch that docs/design/sample-path.md says."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import dlio
from tests.conftest import ROOT

DOC = ROOT / "docs" / "design" / "sample-path.md"
END = "<!-- end of the path -->"
_CALL = re.compile(r"^(?:\*\*`([\w-]+)`\*\*.*|\d+\. `([\w.]+)`: `([\w.]+)`.*)$", re.MULTILINE)
Call = tuple[str, str, str]
"""(thread, module, function)."""


class Calls:
    """The calls of dlio's functions while it is entered, by thread, in order."""

    def __init__(self) -> None:
        self.made: list[Call] = []

    def __enter__(self) -> "Calls":
        self._before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("dlio."):
            thread = threading.current_thread().name
            self.made.append((thread, module, frame.f_code.co_qualname))


def documented(text: str, thread: str = "") -> list[Call]:
    """Return the calls of the page, with the thread that the line above them names."""
    calls: list[Call] = []
    for named, module, function in _CALL.findall(text):
        thread = named or thread
        if module:
            calls.append((thread, f"dlio.{module}", function))
    return calls


def missing(calls: list[Call], made: list[Call]) -> list[Call]:
    """Return the calls that were not made, or not in this order within their thread."""
    at: dict[str, int] = {}
    lost = []
    for call in calls:
        thread, *function = call
        for number, (name, *other) in enumerate(made):
            if number >= at.get(thread, 0) and name.startswith(thread) and other == function:
                at[thread] = number
                break
        else:
            lost.append(call)
    return lost


def test_a_sample_goes_the_way_that_is_documented(pictures: Path) -> None:
    path, before = DOC.read_text(encoding="utf-8").split(END)
    with (
        dlio.open(str(pictures), image_size=256, tiers="ram:32MiB") as data,
        dlio.DataLoader(data, 4, shuffle=True, num_workers=1) as loader,
    ):
        with Calls() as filling:
            assert sum(1 for _ in loader) == 3
            mounted = data.mounted
            assert mounted is not None
            for block in range(data.reader.layout.blocks):
                assert mounted.hierarchy.block_fetcher.fill(
                    block, 60
                )  # Whoever fills it, it is there now.
        with Calls() as reading:
            assert sum(1 for _ in loader) == 3
    calls = documented(path)
    assert len(calls) >= 8
    assert missing(calls, reading.made) == []
    # A block may also be brought for a sample that is wanted now, by another thread.
    functions = {call[1:] for call in filling.made}
    assert [call for call in documented(before) if call[1:] not in functions] == []


def test_the_page_names_few_files() -> None:
    path = DOC.read_text(encoding="utf-8").split(END)[0]
    assert len({module for _, module, _ in documented(path)}) <= 12


def test_types_to_learn_first_exist() -> None:
    path = DOC.read_text(encoding="utf-8").split(END)[0]
    [sentence] = re.findall(r"Learn these types first: (.*?)\n\n", path, flags=re.DOTALL)
    modules = {module for _, module, _ in documented(path)}
    classes = {name for module in modules for name in vars(sys.modules[module])}
    assert set(re.findall(r"`(\w+)`", sentence)) <= classes
