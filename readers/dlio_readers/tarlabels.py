"""Labels of tars: texts of members, numbered over all tars of a data set."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from dlio.data.index import Arrays
from dlio.data.labels import encode_labels, label_name
from dlio.util.structured_text import parse_json

TarHead: TypeAlias = Any
"""Fields in a tar's index, as a dictionary."""


class TextMembers:
    """A field whose members are texts: numbers, or names of classes, or any."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.plain = False
        """True if one of them is too long for a label."""
        self.codes: list[int] = []

    def add(self, text: str | None) -> None:
        self.plain = self.plain or text is None
        self.codes.append(self.texts.setdefault(text or "", len(self.texts)))


def number_classes(
    parts: list[Arrays], heads: Sequence[TarHead], names: Sequence[str], label: str | None
) -> list[str]:
    """Return the classes of a label that is text in some of the tars, and number them there."""
    if label is None or not any(label in head["texts"] for head in heads):
        return []  # As all are numbers, written the same way.
    k = names.index(label)
    own = [
        head["texts"].get(label) or [str(n) for n in np.unique(part["number"][:, k]).tolist()]
        for part, head in zip(parts, heads, strict=True)
    ]
    encoding = encode_labels(text for texts in own for text in texts)
    for part, head, texts in zip(parts, heads, own, strict=True):
        new = np.array([encoding.numbers[text] for text in texts], np.int64)
        old = part["number"][:, k]
        codes = old if label in head["texts"] else np.searchsorted(np.unique(old), old)
        part["number"] = part["number"].copy()
        part["number"][:, k] = new[codes]
    return encoding.classes


def label_in_json(data: bytes) -> str:
    """Say which value of a sample's JSON may be a label; empty without one."""
    try:
        values = parse_json(data, "a sample's JSON")
    except ValueError:
        return ""
    name = label_name(values) if isinstance(values, dict) else None
    return f"its {name} is in json, which is read as a field: store it as .cls" if name else ""
