"""Pictures with XML files of Pascal VOC."""

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from tests.hostile.corpus.annotated import picture
from tests.hostile.corpus.case import ANY, RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import damaged, special_files

NOTE = "data/Annotations/1.xml"
LIST = "data/ImageSets/Main/train.txt"
_EDGES = "<xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax>"
_OBJECT = (
    "<object><name>dog</name><truncated>0</truncated><difficult>1</difficult>"
    f"<bndbox>{_EDGES}</bndbox></object>"
)
_SIZE = "<size><width>16</width><height>16</height></size>"
_SOUND = f"<annotation><folder>x</folder>{_SIZE}{_OBJECT * 2}</annotation>\n"


def sound(folder: Path) -> Ask:
    """Three pictures with two boxes each, and a list of them."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / "data" / name).mkdir(parents=True)
    for k in range(3):
        (folder / "data" / "JPEGImages" / f"{k}.jpg").write_bytes(picture())
        (folder / "data" / "Annotations" / f"{k}.xml").write_text(_SOUND)
    (folder / LIST).write_text("0\n1\n2\n")
    return Ask("reader", str(folder / "data"), {"format": "voc"})


def masks(folder: Path) -> Ask:
    """The same with masks of two of them."""
    sound(folder)
    for name in ("SegmentationClass", "ImageSets/Segmentation"):
        (folder / "data" / name).mkdir()
    for k in range(2):
        grey = bytes(cv2.imencode(".png", np.full((16, 16), k, np.uint8))[1])
        (folder / "data" / "SegmentationClass" / f"{k}.png").write_bytes(grey)
    (folder / "data" / "ImageSets" / "Segmentation" / "train.txt").write_text("0\n1\n")
    return Ask("reader", str(folder / "data"), {"format": "masks"})


Text = str | bytes | Callable[[], str]
"""A text; a long one is made when it is written."""


def _with(text: Text, file: str = NOTE) -> Make:
    def written(folder: Path) -> Ask:
        ask = sound(folder)
        data = text() if callable(text) else text
        (folder / file).write_bytes(data.encode() if isinstance(data, str) else data)
        return ask

    return written


def _entities(levels: int) -> str:
    rows = ['<!ENTITY a0 "dog">']
    rows += [f'<!ENTITY a{k + 1} "{f"&a{k};" * 10}">' for k in range(levels)]
    return f"<!DOCTYPE annotation [{''.join(rows)}]>" + _SOUND.replace("dog", f"&a{levels};")


def _attributes(count: int) -> str:
    return " ".join(f"a{k}=''" for k in range(count))


def _object(old: str, new: str) -> str:
    assert old in _SOUND
    return _SOUND.replace(old, new, 1)


def cases() -> Cases:
    """Return the cases of this format."""
    yield Case("voc/sound", sound, RIGHT, "3 samples")
    yield Case("voc/sound-masks", masks, RIGHT, "2 samples")
    for victim in (NOTE, LIST, "data/JPEGImages/1.jpg", "data/Annotations"):
        yield from special_files("voc", sound, victim, ANY, but=("sparse",))
    yield from special_files("voc-masks", masks, "data/SegmentationClass/1.png", ANY)
    yield from damaged("voc", sound, NOTE, 36)
    yield from damaged("voc", sound, LIST, 12)
    refused: dict[str, Text] = {
        "entities": _entities(9),
        "entity-outside": f'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>{_SOUND}',
        "dtd-outside": f'<!DOCTYPE a SYSTEM "http://localhost:1/x.dtd">{_SOUND}',
        "entity-unknown": _object("dog", "&nothing;"),
        "deep": lambda: "<annotation>" + "<a>" * 2_600_000,
        "deep-objects": lambda: "<annotation>" + "<object>" * 900_000,
        "many-objects": lambda: "<annotation>" + "<object/>" * 900_000,
        "many-boxes": lambda: _object("</annotation>", _OBJECT * 40_000 + "</annotation>"),
        "large": lambda: _SOUND + " " * (9 << 20),
        "encoding": f'<?xml version="1.0" encoding="{"x" * 1000}"?>{_SOUND}',
        "encoding-gbk": f'<?xml version="1.0" encoding="gbk"?>{_SOUND}',
        "not-utf8": _SOUND.encode().replace(b"dog", b"\xff\xfe"),
        "nul": _object("dog", "\0"),
        "two-roots": _SOUND + _SOUND,
        "another-root": "<html></html>",
        "digits": _object("<xmax>9", "<xmax>" + "9" * 500),
        "exponent": _object("<xmax>9", "<xmax>1e999"),
        "underscores": _object("<xmax>9", "<xmax>1_0"),
        "negative": _object("<xmax>9", "<xmax>-9"),
        "outside": _object("<xmax>9", "<xmax>99999"),
        "flag": _object("<difficult>1", "<difficult>2"),
        "no-box": _object(_EDGES, ""),
        "no-name": _object("dog", " "),
        "side": _object("<width>16", "<width>a"),
    }
    for name, text in refused.items():
        yield Case(f"voc/{name}", _with(text))
    taken: dict[str, Text] = {
        "attributes": lambda: _object("<folder>", f"<folder {_attributes(600_000)}>"),
        "one-attribute": lambda: _object("<folder>", f'<folder a="{"x" * (7 << 20)}">'),
        "comment": lambda: _SOUND + f"<!--{'x' * (7 << 20)}-->",
        "comments": lambda: _SOUND + "<!---->" * 1_000_000,
        "instructions": lambda: _SOUND + "<?a?>" * 1_000_000,
        "text-long": lambda: _object("dog", "dog" * 2_000_000),
        "text-parts": lambda: _object("dog", "d<!---->" * 800_000),
        "sections": lambda: _object("dog", "<![CDATA[d]]>" * 500_000),
        "references": lambda: _object("dog", "&#100;" * 1_000_000),
        "siblings": lambda: _object("<folder>", "<a/>" * 1_500_000 + "<folder>"),
        "escapes": _object("dog", "\u202e&#27;[31m"),
        "side-huge": _object("<width>16", "<width>" + "9" * 300),
        "utf-16": _SOUND.encode("utf-16"),
    }
    for name, text in taken.items():
        yield Case(f"voc/{name}", _with(text), ANY)
    lists: dict[str, Text] = {
        "outside": "../../../etc/passwd\n",
        "absolute": "/etc/passwd\n",
        "nul": "\0\n",
        "unknown": "9\n",
        "empty": "",
        "spaces": lambda: " " * 3_000_000,
    }
    for name, text in lists.items():
        yield Case(f"voc/list-{name}", _with(text, LIST))
    yield Case("voc/list-repeated", _with(lambda: "0\n" * 4_000_000, LIST))
    yield Case("voc/list-long", _with(lambda: "0 " * 3_000_000, LIST), ANY)
