"""Cases of the corpus: files that somebody made to hurt their reader."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

__all__ = ["ANY", "ERROR", "RIGHT", "Ask", "Case", "Expected", "Make"]

Expected = Literal["right", "error", "any"]
RIGHT: Final = "right"
ERROR: Final = "error"
ANY: Final = "any"
"""Both are correct, for damage that a format without checksums cannot detect."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the child process."""

    kind: str
    """Name of a function of `tests/hostile/child.py`."""
    path: str | list[str]
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the reader, or whatever else the function takes."""


Make = Callable[[Path], Ask]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack."""

    name: str
    """`format/attack`, unique."""
    make: Make
    """Writes the files of the case into an empty folder."""
    expected: Expected = ERROR
    says: str = ""
    """Text that the result contains: of the error, or the notes of a right result."""


Cases = Iterator[Case]
