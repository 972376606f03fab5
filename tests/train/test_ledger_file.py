"""`dlio ledger`: a trace is exact, or what is wrong with it is named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlio.cli import main
from dlio.errors import UsageError
from dlio.train.ledger_file import LedgerLine, check_ledger, line_hash, read_lines

SAMPLES = 24


def _epoch(number: int, ranks: Sequence[int] = (0, 1, 2), steps: int = 4) -> list[LedgerLine]:
    """Lines of an epoch of 24 samples in 4 steps on 3 ranks."""
    each = SAMPLES // (len(ranks) * steps)
    lines: list[LedgerLine] = []
    before, sample = "", 0
    for step in range(steps):
        for rank in ranks:
            line: LedgerLine = {"epoch": number, "step": step, "rank": rank, "samples": []}
            line["samples"] = list(range(sample, sample + each))
            line["update"], line["ranks"] = number * steps + step, len(ranks)
            before = line["hash"] = line_hash(before, line)
            lines.append(line)
            sample += each
    return lines


def test_an_exact_trace_has_no_problem() -> None:
    checked = check_ledger([*_epoch(0), *_epoch(1, ranks=(0, 2))], SAMPLES, 2)
    assert [each.exact for each in checked] == [True, True]
    assert [each.ranks for each in checked] == [(0, 1, 2), (0, 2)]
    assert [each.steps for each in checked] == [4, 4]


def _moved(lines: list[LedgerLine]) -> None:
    lines[3], lines[6] = lines[6], lines[3]


def _changed(lines: list[LedgerLine]) -> None:
    lines[4]["samples"] = lines[4]["samples"][::-1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_changed, ["the hash of step 1, rank 1 does not fit"]),
        (lambda lines: lines.pop(4), ["rank 1 has no line between step 0 and step 2", "the hash"]),
        (lambda lines: lines.insert(4, lines[4]), ["rank 1 has two lines for step 1", "the hash"]),
        (_moved, ["rank 0 has step 1 after step 2", "the hash of step 2, rank 0"]),
        (
            lambda lines: lines.__delitem__(slice(3, 6)),
            ["step 1 has no line", "rank 0 has no line between step 0 and step 2"],
        ),
        (lambda lines: lines[5].update(update=7), ["step 1 belongs to several", "the hash"]),
        (lambda lines: lines[0].update(epoch=1), ["there should be 1", "epoch 0 comes after"]),
        (lambda lines: lines[0].update(samples=[0, 24]), ["sample 24 is not one of 24"]),
    ],
)
def test_a_trace_that_was_changed_is_told(
    change: Callable[[list[LedgerLine]], object], expected: list[str]
) -> None:
    lines = _epoch(0)
    change(lines)
    checked = check_ledger(lines, SAMPLES, 1)
    assert not all(each.exact for each in checked)
    said = " ".join(problem for each in checked for problem in each.problems)
    for words in expected:
        assert words in said


def test_steps_that_no_rank_was_left_for_are_no_problem_where_another_rank_began_later() -> None:
    def line(step: int, rank: int, *samples: int) -> LedgerLine:
        return {"epoch": 0, "step": step, "rank": rank, "samples": list(samples)}

    (joined,) = check_ledger([line(0, 0, 0, 2), line(1, 0, 1), line(7, 4, 3)], 4, 1)
    assert joined.exact
    (spanned,) = check_ledger([line(0, 0, 0, 2), line(2, 0, 1), line(7, 4, 3)], 4, 1)
    assert spanned.problems == (
        "step 1 has no line",
        "rank 0 has no line between step 0 and step 2",
    )
    (late,) = check_ledger([line(1, 0, 0, 1, 2, 3)], 4, 1)
    assert late.problems == ("step 0 has no line",)


def test_a_rank_that_began_again_may_have_been_away() -> None:
    def line(step: int, rank: int, *samples: int, start: int = 0) -> LedgerLine:
        return {"epoch": 0, "step": step, "rank": rank, "samples": list(samples), "start": start}

    lines = [line(0, 0, 0), line(0, 1, 1), line(1, 0, 2)]
    (back,) = check_ledger([*lines, line(2, 0, 3, start=1), line(2, 1, 4, start=1)], 5, 1)
    assert back.exact
    (away,) = check_ledger([*lines, line(2, 0, 3), line(2, 1, 4)], 5, 1)
    assert away.problems == ("rank 1 has no line between step 0 and step 2",)


def test_lost_and_doubled_samples_are_named_with_steps_and_ranks() -> None:
    lines = _epoch(0)
    lines[1]["samples"], lines[7]["samples"] = [2, 2], [14, 2]
    (checked,) = check_ledger(lines, SAMPLES)
    assert (checked.lost, checked.doubled) == (2, 2)
    assert checked.lost_samples == (3, 15)
    assert checked.doubled_samples == {2: [(0, 1), (0, 1), (2, 1)]}


def test_samples_left_out_on_purpose_are_not_lost() -> None:
    lines = _epoch(0)[:-1]
    before = ""
    for line in lines:
        line["left_out"] = 2
        before = line["hash"] = line_hash(before, line)
    (checked,) = check_ledger(lines, SAMPLES)
    assert checked.exact
    assert (checked.left_out, checked.lost) == (2, 0)
    (checked,) = check_ledger(lines, SAMPLES + 1)
    assert checked.lost == 1


def test_traces_without_hashes_are_checked_for_their_samples() -> None:
    lines = _epoch(0)
    for line in lines:
        for key in ("update", "ranks", "hash"):
            line.pop(key)  # type: ignore[misc]
    (checked,) = check_ledger(lines, SAMPLES)
    assert checked.exact
    assert checked.hash == ""


@pytest.mark.parametrize("text", ["{", "[1]", '{"epoch": 0}', '{"epoch":0,"step":0,"rank":-1}'])
def test_another_file_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(_epoch(0)[0]) + f"\n{text}\n")
    with pytest.raises(UsageError, match=r"t\.jsonl, line 2: not a line of a trace"):
        list(read_lines(str(path)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read"):
        list(read_lines(str(tmp_path / "none.jsonl")))


def test_the_command_ends_with_1_if_the_trace_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"

    def run(lines: Sequence[LedgerLine], *more: str) -> tuple[object, str]:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(SystemExit) as ended:
            main(["ledger", str(path), "--samples", str(SAMPLES), *more])
        return ended.value.code, capsys.readouterr().out

    code, output = run(_epoch(0))
    assert code == 0
    assert "every sample exactly once in 1 epoch" in output
    code, output = run(_epoch(0), "--epochs", "2")
    assert code == 1
    assert "epoch 1 has no line" in output
    lines = _epoch(0)
    lines[0]["samples"] = [0, 2]
    code, output = run(lines)
    assert code == 1
    assert "1 lost, 1 doubled" in output
    assert "sample 1 lost" in output
    assert "sample 2 twice or more: step 0 on rank 0, step 0 on rank 1" in output
    code, output = run(lines, "--json")
    assert code == 1
    wrote = json.loads(output)
    assert (wrote["exact"], wrote["epochs"][0]["lost_samples"]) == (False, [1])
    places = [{"step": 0, "rank": 0}, {"step": 0, "rank": 1}]
    assert wrote["epochs"][0]["doubled_samples"] == [{"sample": 2, "lines": places}]


def test_the_command_counts_the_samples_of_a_source(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    lines = _epoch(0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(path), str(pictures)])
    assert ended.value.code == 1
    assert f"{101 - SAMPLES} lost" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(path)])
    assert ended.value.code == 2
