"""The set-up of a pass crosses as many rooms, with as many returns, as docs/design/ says."""

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dlio
from tests.conftest import ROOT

DOC = ROOT / "docs" / "design" / "pass-setup.md"
ROOM = "dlio.loader."
BELOW = (
    "dlio.loader.shuffle.",
    "dlio.loader.planned_engine.native_pool",
    "dlio.loader.planned_engine.batch_memory",
)
"""A floor below: the shuffle and the native threads, which start by themselves, and memory."""


def reads_of_values() -> Iterator[CodeType]:
    """Code of properties and of `__len__`: reading a value is not a call of the way."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(ROOM):
            continue
        for _, kind in inspect.getmembers(module, inspect.isclass):
            for member in vars(kind).values():
                if isinstance(member, property) and inspect.isfunction(member.fget):
                    yield member.fget.__code__
            length = vars(kind).get("__len__")
            if inspect.isfunction(length):
                yield length.__code__


class Way:
    """Rooms (modules of dlio.loader) that calls enter, and calls that come back to one."""

    def __init__(self, ends_at: CodeType) -> None:
        self.rooms: list[str] = []
        self.returns: list[str] = []
        self.calls: list[str] = []
        self._values = set(reads_of_values())
        self._ends_at = ends_at
        self._stack: list[str] = []
        self._beyond = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and self._stack:
            self._stack.pop()
            self._beyond -= self._beyond > 0
        if event != "call":
            return
        here = self._stack[-1] if self._stack else ""
        room = frame.f_globals.get("__name__", "")
        made = frame.f_code.co_filename == "<string>"  # A dataclass's __init__ makes a value.
        known = room.startswith(ROOM) and not room.startswith(BELOW)
        known = known and not made and frame.f_code not in self._values
        if self._beyond or frame.f_code is self._ends_at:
            self._beyond += 1
        elif known and room != here:
            self._enter(room.removeprefix(ROOM), frame.f_code.co_qualname)
        self._stack.append(room if known else here)

    def _enter(self, room: str, call: str) -> None:
        if self._last == room:
            return  # Another call into the same room, before any other.
        self._last = room
        self.calls.append(f"{room}: {call}")
        if room in self.rooms:
            self.returns.append(f"{room}: {call}")
        else:
            self.rooms.append(room)


def test_the_set_up_of_a_pass_is_the_way_that_is_documented(pictures: Path) -> None:
    from dlio.loader.planned_engine.pipeline import Pipeline

    with dlio.open(str(pictures), image_size=32, tiers="ram:32MiB") as data:
        list(dlio.DataLoader(data, 4, shuffle=True, num_workers=2))  # Imports come first.
    with (
        dlio.open(str(pictures), image_size=32, tiers="ram:32MiB", seed=0) as data,
        dlio.DataLoader(data, 4, shuffle=True, num_workers=2) as loader,
    ):
        way = Way(Pipeline.start.__code__)
        before = sys.getprofile()
        sys.setprofile(way)
        try:
            iterator = iter(loader)
        finally:
            sys.setprofile(before)
        assert sum(1 for _ in iterator) == 3
    text = DOC.read_text(encoding="utf-8")
    documented = re.findall(r"^\d+\. `([\w.]+)`: `([\w.]+)`", text, flags=re.MULTILINE)
    assert way.calls == [f"{room}: {call}" for room, call in documented]
    counted = re.search(r"(\d+) rooms, (\d+) returns", text)
    assert counted is not None
    rooms, returns = map(int, counted.groups())
    assert (len(way.rooms), len(way.returns)) == (rooms, returns)
    assert rooms <= 8
    assert returns <= 2
    assert os.path.exists(ROOT / "docs" / "design" / "sample-path.md")
