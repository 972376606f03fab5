"""The table of layouts is true: of dlio always, of others where they are installed."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from dlio_docs.layout_table import DATA, PEERS, image_folder, outcome, table
from dlio_docs.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
STORED = json.loads(DATA.read_text(encoding="utf-8"))
OTHERS = [peer for peer, (package, _) in PEERS.items() if package not in ("", "dlio")]


def test_each_layout_has_a_row_on_the_page() -> None:
    assert list(STORED["outcomes"]) == list(LAYOUTS)
    assert table().count("\n") == len(LAYOUTS) + 1
    page = (ROOT / "docs/guides/formats.md").read_text(encoding="utf-8")
    assert "<!-- generate: layouts -->" in page


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_dlio_reads_each_layout_as_the_table_says(layout: str) -> None:
    if layout == "Medical Decathlon":
        pytest.importorskip("nibabel")
    assert outcome("dlio", layout) == STORED["outcomes"][layout]["dlio"]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_rule_of_class_folders_is_applied_as_the_table_says(layout: str) -> None:
    peer = "ImageFolder (its rule)"
    assert outcome(peer, layout) == STORED["outcomes"][layout][peer]


@pytest.mark.nightly
def test_the_rule_of_class_folders_is_that_of_torchvision(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    for name, make in LAYOUTS.items():
        root = tmp_path / name
        root.mkdir()
        make(root)
        said = image_folder(root)
        try:
            made = datasets.ImageFolder(str(root))
        except FileNotFoundError:
            made = None
        if made is None:
            assert said.startswith("error")
        else:
            assert said.startswith(f"{len(made)} samples")
            assert all(f"`{each}`" in said for each in made.classes[:4])


@pytest.mark.nightly
@pytest.mark.parametrize("peer", OTHERS)
def test_other_libraries_read_each_layout_as_the_table_says(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PEERS[peer][0]
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"pip install {package}")
    if installed != STORED["versions"][peer]:
        pytest.skip(f"the table has {package} {STORED['versions'][peer]}, not {installed}")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for layout in LAYOUTS:
        assert outcome(peer, layout) == STORED["outcomes"][layout][peer], layout
