"""Any feature's folder and its tests can be deleted, and everything else works."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deletion", ROOT / "tests/house/deletion.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["deletion"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


deletion = _load()
FEATURES: list[str] = deletion.FEATURES


def _drawn() -> str:
    """Return a feature that depends on the commit alone."""
    words = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return FEATURES[int(head.stdout[:8], 16) % len(FEATURES)]


@pytest.mark.cold
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without features")
def test_a_drawn_feature_can_be_deleted(tmp_path: Path) -> None:
    copy = deletion.delete([_drawn()], tmp_path)
    # By night, all tests are collected.
    assert list(deletion.complaints(copy, deletion.referring(copy))) == []


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.cold
@pytest.mark.parametrize("feature", FEATURES)
def test_the_other_features_pass_without_a_feature(feature: str, tmp_path: Path) -> None:
    copy = deletion.delete([feature], tmp_path)
    assert list(deletion.complaints(copy)) == []
    assert deletion.failing_tests(copy, *deletion.tests_of_others(feature)) == ""


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.cold
def test_all_else_passes_without_features(tmp_path: Path) -> None:
    copy = deletion.delete(FEATURES, tmp_path)
    assert list(deletion.complaints(copy)) == []
    assert deletion.failing_tests(copy) == ""
