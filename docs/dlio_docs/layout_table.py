"""The table of layouts: how dlio and other libraries read them when given the folder alone.

    python docs/dlio_docs/layout_table.py

makes each layout of `dlio_docs.layouts` in a temporary folder, opens it with each library that is
installed, and keeps the outcomes in layout_table.json next to this file, of which the page takes
its table. Libraries that are not installed keep their outcomes. torchvision's ImageFolder is
stated here by its documented rule, as its package needs a build of torch of its own.
"""

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlio_docs.layouts import LAYOUTS

__all__ = ["DATA", "PEERS", "outcome", "table"]

DATA: Final = Path(__file__).with_suffix(".json")
_PICTURES: Final = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)
_FILES: Final = {"MedMNIST": "pathmnist.npz"}
"""Files that are opened in place of the folder, which has several data sets."""
_NOTHING: Final = "-"
_LONGEST: Final = 110


def _dlio(root: Path) -> str:
    log = logging.getLogger("dlio")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        return _read(root)
    finally:
        log.setLevel(before)


def _read(root: Path) -> str:
    from dlio.data.reader import open_reader
    from dlio.errors import DlioError, UsageError

    try:
        return _said(open_reader(str(root)))
    except DlioError as error:
        text = str(error)
    asked = "asks for `split=`"
    for split in ("train", "trainval"):
        try:
            reader = open_reader(str(root), split=split)
        except UsageError:
            continue
        except DlioError:
            break
        return f"{asked}; `{split}`: {_said(reader)}"
    several = re.search(r"holds the data sets (.*): open one", text)
    if several is not None:
        return f"names the data sets in it: {several[1]}"
    return "names the file to open" if "open them one by one" in text else f"error: {text}"


def _said(reader: Any) -> str:
    count = f"{len(reader)} sample{'s' * (len(reader) != 1)}"
    if len(reader.classes):
        used = sum(1 for name in reader.classes if name)
        return f"{count}, {used} classes"
    labelled = "with labels" if reader.labels.any() else "without labels"
    names = [name for name, _ in reader.schema.fields]
    return f"{count}, {labelled}" if names == ["image"] else f"{count} of {', '.join(names)}"


def image_folder(root: Path) -> str:
    """Return the outcome of torchvision's ImageFolder by its rule: folders of the root are classes,
    and each needs a picture at or below it."""
    if root.is_file():
        return "error: no class folders"
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        return "error: no class folders"
    counts = {
        name: sum(
            file.lower().endswith(_PICTURES)
            for _, _, files in os.walk(root / name, followlinks=True)
            for file in files
        )
        for name in classes
    }
    if not all(counts.values()):
        return "error: folders without pictures"
    shown = ", ".join(f"`{name}`" for name in classes[:4]) + ", ..." * (len(classes) > 4)
    noun = "class" if len(classes) == 1 else "classes"
    return f"{sum(counts.values())} samples, {noun} {shown}"


def _datasets(root: Path) -> str:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as cache:
        try:
            made = datasets.load_dataset(str(root), cache_dir=cache)
            parts = [f"`{split}` {len(rows)}" for split, rows in made.items()]
            columns = next(iter(made.values())).column_names
        except Exception as error:  # The outcome is any error of another library.
            return _error(error)
    return f"{', '.join(parts)} rows of {', '.join(columns)}"


def _webdataset(root: Path) -> str:
    import webdataset

    tars = sorted(str(path) for path in root.glob("*.tar"))
    if not tars:
        return _NOTHING
    try:
        rows = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    except Exception as error:
        return _error(error)
    names = sorted({name for row in rows for name in row if not name.startswith("__")})
    return f"{len(rows)} samples of {', '.join(names)}" if rows else "no samples"


def _streaming(root: Path) -> str:
    import streaming

    if not (root / "index.json").exists():
        return _NOTHING
    try:
        data = streaming.StreamingDataset(local=str(root), batch_size=1)
        return f"{len(data)} samples of {', '.join(data[0])}"
    except Exception as error:
        return _error(error)


def _error(error: Exception) -> str:
    text = re.sub(r"\S*/tmp/\S*", "the folder", str(error).strip().split("\n")[0])
    text = text.replace("|", "/")
    return f"error: {type(error).__name__}: {text}"[:_LONGEST]


PEERS: Final[dict[str, tuple[str, Callable[[Path], str]]]] = {
    "dlio": ("dlio", _dlio),
    "ImageFolder (its rule)": ("", image_folder),
    "Hugging Face `load_dataset`": ("datasets", _datasets),
    "WebDataset of `*.tar`": ("webdataset", _webdataset),
    "Streaming": ("mosaicml-streaming", _streaming),
}
"""Package and outcome of each library, by its column."""


def outcome(peer: str, layout: str) -> str:
    """Return how a library reads a layout."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "data"
        root.mkdir()
        LAYOUTS[layout](root)
        return PEERS[peer][1](root / _FILES.get(layout, ""))


def table() -> str:
    """Return the table of the committed outcomes."""
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    names = [f"{peer} {stored['versions'].get(peer, '')}".strip() for peer in PEERS]
    rows = [f"| layout | {' | '.join(names)} |", "|---" * (len(PEERS) + 1) + "|"]
    for layout, outcomes in stored["outcomes"].items():
        cells = [outcomes[peer].replace("|", "\\|") for peer in PEERS]
        rows.append(f"| {layout} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _run() -> None:
    stored = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    versions, old = stored.get("versions", {}), stored.get("outcomes", {})
    made: dict[str, dict[str, str]] = {
        layout: {peer: old.get(layout, {}).get(peer, _NOTHING) for peer in PEERS}
        for layout in LAYOUTS
    }
    for peer, (package, _) in PEERS.items():
        if peer in sys.argv[1:] or len(sys.argv) == 1:
            try:
                installed = version(package) if package else ""
            except PackageNotFoundError:
                continue
            if package not in ("", "dlio"):
                versions[peer] = installed
            for layout in LAYOUTS:
                made[layout][peer] = outcome(peer, layout)
    text = json.dumps({"versions": versions, "outcomes": made}, indent=1, ensure_ascii=False)
    DATA.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    _run()
