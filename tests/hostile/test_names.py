"""Names that data sets choose reach no terminal and no file as they are, whichever command runs."""

import csv
import io
import json
import logging
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from dlio.cli import main
from dlio.errors import printable, redact
from dlio.util.printable import escaping_libraries
from dlio_bench.results.html.document import page
from dlio_bench.results.report_values import Figure, PlotCurve
from dlio_bench.results.saved_report import SavedReport
from tests.hostile.linked_sets import picture

NAMES: Final = {
    "escape": "a\x1b[2J\x1b]0;t\x07b",
    "line": "c\nd\re",
    "bidi": "e\u202egpj\u2066",
    "csi": "f\x9b31mg",
    "separator": "h\u2028i\u2029j",
    "no width": "k\u200b\u200el",
    "tag": "m\U000e0061n",
    "html": "<script>alert(1)<script>&\"'`",
    "format": "%s%n{0}$(id)",
    "bytes": os.fsdecode(b"p\xff\xfe"),
}


def _folder(name: str, root: Path) -> None:
    for number in range(4):
        path = root / f"{name}{number % 2}" / f"{name}{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number) if number else b"no picture")


def _table(name: str, root: Path) -> None:
    root.mkdir()
    with open(root / "t.csv", "w", newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.writer(file)
        rows.writerow([name, "b", f"{name}2"])
        rows.writerows([k * 0.5, k, f"{name}{k % 2}"] for k in range(8))


def _coco(name: str, root: Path) -> None:
    (root / "images").mkdir(parents=True)
    images, boxes = [], []
    for k in range(2):
        (root / "images" / f"{name}{k}.jpg").write_bytes(picture(k))
        images.append({"id": k, "file_name": f"{name}{k}.jpg", "width": 6 + k, "height": 6 + k})
        boxes.append({"id": k, "image_id": k, "category_id": k, "bbox": [1, 1, 2, 2]})
    classes = [{"id": k, "name": f"{name}{k}"} for k in range(2)]
    whole = {"images": images, "annotations": boxes, "categories": classes}
    (root / "annotations.json").write_text(json.dumps(whole))


def _tar(name: str, root: Path) -> None:
    root.mkdir()
    with tarfile.open(root / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for k in range(4):
            stem = f"{name.replace('.', '_')}{k}"
            for suffix, data in ((".jpg", picture(k)), (".cls", b"%d" % (k % 2))):
                info = tarfile.TarInfo(stem + suffix)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def _arrays(name: str, root: Path) -> None:
    root.mkdir()
    for k in range(2):
        with open(root / f"{name}{k}.npz", "wb") as file:
            field = name.encode("utf-8", "replace").decode()
            fields: dict[str, Any] = {field: np.ones((3, 4), np.float32)}
            np.savez(file, **fields)


KINDS: Final[dict[str, Callable[[str, Path], None]]] = {
    "folder": _folder,
    "table": _table,
    "coco": _coco,
    "tar": _tar,
    "arrays": _arrays,
}
COMMANDS: Final = (
    ("ls", "DATA"),
    ("ls", "DATA", "--plot", "--html", "ls.html"),
    ("view", "DATA", "--output", "view.html", "--no-browser", "--count", "2", "--crop", "16"),
    ("verify", "DATA"),
    ("pack", "DATA", "packed"),
    ("stage", "DATA", "--tiers", "tier:64MiB", "--report", "stage.json"),
    ("status", "--tiers", "tier"),
    ("verify", "tier"),
    ("plan", "DATA", "-n", "2"),
    ("ls", "DATA::NAME"),
    ("ls", "DATA", "--split", "NAME"),
    ("train", "DATA", "--target", "NAME", "--model", "NAME"),
    ("pack", "DATA", "NAME/NAME"),
    ("launch", "--slurm", "nodes=1", "--print", "train", "NAME", "--tiers", "/x:1GiB"),
    ("cache",),
)


def _is_shown(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind,
            name,
            marks=()
            if (kind, name) in {("folder", "bytes"), ("table", "bidi")}
            else pytest.mark.nightly,
        )
        for kind in KINDS
        for name in NAMES
    ],
)
# SECURITY.md: S6
def test_no_command_shows_or_writes_a_name_as_it_is(
    kind: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLIO_CACHE", "cache")
    monkeypatch.setenv("DLIO_NO_FORK", "1")
    (tmp_path / "tier").mkdir()
    KINDS[kind](NAMES[name].replace("/", "_"), tmp_path / "data")
    for words in COMMANDS:
        argv = [w.replace("DATA", "data").replace("NAME", NAMES[name]) for w in words]
        with pytest.raises(SystemExit) as ended:
            main(argv)
        said = capfd.readouterr()
        assert "Traceback" not in said.err, words
        assert _is_shown(said.out), (words, said.out)
        assert _is_shown(said.err), (words, said.err)
        assert ended.value.code != 1, words
    for path in (*tmp_path.glob("*.html"), *tmp_path.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert _is_shown(text), path
        assert "<script>alert" not in text


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_pages_of_reports_show_no_name_as_it_is(name: str) -> None:
    figures = [Figure(name, name, (1.0, 2.0), {name: name})]
    curves = [PlotCurve(name, kind, name, name, (0.0, 1.0), (0.0, 1.0)) for kind in ("cdf", "time")]
    report = SavedReport(
        name, curves=curves, figures=figures, path=name, command=name, notes=[name]
    )
    text = page([report], name).encode("utf-8", "surrogateescape").decode("utf-8")
    assert _is_shown(text)
    assert "<script>alert" not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:SECRET@bucket/x", "s3://***@bucket/x"),
        ("https://SECRET@host/x", "https://***@host/x"),
        ("https://:SECRET@host/x", "https://***@host/x"),
        ("https://a:b@SECRET@host/x", "https://***@host/x"),
        ("ftp://a%40b:SECRET%2f@host/x", "ftp://***@host/x"),
        ("HTTPS://host/x?sig=SECRET", "HTTPS://host/x?***"),
        ("zip://a::https://u:SECRET@h/b.zip?k=SECRET", "zip://a::https://***@h/b.zip?***"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("a@b", "a@b"),
    ],
)
def test_secrets_of_urls_are_shown_nowhere(url: str, shown: str) -> None:
    assert redact(url) == printable(url) == shown


def test_what_libraries_say_is_escaped_too(capfd: pytest.CaptureFixture[str]) -> None:
    text = f"{NAMES['escape']}{NAMES['line']} of https://u:SECRET@h/x"
    # pytest has handlers of its own for both.
    log = logging.Logger("library")
    with warnings.catch_warnings(), escaping_libraries():
        log.warning("%s", text)
        line = warnings.formatwarning(text, UserWarning, "library.py", 1, "")
    assert _is_shown(line)
    said = capfd.readouterr().err
    assert _is_shown(said)
    for each in (line, said):
        assert "SECRET" not in each
        assert "\\x1b[2J" in each
