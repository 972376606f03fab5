"""The site: links and anchors work, and pages load nothing from other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="pip install 'dlio[docs]'")

ROOT = Path(__file__).resolve().parents[2]
_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\bsrc=\"(https?:[^\"]+)|<link[^>]*\bhref=\"(https?:[^\"]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    # As `python -m mkdocs` does, but in a form that the tests' warm interpreter serves.
    run = "import sys; from mkdocs.__main__ import cli; cli(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", run, "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_commands_variables_and_names_are_in_the_reference(site: Path) -> None:
    commands = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for anchor in ("dlio-train", "dlio-stage", "dlio-bench-loader"):
        assert f'id="{anchor}"' in commands
    assert "--checkpoint-every" in commands
    variables = (site / "reference" / "environment.html").read_text(encoding="utf-8")
    assert "DLIO_PEER_TIMEOUT" in variables
    report = (site / "reference" / "report.html").read_text(encoding="utf-8")
    assert "stall_fraction" in report
    names = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("dlio.DataLoader", "dlio.distribute", "dlio.errors.TierFull"):
        assert f'id="{name}"' in names
    assert "DLIOBLK1" in (site / "reference" / "block-format.html").read_text(encoding="utf-8")


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = {
        (str(page.relative_to(site)), *match.groups())
        for page in site.rglob("*.html")
        for match in _LOADED.finditer(page.read_text(encoding="utf-8"))
    }
    assert not loaded


def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert pages <= built
