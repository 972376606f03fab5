"""JSON, YAML and XML of untrusted files, whose values in memory are bounded before they are made.

Parsed into objects of Python, text takes up to 60 times its bytes: `[[],[],` is a list of 72 bytes
and a place of 8 for every three. So JSON is counted first, and YAML is read event by event, without
aliases and merge keys, by which a few bytes stand for many; XML as well, without a DTD, whose
entities do. Readers parse text here alone.
"""

import csv
import json
from collections.abc import Collection, Iterator
from typing import Any, Final, Literal

import numpy as np

from dlio.errors import SourceError
from dlio.util.limits import check_objects

_QUICK: Final = 1 << 20
"""Bytes that become little whatever they hold."""
_STEP: Final = 1 << 20
_COST: Final = {"[": 96, "{": 208, ",": 40, ":": 48, '"': 32}
"""Bytes of memory for each of these characters, at most; also where they are in texts."""
_WIDE: Final = ((0xF0, 4), (0xC4, 2), (0, 1))
"""Bytes of a character in memory, by the greatest byte of a text in UTF-8."""
SEPARATORS: Final = (",", ";", "\t", "|")
"""Characters between the values of a table."""
_COMPRESSED: Final = "it is compressed by {0}: give it a name that says so, ending in {1}"
_NO_TEXTS: Final = {
    b"\x1f\x8b": _COMPRESSED.format("gzip", ".gz"),
    b"BZh": _COMPRESSED.format("bzip2", ".bz2"),
    b"\xfd7zXZ": _COMPRESSED.format("xz", ".xz"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("Zstandard", ".zst"),
    b"PK\3\4": "it is a zip archive, or a spreadsheet (.xlsx): extract it, or save it as CSV",
    b"PAR1": "it is Parquet: give it a name that ends in .parquet",
}
"""First bytes of files that are called as texts and are none, and the words about each."""
_MOST_VALUES: Final = 1 << 18
_MOST_DEPTH: Final = 32
YamlValue = str | list["YamlValue"] | dict[str, "YamlValue"]
"""A value of YAML, with all scalars as they are written."""


def parse_json(data: str | bytes | bytearray | memoryview, where: str) -> Any:
    """Return the value of a text of JSON, in UTF-8, -16 or -32.

    Raises SourceError if it would take far more memory than its bytes, see `check_objects`;
    ValueError if it is not JSON, or is nested too deeply.
    """
    text = bytes(data) if isinstance(data, memoryview) else data
    if len(text) > _QUICK:
        plain = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        check_objects(_memory_of(plain), len(plain), where)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_cells(data: bytes | bytearray, separators: bytes, where: str) -> None:
    """Check that a text may be split at its separators: each piece is an object of 64 bytes or
    more.

    Raises SourceError if that is too much; see `check_objects`.
    """
    if len(data) > _QUICK:
        counts, greatest = _counts(data, separators.decode("ascii"))
        check_objects(_wide(greatest) * len(data) + 72 * sum(counts.values()), len(data), where)


def separator_of(line: str) -> str:
    """Return the character that divides the first line of a table into the most values, a comma at
    a tie."""
    return max(SEPARATORS, key=lambda each: len(next(csv.reader([line], delimiter=each), [])))


def utf8_text(data: bytes | bytearray) -> str:
    """Return text in UTF-8, without the mark that some programs begin it with.

    Raises ValueError, which names the remedy, for another encoding.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the error of a text in another encoding, or of a file that is not a text."""
    other = next((words for head, words in _NO_TEXTS.items() if error.object.startswith(head)), "")
    if other:
        return other
    wide = error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
    kind = "is UTF-16" if wide else f"is not UTF-8 (byte {error.object[error.start]:#04x})"
    return f"its text {kind}: save it as UTF-8"


def _memory_of(data: bytes | bytearray) -> int:
    counts, greatest = _counts(data, "".join(_COST))
    return _wide(greatest) * len(data) + sum(_COST[key] * count for key, count in counts.items())


def _wide(greatest: int) -> int:
    return next(width for least, width in _WIDE if greatest >= least)


def _counts(data: bytes | bytearray, wanted: str) -> tuple[dict[str, int], int]:
    """Return (number of each character, greatest byte)."""
    counts, greatest = dict.fromkeys(wanted, 0), 0
    plain = np.frombuffer(data, np.uint8)
    for begin in range(0, len(plain), _STEP):
        part = plain[begin : begin + _STEP]
        greatest = max(greatest, int(part.max()))
        for key in wanted:
            counts[key] += int(np.count_nonzero(part == ord(key)))
    return counts, greatest


class _YamlRefusal(ValueError):
    """YAML that is not read."""


def parse_yaml(data: bytes, where: str, most: int) -> YamlValue | None:
    """Return the value of a YAML file, with all scalars as texts: YAML would read `no` as a truth
    value, and 1.0 as a number. None for an empty file.

    Raises SourceError if it is not YAML, is over `most` bytes, or has aliases, anchors, merge keys
    or tags.
    """
    import yaml

    if len(data) > most:
        raise SourceError(f"{where} has over {most} bytes: it does not describe a data set")
    try:
        return _YamlTexts(yaml.parse(data, getattr(yaml, "CLoader", yaml.SafeLoader))).value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceError(f"{where} is not YAML that is read: {reason}: correct it") from error


class _YamlTexts:
    """Makes texts, lists and dicts of the events of a document."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events, self._left = events, _MOST_VALUES
        self.value: YamlValue | None = None
        kind, event = self._next()
        while kind != "StreamEnd":
            if kind == "DocumentStart" and self.value is not None:
                raise _YamlRefusal("it has several documents")
            if kind in ("Scalar", "SequenceStart", "MappingStart"):
                self.value = self._made(kind, event, 0)
            kind, event = self._next()

    def _next(self) -> tuple[str, Any]:
        event = next(self._events)
        self._left -= 1
        kind = type(event).__name__.removesuffix("Event")
        if self._left < 0:
            raise _YamlRefusal(f"it has over {_MOST_VALUES} values")
        if kind == "Alias" or getattr(event, "anchor", None) is not None:
            raise _YamlRefusal("it has anchors and aliases (& and *): write the values themselves")
        if (tag := getattr(event, "tag", None)) not in (None, "!", "tag:yaml.org,2002:str"):
            raise _YamlRefusal(f"it has the tag {tag}: write plain values")
        return kind, event

    def _made(self, kind: str, event: Any, depth: int) -> YamlValue:
        if depth > _MOST_DEPTH:
            raise _YamlRefusal("it is nested too deeply")
        if kind == "Scalar":
            return str(event.value)
        end: Literal["SequenceEnd", "MappingEnd"]
        end = "SequenceEnd" if kind == "SequenceStart" else "MappingEnd"
        listed: list[YamlValue] = []
        keyed: dict[str, YamlValue] = {}
        kind, event = self._next()
        while kind != end:
            if end == "SequenceEnd":
                listed.append(self._made(kind, event, depth + 1))
            else:
                if kind != "Scalar" or (event.value == "<<" and event.implicit[0]):
                    raise _YamlRefusal("a key is not a name: merge keys (<<) are not read")
                key = str(event.value)
                keyed[key] = self._made(*self._next(), depth + 1)
            kind, event = self._next()
        return listed if end == "SequenceEnd" else keyed


class _XmlRefusal(ValueError):
    """XML that is not read."""


_XML_STEP: Final = 1 << 18
"""Bytes that are parsed before a refusal is heard."""


def parse_xml(
    data: bytes, where: str, most: int, wanted: Collection[str]
) -> tuple[str, list[tuple[str, str]]]:
    """Return (name of the root, (path, text) of each wanted element in the order of their tags).

    Paths are below the root, such as `size/width`; the text is that before
    the first element within.

    Raises SourceError if it is not XML, is over `most` bytes, or has a DTD.
    """
    from xml.parsers import expat

    if len(data) > most:
        raise SourceError(f"{where} has over {most} bytes: it does not describe a picture")
    parser = expat.ParserCreate()
    parser.buffer_text = parser.ordered_attributes = True
    names: list[str] = []
    roots: list[str] = []
    elements: list[tuple[str, list[str]]] = []
    texts: list[str] | None = None

    def begin(name: str, _: list[str]) -> None:
        nonlocal texts
        (names if names or roots else roots).append(name)
        path, texts = "/".join(names), None
        if len(names) > _MOST_DEPTH:
            raise _XmlRefusal("it is nested too deeply")
        if path in wanted:
            texts = []
            elements.append((path, texts))
            if len(elements) > _MOST_VALUES:
                raise _XmlRefusal(f"it has over {_MOST_VALUES} values")

    def end(_: str) -> None:
        nonlocal texts
        texts = None
        if names:
            names.pop()

    def text(part: str) -> None:
        if texts is not None:
            texts.append(part)

    def refuse(*_: object) -> None:
        raise _XmlRefusal("it has a DTD (<!DOCTYPE), whose entities are not read: remove it")

    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, refuse
    try:
        for at in range(0, len(data), _XML_STEP):
            parser.Parse(data[at : at + _XML_STEP], False)
        parser.Parse(b"", True)
    except _XmlRefusal as error:
        raise SourceError(f"{where} is not XML that is read: {error}") from error
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise SourceError(
            f"{where} is not whole XML: {error}: it was cut off or damaged; copy it again"
        ) from error
    return roots[0], [(path, "".join(parts).strip()) for path, parts in elements]
