"""JSON for other programs is RFC 8259's, whatever numbers are in it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlio
from dlio.cli.option_records import OutputOptions
from dlio.util.json_output import json_text

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def _without(value: Any) -> Any:
    """A value as Python's JSON has it, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _without(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(_VALUES, st.sampled_from([None, 2]))
def test_every_value_is_json_and_keeps_its_numbers(value: Any, indent: int | None) -> None:
    read = json.loads(json_text(value, indent), parse_constant=_refuse)
    assert repr(read) == repr(_without(json.loads(json.dumps(value))))


def test_numbers_of_numpy_that_are_floats_are_replaced_too() -> None:
    assert json_text([np.float64("nan"), (-math.inf, 1.5)]) == "[null, [null, 1.5]]"
    with pytest.raises(TypeError):
        json_text({"a": object(), "b": math.nan})


def test_results_of_commands_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    OutputOptions(report=str(path), as_json=True).write({"loss": math.nan, "most": [math.inf]})
    for text in (path.read_text(), capsys.readouterr().out.splitlines()[-1]):
        assert json.loads(text, parse_constant=_refuse) == {"loss": None, "most": [None]}


def test_commands_print_json_in_this_way_alone() -> None:
    """No command prints by `json.dumps`, which writes NaN: that is not JSON."""
    root = Path(dlio.__file__).parent
    folders = [root, *(root.parent / name for name in ("readers", "staging", "bench"))]
    direct = re.compile(r"\bprint\(\s*json\.dumps\(")
    # These print messages to other processes of dlio.
    internal = {"live_line.py", "probe.py", "rehearsal.py", "shuffle_cases.py", "bench_ranks.py"}
    printing = {
        path.name
        for folder in folders
        for path in folder.rglob("*.py")
        if direct.search(path.read_text())
    }
    assert printing <= internal
