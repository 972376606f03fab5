"""`dlio view` and the histograms of `dlio ls`."""

import json
import os
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.cli import ls, view
from dlio.errors import SourceError, UsageError
from dlio_staging.pack_folder import pack
from tests.conftest import SOURCES
from tests.loader.targets_data import drawn, painted, write, write_coco, write_yolo

View = Callable[..., str]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    write_coco(tmp_path / "coco", drawn(1, 5))
    return tmp_path / "coco"


def test_the_command_writes_a_page_and_says_where(coco: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlio.cli", "view", str(coco), "--count", "3"),
            *("--no-browser", "--crop", "32", "--output", "page.html"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"page.html: 3 samples of {coco}, ")
    page = (tmp_path / "page.html").read_text()
    assert page.count('<section class="card">') == 3
    assert "32 &times; 32" in page


def test_a_page_without_a_name_goes_to_a_new_private_file(
    coco: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def browser(address: str) -> bool:
        opened.append(address)
        return False

    monkeypatch.setattr(webbrowser, "open", browser)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    view.command(view.ViewOptions(str(coco), count=1))
    (page,) = tmp_path.glob("dlio-view-*.html")
    assert page.stat().st_mode & 0o077 == 0
    assert "no browser was found" in capsys.readouterr().out
    assert opened == []
    page.unlink()
    monkeypatch.setenv("DISPLAY", ":0")
    view.command(view.ViewOptions(str(coco), count=1))
    (page,) = tmp_path.glob("dlio-view-*.html")
    assert opened == [f"file://{page}"]


def test_a_transform_of_the_users_module_is_shown(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_view_transforms.py").write_text(
        "from dlio import transforms as T\n"
        "wide = T.Compose([T.RandomResizedCrop((20, 50)), T.ToFloat()])\n"
    )
    monkeypatch.chdir(tmp_path)
    options = view.ViewOptions(
        str(coco), no_browser=True, output="a.html", transform="my_view_transforms:wide"
    )
    view.command(options)
    assert "50 &times; 20" in (tmp_path / "a.html").read_text()
    for name in ("wide", "no_such_module:wide", "my_view_transforms:narrow"):
        with pytest.raises(UsageError, match=f"--transform {name}"):
            view.command(view.ViewOptions(str(coco), no_browser=True, transform=name))


@pytest.mark.parametrize(
    ("path", "output", "error"),
    [
        ("gone", "a.html", "no such file or folder"),
        ("empty", "a.html", "holds nothing to read"),
        ("bad", "a.html", "cannot be decoded"),
        ("coco", "missing/a.html", "--output missing/a.html"),
        ("coco", "coco", "this is a folder"),
    ],
)
def test_bad_input_and_output_are_clear_errors(
    coco: Path, monkeypatch: pytest.MonkeyPatch, path: str, output: str, error: str
) -> None:
    monkeypatch.chdir(coco.parent)
    Path("empty").mkdir()
    write(Path("bad/a/1.png"), painted(9, 9, []))
    Path("bad/a/1.png").write_bytes(b"\x89PNG broken")
    with pytest.raises((SourceError, UsageError), match=error):
        view.command(view.ViewOptions(path, no_browser=True, output=output))
    assert not Path("a.html").exists()


def test_damaged_samples_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(3):
        write(tmp_path / "a" / f"{k}.png", painted(9, 9, []))
    (tmp_path / "a" / "1.png").write_bytes(b"\x89PNG broken")
    view.command(view.ViewOptions(str(tmp_path), no_browser=True, output=str(tmp_path / "p.html")))
    assert "a/1.png" in capsys.readouterr().err


def test_ls_draws_histograms(
    coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ls.command(ls.ListOptions(str(coco), plot=True, html=str(tmp_path / "ls.html")))
    out = capsys.readouterr().out
    for title in ("bytes of a sample", "width in pixels, 5 pictures", "boxes of a class"):
        assert title in out
    assert "per class    5 boxes" in out
    assert "█" in out
    page = (tmp_path / "ls.html").read_text()
    assert page.count('<section class="card">') == 4
    ls.command(ls.ListOptions(str(coco), plot=True, as_json=True))
    assert json.loads(capsys.readouterr().out)["classes"] == {"cat": 5}
    with pytest.raises(UsageError, match="--html"):
        ls.command(ls.ListOptions(str(coco), html=str(tmp_path / "no" / "ls.html")))


@pytest.mark.parametrize("form", ["native", "tar", "hdf5", "zarr"])
@pytest.mark.parametrize("kind", ["coco", "yolo"])
def test_packed_boxes_are_counted_as_those_of_the_source(
    kind: str, form: str, tmp_path: Path
) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    rows = drawn(3, 7, boxes=3)
    (write_coco if kind == "coco" else write_yolo)(source, rows)
    pack(str(source), str(packed), format=form, shard_bytes=4096, workers=1)
    counts = ls.describe(str(source))["classes"]
    assert sum(counts.values()) == sum(len(boxes) for _, _, boxes in rows)
    about = ls.describe(str(packed))
    assert about["classes"] == counts
    assert about["class_mix"] is None
