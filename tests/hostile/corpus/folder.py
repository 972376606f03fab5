"""Class folders, and flat folders with a label table."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.hostile.corpus.case import ANY, ERROR, RIGHT, Ask, Case, Cases, Expected, Make
from tests.hostile.corpus.mutate import damaged, special_files

_PICTURE = b"\xff\xd8\xff\xe0" + bytes(200)


def sound(folder: Path) -> Ask:
    """Two classes of three pictures, the second of which has a folder within."""
    for name in ("a/0.jpg", "a/1.jpg", "a/2.jpg", "b/0.jpg", "b/in/1.jpg", "b/in/2.jpg"):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_PICTURE)
    return Ask("reader", str(folder / "data"))


def table(folder: Path, text: str, name: str = "labels.csv") -> Ask:
    """A flat folder of three pictures with a label table."""
    inside = folder / "data"
    inside.mkdir()
    for k in range(3):
        (inside / f"{k}.jpg").write_bytes(_PICTURE)
    (inside / name).write_text(text, encoding="utf-8")
    return Ask("reader", str(inside))


def _after(change: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        change(folder / "data")
        return ask

    return make


def _bomb(data: Path) -> None:
    """Folders in which each has two links to the next: 2^30 paths."""
    for k in range(30):
        (data / f"b/l{k}").mkdir()
    for k in range(29):
        for name in "xy":
            (data / f"b/l{k}" / name).symlink_to(f"../l{k + 1}")
    (data / "b/l29/0.jpg").write_bytes(_PICTURE)


def _mutual(data: Path) -> None:
    (data / "a/to").symlink_to("../b")
    (data / "b/to").symlink_to("../a")


def _outside_folder(data: Path) -> None:
    other = data.parent / "other"
    other.mkdir()
    (other / "0.jpg").write_bytes(_PICTURE)
    (data / "c").symlink_to(other)


def _deep(data: Path) -> None:
    here = os.getcwd()
    os.chdir(data / "b")
    try:
        for _ in range(1500):
            os.mkdir("d" * 3)
            os.chdir("d" * 3)
        Path("0.jpg").write_bytes(_PICTURE)
    finally:
        os.chdir(here)


def _rows(*rows: str) -> Make:
    return lambda folder: table(folder, "\n".join(rows) + "\n")


def _json(value: object) -> Make:
    return lambda folder: table(folder, json.dumps(value), "labels.json")


def _quoted(folder: Path) -> Ask:
    name = "x\x1b]0;title\x07\n\r\u202e.jpg"
    ask = table(folder, "")
    (folder / "data" / name).write_bytes(_PICTURE)
    with open(folder / "data" / "labels.csv", "w", newline="", encoding="utf-8") as file:
        rows = [["file_name", "label"], *([f"{k}.jpg", "a"] for k in range(3)), [name, "b"]]
        csv.writer(file).writerows(rows)
    return ask


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("folder/sound", sound, RIGHT, "6 samples")
    for case in special_files("folder", sound, "data/a/1.jpg"):
        # Dangling links and folders among pictures are left out, as torchvision does.
        left_out = case.name.rpartition("-")[2] in ("dangling", "loop", "folder")
        yield Case(case.name, case.make, ANY if left_out or "empty" in case.name else ERROR)
    yield from special_files("folder", sound, "data/a", ANY, but=("sparse",))
    links = {
        "to-itself": lambda data: (data / "b/in/up").symlink_to("."),
        "to-parent": lambda data: (data / "b/in/up").symlink_to(".."),
        "to-root": lambda data: (data / "b/up").symlink_to("../.."),
        "absolute-loop": lambda data: (data / "b/up").symlink_to(data),
        "to-above-root": lambda data: (data / "b/up").symlink_to("../../.."),
        "mutual": _mutual,
        "doubling": _bomb,
        "class-outside": _outside_folder,
        "to-system": lambda data: (data / "b/usr").symlink_to("/usr"),
        "to-proc": lambda data: (data / "b/proc").symlink_to("/proc"),
    }
    for name, change in links.items():
        yield Case(f"folder/link-{name}", _after(change))
    yield Case("folder/link-outside-said", _after(_outside_folder), ERROR, "--follow-links")

    def followed(folder: Path) -> Ask:
        ask = _after(_outside_folder)(folder)
        return Ask(ask.kind, ask.path, {"follow_links": True})

    yield Case("folder/link-outside-followed", followed, RIGHT, "7 samples")
    inside = _after(lambda data: (data / "a/3.jpg").symlink_to("0.jpg"))
    yield Case("folder/link-inside", inside, RIGHT, "7 samples")
    inside = _after(lambda data: (data / "c").symlink_to("b/in"))
    yield Case("folder/link-inside-folder", inside, RIGHT, "8 samples")
    yield Case("folder/deep", _after(_deep), ANY)
    names = {
        "escapes": b"\x1b[2J\x1b]0;x\x07.jpg",
        "newline": b"a\nb\rc.jpg",
        "not-utf8": b"\xff\xfe.jpg",
        "right-to-left": "\u202egpj.exe".encode() + b".jpg",
        "long": b"n" * 250 + b".jpg",
    }
    for name, text in names.items():
        path = os.fsdecode(text)

        def add(data: Path, path: str = path) -> None:
            (data / "a" / path).write_bytes(_PICTURE)

        def lost(data: Path, path: str = path) -> None:
            os.mkfifo(data / "a" / path)

        yield Case(f"folder/name-{name}", _after(add), RIGHT, "7 samples")
        yield Case(f"folder/name-{name}-fifo", _after(lost))
        empty = _after(lambda data, path=path: (data / path).mkdir())  # type: ignore[misc]
        yield Case(f"folder/class-{name}", empty)
    whole = ("file_name,label", "0.jpg,cat", "1.jpg,dog", "2.jpg,cat")
    yield Case("table/sound", _rows(*whole), RIGHT, "3 samples")
    bad = {
        "label-missing": (*whole[:3], "2.jpg"),
        "label-empty": (*whole[:3], "2.jpg,"),
        "label-blank": (*whole[:3], "2.jpg,  "),
        "file-missing": (*whole[:3], ",cat"),
        "twice": (*whole, "2.jpg,dog"),
        "too-many": (*whole[:3], "2.jpg,cat,dog"),
        "header-only": whole[:1],
        "same-columns": ("file_name,label,label", *(f"{k}.jpg,1,2" for k in range(3))),
        "nul": (*whole[:3], "2.jpg\0,cat"),
        "huge-field": (*whole[:3], "2.jpg," + "x" * 200_000),
        "quote-open": (*whole[:3], '2.jpg,"cat'),
        "other-files": (*whole, "../../etc/passwd,cat"),
        "no-columns": ("a,b", "0.jpg,1"),
        "empty": (),
    }
    for name, rows in bad.items():
        yield Case(f"table/{name}", _rows(*rows))
    big = (whole[0], *(f"{k}.jpg,{'9' * 30}" for k in range(3)))
    yield Case("table/number-huge", _rows(*big), RIGHT, "3 samples")
    yield Case(
        "table/number-digits", _rows(whole[0], *(f"{k}.jpg,{'9' * 9000}" for k in range(3))), ANY
    )
    good = {f"{k}.jpg": "cat" for k in range(3)}
    yield Case("table/json-sound", _json(good), RIGHT, "3 samples")
    odd: dict[str, object] = {
        "null-label": {**good, "2.jpg": None},
        "list-label": {**good, "2.jpg": [1]},
        "true-label": {**good, "2.jpg": True},
        "float-label": {**good, "2.jpg": 0.5},
        "number": 5,
        "text": "abc",
        "null": None,
        "list-of-numbers": [1, 2],
        "list-of-lists": [["0.jpg", 1]],
        "rows-differ": [{"file_name": "0.jpg", "label": 1}, {"x": 1}],
        "null-file": [{"file_name": None, "label": 1}] * 3,
        "list-file": [{"file_name": [1], "label": 1}] * 3,
    }
    for name, value in odd.items():
        # Truth values and numbers next to texts are classes of these names, which is told.
        expected: Expected = ANY if name in ("true-label", "float-label") else ERROR
        yield Case(f"table/json-{name}", _json(value), expected)
    deep = "[" * 100_000
    yield Case("table/json-deep", lambda folder: table(folder, deep, "labels.json"))
    lines = '{"file_name": "0.jpg", "label": 1}\nnull\n'
    yield Case("table/jsonl-null", lambda folder: table(folder, lines, "labels.jsonl"))
    labelled = _rows(*whole)
    yield from special_files(
        "table", labelled, "data/labels.csv", but=("dangling", "loop", "folder")
    )
    yield from damaged("table", labelled, "data/labels.csv", 6)
