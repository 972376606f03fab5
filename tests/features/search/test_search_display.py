"""`dlio top` is told of the trials that run, wait and have ended."""

from typing import Any, cast

from dlio.features.search.search_display import TrialTable
from tests.loader.test_top import parts


def test_a_search_tells_its_trials() -> None:
    class Study:
        folder = "found"
        records = ()
        objectives = ()

        def best(self) -> list[object]:
            return []

    with TrialTable(cast("Any", Study()), 24) as shown:
        shown.update({3: False, 4: True})
        (part,) = parts("search")
    counts = {"trials": 24, "ended": 0, "running": [3], "waiting": [4], "best": None}
    assert part == {"kind": "search", "study": "found", **counts}
