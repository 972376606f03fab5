"""Names say of what, and stand once; the counts of the review can be made."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT


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


def test_no_class_or_module_is_a_bare_participle(review: ModuleType) -> None:
    assert review.participles() == []


def test_a_name_of_a_class_or_module_stands_once(review: ModuleType) -> None:
    assert review.doubles() == []


@pytest.mark.parametrize("name", ["Begun", "_Torn", "Fed", "Running", "joined", "Measured", "kept"])
def test_a_participle_is_found(review: ModuleType, name: str) -> None:
    assert review.is_participle(name)


@pytest.mark.parametrize("name", ["Batch", "_Ring", "RunningPass", "staging", "HTTP", "speed"])
def test_a_noun_is_no_participle(review: ModuleType, name: str) -> None:
    assert not review.is_participle(name)


def test_all_counts_are_printed(review: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert review.main() == 0
    printed = capsys.readouterr().out
    for word in ("lines of the product", "a sample's path", "the configuration", "comments in"):
        assert word in printed
