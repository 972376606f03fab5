"""The page of five questions: its answers name commands and parameters that there are, and each
question leads to a later one or to an end."""

import inspect
import re
from pathlib import Path

import pytest
from PIL import Image

import dlio
from dlio.cli import main
from dlio.cli.app import places
from dlio.loader import diagnosis

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/which.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^\| (\d)\. ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)


def test_each_answer_leads_to_a_later_question_or_to_an_end() -> None:
    assert [int(each[0]) for each in QUESTIONS] == [1, 2, 3, 4, 5]
    for number, _, *answers in QUESTIONS:
        for answer in answers:
            later = [int(each) for each in re.findall(r"(?:go to|then) (\d)", answer)]
            assert all(int(number) < each <= 5 for each in later)
            assert later or "done" in answer or number == "5"


def test_each_way_in_is_an_answer_and_has_a_line_of_gains_and_costs() -> None:
    answers = " ".join(" ".join(each[2:]) for each in QUESTIONS)
    ways = re.findall(r"^\| (drop-in|`[^`]+`) \|", PAGE, re.MULTILINE)
    assert len(ways) == 6
    assert "dlio has six ways in" in PAGE
    assert all(way.strip("`") in answers for way in ways)
    for name in re.findall(r"`dlio (\w+)", PAGE):
        assert name in places()
    assert "tiers=" in answers
    assert {"tiers", "workers"} <= {*inspect.signature(dlio.DataLoader).parameters}
    assert "tiers" in inspect.signature(dlio.open).parameters


def test_ls_answers_the_questions_and_the_loader_says_that_it_keeps_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "0.png")
    with pytest.raises(SystemExit) as ended:
        main(["ls", str(tmp_path)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert re.search(r"1 sample, \d+ B$", shown.splitlines()[0])
    assert re.search(r"^  storage +\w+", shown, re.MULTILINE)
    said = re.search(r'answers of "([^"]+)"', PAGE)
    assert said is not None
    assert said[1] in inspect.getsource(diagnosis)
