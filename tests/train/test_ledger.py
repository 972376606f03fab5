"""Reports and traces appear complete or not at all."""

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.ledger_file import check_ledger, read_lines
from dlio.train.sample_ledger import SampleLedger
from dlio.util.whole_files import check_writable, write_whole

FullDisk = Callable[[int], AbstractContextManager[None]]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    write_whole(str(path), lambda file: file.write(b"after"))
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def fail(_: object) -> None:
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        write_whole(str(path), fail)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, full_disk: FullDisk) -> None:
    path = str(tmp_path / "report.json")
    with (
        full_disk(1000),
        pytest.raises(UsageError, match=r"report\.json cannot be written: .*ulimit -f"),
    ):
        write_whole(path, lambda file: file.write(b"x" * 5000))
    assert not list(tmp_path.iterdir())


def test_a_trace_on_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    path = str(tmp_path / "trace.jsonl")
    with full_disk(1000), SampleLedger(path, SingleCommunicator()) as trace:
        trace.step(0, 0, list(range(1000)), 0, 1)
        with pytest.raises(UsageError, match=r"trace\.jsonl cannot be written"):
            trace.end_epoch()
    assert not list(tmp_path.iterdir())


def test_a_trace_appears_when_it_is_finished_with_empty_steps_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with SampleLedger(str(path), SingleCommunicator()) as trace:
        trace.step(0, 0, [3, 1], 0, 1)
        trace.step(0, 1, [], 0, 1)
        trace.end_epoch()
        assert not path.exists()
        trace.step(1, 0, [2], 1, 1)
        trace.end_epoch(left_out=3)
        trace.finish()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    hashes = [line.pop("hash") for line in lines]
    assert lines == [
        {"epoch": 0, "step": 0, "rank": 0, "samples": [3, 1], "update": 0, "ranks": 1},
        {"epoch": 0, "step": 1, "rank": 0, "samples": [], "update": 0, "ranks": 1},
        {"epoch": 1, "step": 0, "rank": 0, "samples": [2], "update": 1, "ranks": 1, "left_out": 3},
    ]
    before = ""
    for line, stated in zip(lines[:2], hashes, strict=False):
        # As the documentation has it, without the code of the package.
        text = before + json.dumps(line, separators=(",", ":"), sort_keys=True)
        before = hashlib.sha256(text.encode()).hexdigest()[:32]
        assert stated == before
    assert check_ledger(read_lines(str(path)), 4)[1].exact
    assert list(tmp_path.iterdir()) == [path]


def test_a_rank_that_joins_writes_whole_lines_of_ranks_that_were_lost_before(
    tmp_path: Path,
) -> None:
    """Nobody else is left to write them."""
    whole, joined = tmp_path / "whole", tmp_path / "joined"
    place_of_others: Any = None
    for path in (whole, joined):
        with SampleLedger(str(path), SingleCommunicator()) as trace:
            trace.end_epoch()
            if place_of_others:
                trace.follow_place(json.loads(json.dumps(place_of_others)))
            else:
                trace.step(1, 0, [4], 6, 2)
                trace.step(1, 1, [5], 7, 2, part=1)
                place_of_others = trace.tell_place()
            trace.step(1, 2, [6], 8, 1)
            trace.end_epoch(lambda: [(1, 0, 0, [1]), (1, 1, 0, [2])])
            trace.finish()
    lost = []
    for path in (whole, joined):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lost.append(
            [{k: v for k, v in row.items() if k != "hash"} for row in rows if "lost" in row]
        )
    assert lost[0] == lost[1]
    assert [(row["update"], row["ranks"], row.get("part")) for row in lost[1]] == [
        (6, 2, None),
        (7, 2, 1),
    ]


def test_a_run_that_ends_early_leaves_no_trace(tmp_path: Path) -> None:
    with SampleLedger(str(tmp_path / "t"), SingleCommunicator()) as trace:
        trace.step(0, 0, [1], 0, 1)
        trace.end_epoch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "match"), [("", "is a folder"), ("missing/report.json", "does not exist")]
)
def test_a_place_that_cannot_be_written_is_reported_before_the_run(
    tmp_path: Path, name: str, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        check_writable("--report", str(tmp_path / name))
