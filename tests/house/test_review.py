"""Names are nouns, and stand once; the counts of the review can be made."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT, has_feature


@pytest.fixture(scope="module")
def review() -> ModuleType:
    """The script that counts."""
    spec = importlib.util.spec_from_file_location("house_review", ROOT / "tests/house/review.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house_review"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["Begun", "_Torn", "Fed", "Running", "joined", "Measured", "kept"])
def test_a_participle_is_found(review: ModuleType, name: str) -> None:
    assert review.is_participle(name)


@pytest.mark.parametrize("name", ["Batch", "_Ring", "RunningPass", "staging", "HTTP", "speed"])
def test_a_noun_is_no_participle(review: ModuleType, name: str) -> None:
    assert not review.is_participle(name)


def test_names_are_nouns_that_stand_once(review: ModuleType) -> None:
    assert review.participles() == []
    assert review.doubles() == []


@pytest.mark.nightly
def test_all_counts_are_printed(review: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert review.main() == 0
    printed = capsys.readouterr().out
    for word in ("lines of the product", "a sample's path", "the configuration", "comments in"):
        assert word in printed


def test_the_types_to_know_first_exist(review: ModuleType) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("## Twenty types to know first")[1].split("##")[0]
    named = re.findall(r"^\| `(dlio\.[\w.]+)`", table, re.MULTILINE)
    assert len(named) == 20
    assert [name for name in named if name not in review.definitions()] == []


def test_files_that_a_first_change_starts_from_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("## Your first change")[1].split("##")[0]
    files = re.findall(r"`((?:dlio|readers|tests)/[\w/.]+)`", section)
    gone = [name for name in files if not (ROOT / name).exists()]
    # In a copy without features, the one of the example is missing.
    assert [name for name in gone if has_feature("ema") or name != "dlio/features/ema/"] == []


def test_tables_of_modules_name_modules_that_exist(review: ModuleType) -> None:
    wrong = []
    for module in review.modules().values():
        if module.path.name == "__init__.py":
            folder = module.path.parent
            tables = re.findall(r"^\| (?:module|file) *\|(?:.+\n)+", module.text, re.MULTILINE)
            for cell in re.findall(r"^\|([^|]+)\|", "".join(tables), re.MULTILINE):
                for name in re.findall(r"`([a-z_0-9]+)(?:\.py)?`", cell):
                    places = (folder / f"{name}.py", folder / name)
                    if not any(place.exists() for place in places):
                        wrong.append(f"{module.label}: {name}")
    assert wrong == [], wrong
