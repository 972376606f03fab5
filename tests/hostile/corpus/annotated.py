"""Pictures with annotations: COCO, YOLO, masks, and lists of pictures."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, nonsense, special_files


def picture(suffix: str = ".jpg", side: int = 16) -> bytes:
    """A small picture."""
    pixels = np.arange(3 * side * side, dtype=np.uint8).reshape(side, side, 3)
    return bytes(cv2.imencode(suffix, pixels)[1])


def _pictures(folder: Path, count: int = 3) -> None:
    folder.mkdir(parents=True)
    for k in range(count):
        (folder / f"{k}.jpg").write_bytes(picture())


def _record(k: int) -> dict[str, Any]:
    return {
        "id": k + 10,
        "image_id": k,
        "category_id": 1 + k % 2,
        "bbox": [1, 1, 5.5, 6],
        "iscrowd": 0,
        "area": 33.0,
        "segmentation": [[1, 1, 6.5, 1, 6.5, 7, 1, 7]],
    }


def annotations() -> dict[str, Any]:
    """Two boxes on each of three pictures."""
    return {
        "info": {"year": 2020},
        "images": [{"id": k, "file_name": f"{k}.jpg", "height": 16, "width": 16} for k in range(3)],
        "annotations": [_record(k % 3) | {"id": k + 10} for k in range(6)],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }


def _coco(text: bytes, masks: bool = False) -> Make:
    def make(folder: Path) -> Ask:
        _pictures(folder / "data" / "train")
        (folder / "data" / "annotations").mkdir()
        (folder / "data" / "annotations" / "instances_train.json").write_bytes(text)
        options = {"format": "coco", "masks": True} if masks else {"format": "coco"}
        return Ask("reader", str(folder / "data"), options)

    return make


def _late(text: Callable[[], bytes]) -> Make:
    """A case whose text is made later."""
    return lambda folder: _coco(text())(folder)


def _lists(part: str) -> bytes:
    return b'{"%s": [%s[]]}' % (part.encode(), b"[]," * (1 << 24))


coco = _coco(json.dumps(annotations()).encode())
coco_masks = _coco(json.dumps(annotations()).encode(), masks=True)
COCO_FILE = "data/annotations/instances_train.json"


def _changed(change: Callable[[dict[str, Any]], object], masks: bool = False) -> Make:
    made = copy.deepcopy(annotations())
    change(made)
    return _coco(json.dumps(made).encode(), masks)


def _set(part: str, value: object) -> Make:
    """A file with another part; without it for None."""
    made = annotations()
    del made[part]
    return _coco(json.dumps(made | ({} if value is None else {part: value})).encode())


def _of_record(key: str, value: object, masks: bool = False) -> Make:
    return _changed(lambda made: made["annotations"][1].__setitem__(key, value), masks)


def yolo(folder: Path) -> Ask:
    """Three pictures with a box each."""
    _pictures(folder / "data" / "images")
    (folder / "data" / "labels").mkdir()
    for k in range(3):
        (folder / "data" / "labels" / f"{k}.txt").write_text(f"{k % 2} 0.5 0.5 0.25 0.25\n")
    (folder / "data" / "data.yaml").write_text("names: [cat, dog]\n")
    return Ask("reader", str(folder / "data"))


def _label(text: str | bytes, **options: object) -> Make:
    def make(folder: Path) -> Ask:
        ask = yolo(folder)
        data = text.encode() if isinstance(text, str) else text
        (folder / "data" / "labels" / "1.txt").write_bytes(data)
        return Ask(ask.kind, ask.path, options)

    return make


def _yaml(text: str | bytes) -> Make:
    def make(folder: Path) -> Ask:
        ask = yolo(folder)
        data = text.encode() if isinstance(text, str) else text
        (folder / "data" / "data.yaml").write_bytes(data)
        return ask

    return make


def masks(folder: Path) -> Ask:
    """Three pictures with a mask each."""
    _pictures(folder / "data" / "images")
    (folder / "data" / "masks").mkdir()
    for k in range(3):
        grey = np.full((16, 16), k, np.uint8)
        (folder / "data" / "masks" / f"{k}.png").write_bytes(bytes(cv2.imencode(".png", grey)[1]))
    (folder / "data" / "classes.txt").write_text("sky\nroad\n")
    return Ask("reader", str(folder / "data"))


def lists(folder: Path) -> Ask:
    """A folder of pictures, and a list of them next to it."""
    _pictures(folder / "data" / "images", 4)
    rows = "".join(f"{k}.jpg,{'ab'[k % 2]}\n" for k in range(4))
    (folder / "data" / "train.csv").write_text("image,label\n" + rows)
    return Ask("reader", str(folder / "data"))


def listed(folder: Path) -> Ask:
    """The same with a text without a header."""
    ask = lists(folder)
    (folder / "data" / "train.csv").unlink()
    (folder / "data" / "train.txt").write_text("".join(f"{k}.jpg {k % 2}\n" for k in range(4)))
    return ask


def _list(text: str | bytes, name: str = "train.csv") -> Make:
    def make(folder: Path) -> Ask:
        ask = lists(folder)
        (folder / "data" / "train.csv").unlink()
        data = text.encode() if isinstance(text, str) else text
        (folder / "data" / name).write_bytes(data)
        return ask

    return make


def _aliases(levels: int) -> str:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{k + 1}: &a{k + 1} [{', '.join([f'*a{k}'] * 9)}]" for k in range(levels)]
    return "\n".join(rows) + "\n"


def _coco_cases() -> Cases:
    yield Case("coco/sound", coco, RIGHT, "3 samples")
    yield Case("coco/sound-masks", coco_masks, RIGHT, "3 samples")
    yield from special_files("coco", coco, COCO_FILE, but=("sparse",))
    yield from special_files("coco", coco, "data/train/1.jpg", ANY, but=("sparse",))
    yield from damaged("coco", coco, COCO_FILE, 24)
    yield from damaged("coco-masks", coco_masks, COCO_FILE, 18)
    yield from nonsense("coco", coco, COCO_FILE, 40)
    yield from nonsense("coco-masks", coco_masks, COCO_FILE, 30)
    values: dict[str, Any] = {
        "bbox-text": ("bbox", "1,1,5,5"),
        "bbox-three": ("bbox", [1, 1, 5]),
        "bbox-nan": ("bbox", [1, 1, float("nan"), 5]),
        "bbox-huge": ("bbox", [1e300] * 4),
        "bbox-negative": ("bbox", [1, 1, -5, 5]),
        "image-unknown": ("image_id", 99),
        "image-digits": ("image_id", 10**400),
        "category-unknown": ("category_id", 99),
        "category-list": ("category_id", [1]),
    }
    for name, (key, value) in values.items():
        yield Case(f"coco/{name}", _of_record(key, value))
    shapes: dict[str, Any] = {
        "none": None,
        "text": "abc",
        "size-huge": {"size": [2**40, 2**40], "counts": [2**80]},
        "runs-short": {"size": [16, 16], "counts": [5]},
        "runs-huge": {"size": [16, 16], "counts": [2**62, 2**62]},
        "runs-text": {"size": [16, 16], "counts": "o" * 5000},
        "points-far": [[0, 0, 1e9, 1e9, 0, 5]],
        "points-nan": [[0, 0, float("inf"), 1, 0, 5]],
        "points-few": [[1, 2]],
        "nested": [[[[1, 2, 3, 4, 5, 6]]]],
        "relative": {"relative": [[0, 0, 1, 0, 1, 1]]},
    }
    for name, value in shapes.items():
        yield Case(f"coco-masks/shape-{name}", _of_record("segmentation", value, True), ANY)
    deep = "[" * 100_000
    for part in ("info", "images", "annotations", "categories"):
        yield Case(f"coco/deep-{part}", _coco(f'{{"{part}": {deep}'.encode()))
        yield Case(f"coco/bomb-lists-{part}", _late(partial(_lists, part)))
    dicts = '{"":{}},' * (6 << 20)
    yield Case("coco/bomb-dicts", _late(lambda: f'{{"annotations": [{dicts}0]}}'.encode()))
    nested: list[Any] = [0, 0, 9, 0, 9, 9]
    for _ in range(900):
        nested = [nested]
    yield Case("coco-masks/deep-shape", _of_record("segmentation", nested, True), ANY)
    for name in ("../../etc/passwd", "/etc/passwd", "a\0b", "", "\x1b[31m", "a" * 5000):
        named = _set("images", [{"id": 0, "file_name": name}])
        yield Case(f"coco/name-{len(name)}-{name.strip('./')[:3]!r}", named)
    same = _changed(lambda made: made["images"].append(made["images"][0]))
    yield Case("coco/picture-twice", same)
    for key in ("images", "annotations", "categories"):
        yield Case(f"coco/no-{key}", _set(key, None))
        yield Case(f"coco/empty-{key}", _set(key, []), ANY)
    wide = _changed(lambda made: made["categories"].append({"id": 2**40, "name": "x"}))
    yield Case("coco/category-huge", wide)
    crowded = _changed(lambda made: made.update(annotations=[_record(0)] * (1 << 17)))
    yield Case("coco/crowded", crowded)


def _yolo_cases() -> Cases:
    yield Case("yolo/sound", yolo, RIGHT, "3 samples")
    yield from special_files("yolo", yolo, "data/labels/1.txt", ANY, but=("sparse",))
    yield from special_files("yolo", yolo, "data/data.yaml", ANY)
    yield Case("yolo/labels-sparse", _sparse_file(yolo, "data/labels/1.txt"))
    yield from damaged("yolo", yolo, "data/labels/1.txt", 12)
    yield from damaged("yolo", yolo, "data/data.yaml", 18)
    lines = {
        "text": "cat 0.5 0.5 0.1 0.1",
        "nan": "0 nan 0.5 0.1 0.1",
        "infinite": "0 0.5 0.5 inf 0.1",
        "negative-class": "-1 0.5 0.5 0.1 0.1",
        "class-huge": "99999999999999999999 0.5 0.5 0.1 0.1",
        "class-fraction": "0.5 0.5 0.5 0.1 0.1",
        "outside": "0 5 5 1 1",
        "few": "0 0.5",
        "odd": "0 0.5 0.5 0.1 0.1 0.2",
        "digits": "0 " + "9" * 400 + " 0.5 0.1 0.1",
    }
    for name, line in lines.items():
        yield Case(f"yolo/line-{name}", _label(line + "\n"))
    yield Case("yolo/line-many", _label("0 0.5 0.5 0.1 0.1\n" * 70_000))
    yield Case("yolo/line-bytes", _label(b"\xff\xfe\x00" * 100))
    yield Case("yolo/line-empty", _label("\n" * 100_000), RIGHT, "3 samples")
    yield Case("yolo/line-long", _label("0 " + "0.5 " * 200_000 + "\n"), ANY)
    outlines = _label("0 " + "0.1 0.1 0.9 0.9 " * 30_000 + "\n", masks=True)
    yield Case("yolo/outline-long", outlines, ANY)
    texts: dict[str, str | bytes] = {
        "aliases": _aliases(8) + "names: *a8\n",
        "aliases-few": _aliases(1) + "names: [cat, dog]\n",
        "flip": "kpt_shape: [9, 2]\nnames: [a]\n" + _aliases(8) + "flip_idx: *a8\n",
        "anchor": "names: &n [cat, dog]\n",
        "merge": "a: {x: 1}\nnames: [cat, dog]\n<<: {y: 1}\n",
        "recursive": "names: &n [*n]\n",
        "deep": "names: " + "[" * 50_000,
        "deep-braces": "names: " + "{a: " * 50_000,
        "deep-indent": "".join(" " * k + "a:\n" for k in range(1000)),
        "python": "names: !!python/object/apply:os.system [id]\n",
        "binary": "names: !!binary aaaa\n",
        "set": "names: !!set {a, b}\n",
        "documents": "names: [a]\n---\nnames: [b]\n",
        "numbered": "names: {0: a, 999999999: b}\n",
        "numbered-text": "names: {a: b}\n",
        "negative": "names: {-1: b}\n",
        "digits": "names: {" + "9" * 5000 + ": b}\n",
        "key-list": "? [a, b]\n: c\nnames: [a, b]\n",
        "names-lists": "names: [[a], [b]]\n",
        "names-map": "names: {0: {1: 2}}\n",
        "kpt-huge": "names: [a]\nkpt_shape: [1000000000, 2]\n",
        "kpt-text": "names: [a]\nkpt_shape: many\n",
        "kpt-map": "names: [a]\nkpt_shape: {a: b}\n",
        "flip-short": "names: [a]\nkpt_shape: [3, 2]\nflip_idx: [0, 1]\n",
        "flip-map": "names: [a]\nkpt_shape: [3, 2]\nflip_idx: {0: 1}\n",
        "nul": b"names: [a\0b]\n",
        "not-utf8": b"names: [\xff\xfe]\n",
        "tab": "names:\n\t- a\n",
    }
    for name, text in texts.items():
        yield Case(f"yolo/yaml-{name}", _yaml(text))
    open_ends = {
        "empty": "",
        "long": "names: [" + "a, " * 200_000 + "]\n",
        "large": "names: [cat, dog]\n# " + "x" * (2 << 20),
        "many": "names: [cat, dog]\nx: [" + "[]," * 300_000 + "]\n",
        "comments": "#\n" * 100_000 + "names: [cat, dog]\n",
        "escapes": 'names: ["\\e[31m", "dog"]\n',
        "train-outside": "names: [cat, dog]\ntrain: ../../../etc\n",
        "train-root": "names: [cat, dog]\npath: /\ntrain: /etc\n",
        "train-list": "names: [cat, dog]\ntrain: [[images], {a: b}, images]\n",
        "null": "names: [cat, dog]\ntrain: null\nval: ~\ntest:\nkpt_shape:\n",
    }
    for name, text in open_ends.items():
        yield Case(f"yolo/yaml-{name}", _yaml(text), ANY)


def _sparse_file(sound: Make, victim: str) -> Make:
    """A data set with a file of a tebibyte that holds nothing."""

    def make(folder: Path) -> Ask:
        ask = sound(folder)
        with open(folder / victim, "wb") as file:
            file.truncate(1 << 40)
        return ask

    return make


def _mask_cases() -> Cases:
    yield Case("masks/sound", masks, RIGHT, "3 samples")
    yield from special_files("masks", masks, "data/masks/1.png", ANY, but=("sparse",))
    yield from special_files("masks", masks, "data/classes.txt", ANY, but=("sparse",))
    yield from damaged("masks", masks, "data/masks/1.png", 12)
    yield from damaged("masks", masks, "data/classes.txt", 6)

    def extra(folder: Path) -> Ask:
        ask = masks(folder)
        (folder / "data" / "masks" / "more.png").write_bytes(picture(".png"))
        return ask

    def missing(folder: Path) -> Ask:
        ask = masks(folder)
        (folder / "data" / "masks" / "1.png").unlink()
        return ask

    yield Case("masks/extra", extra)
    yield Case("masks/missing", missing)
    yield Case("masks/classes-sparse", _sparse_file(masks, "data/classes.txt"), ANY)


def _list_cases() -> Cases:
    yield Case("lists/sound", lists, RIGHT, "4 samples")
    yield Case("lists/sound-text", listed, RIGHT, "4 samples")
    yield from special_files("lists", lists, "data/train.csv", ANY)
    yield from special_files("lists", lists, "data/images/1.jpg", ANY, but=("sparse",))
    yield from damaged("lists", lists, "data/train.csv", 18)
    yield from damaged("lists", listed, "data/train.txt", 18)
    good = "image,label\n0.jpg,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n"
    texts: dict[str, str | bytes] = {
        "missing": good + "9.jpg,a\n",
        "outside": good + "../../etc/passwd,a\n",
        "absolute": good + "/etc/passwd,a\n",
        "no-label": good + "4.jpg\n",
        "several": good + "0.jpg,b\n",
        "quote": good + '"0.jpg,b\n',
        "nul": good + "\0,b\n",
        "not-utf8": good.encode() + b"\xff\xfe,a\n",
        "escapes": good + "\x1b]0;x\x07,a\n",
        "huge-field": good + "0.jpg," + "x" * 300_000 + "\n",
        "empty": "",
        "commas": good + "," * 300_000 + "\n",
        "newlines": good + "\n" * 300_000,
        "rows": good + "0.jpg,a\n" * 100_000,
        "cells": "image,label\n" + ",\n" * (4 << 20),
        "tabs": "0.jpg\t0\n" * 1000 + "\t" * 1_000_000,
        "long-name": good + "a/" * 4000 + "x.jpg,a\n",
    }
    for name, text in texts.items():
        yield Case(f"lists/{name}", _list(text), ANY)
        yield Case(f"lists/text-{name}", _list(text, "train.txt"), ANY)


def cases() -> Cases:
    """Return the cases of these formats."""
    yield from _coco_cases()
    yield from _yolo_cases()
    yield from _mask_cases()
    yield from _list_cases()
