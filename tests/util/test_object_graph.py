"""Objects that a user's object holds."""

from collections import deque
from itertools import islice
from typing import Any

import pytest

from dlio.util import object_graph
from dlio.util.object_graph import reachable


@pytest.mark.parametrize("held", [deque([1]), {1: 1}, {1}], ids=lambda each: type(each).__name__)
def test_an_object_that_a_thread_changes_meanwhile_is_looked_at(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[bool] = []
    grow = {"deque": "append", "set": "add", "dict": "setdefault"}[type(held).__name__]

    def change(items: Any, most: int) -> Any:
        if not changed and len(held) == 1:
            changed.append(True)
            # The change of another thread, between the iterator's making and its first item.
            getattr(held, grow)(object())
        return islice(items, most)

    monkeypatch.setattr(object_graph, "islice", change)
    assert held in list(reachable(held))
    assert changed
