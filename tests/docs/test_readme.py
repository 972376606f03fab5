"""README: it is short, its links work, and its figures come from a committed report."""

import re
from pathlib import Path

from dlio_docs import benchmarks
from dlio_docs.blocks import blocks_of, commands_of, pages
from dlio_docs.reference import options_by_command

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def test_it_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170


def test_links_of_files_outside_the_site_exist() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    missing = [
        f"{path.name}: {match[1]}"
        for path in files
        for match in _LINK.finditer(path.read_text(encoding="utf-8"))
        if not (path.parent / match[1]).exists()
    ]
    assert not missing


def test_its_table_comes_from_the_committed_report() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert benchmarks.readme_part() in text


def test_it_opens_with_the_gain_in_figures_of_that_report() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    begin = text.partition("\n## ")[0]
    assert benchmarks.readme_gain() in " ".join(begin.split())
    assert benchmarks.readme_part() in begin


def test_committed_reports_name_command_commit_machine_and_load() -> None:
    for path in sorted(benchmarks.DATA.glob("*.json")):
        stored = benchmarks.read(path.stem)
        assert {"command", "date", "data", "load_average", "machine", "report"} <= set(stored)
        machine = stored["machine"]
        assert isinstance(machine, dict)
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", str(machine["commit"]))
        assert "/tmp/" not in path.read_text(encoding="utf-8")


def test_commands_in_pages_have_the_options_that_they_name() -> None:
    known = options_by_command()
    wrong = []
    for path in pages(ROOT):
        commands = [
            (f"{path.name}:{block.line}", command)
            for block in blocks_of(path)
            if block.language == "sh"
            for command in commands_of(block.text)
        ]
        prose = re.findall(r"`(dlio [^`]+)`", path.read_text(encoding="utf-8").replace("\n", " "))
        for place, command in [*commands, *((path.name, each) for each in prose)]:
            start = re.search(r"\bdlio (?:(?:bench|cache) )?[a-z]+(?= |$)", command.split(" #")[0])
            if start is None:
                continue
            name = start[0] if start[0] in known else None
            if name is None:
                wrong.append(f"{place}: {command}: no such command")
                continue
            own = command.split(" #")[0][start.end() :]
            if name == "dlio run":  # Options after the script are the script's own.
                own = own.split(".py")[0]
            allowed = known[name]
            if name == "dlio launch":  # The command that it starts has options of its own.
                inner = (f"dlio {word}" for word in own.split(" -- ")[0].split())
                allowed = {*allowed, *next((known[each] for each in inner if each in known), ())}
                own = own.split(" -- ")[0]
            options = re.findall(r"(?<=\s)--?[a-z][\w-]*", own)
            wrong += [f"{place}: {name} has no {each}" for each in options if each not in allowed]
    assert not wrong, "\n".join(wrong)


def test_a_licence_and_a_citation_are_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "dlio developers" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
