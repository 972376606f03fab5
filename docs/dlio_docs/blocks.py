"""Fenced code blocks of Markdown files, with the markers above them.

A marker is an HTML comment in the lines directly above a block:

    <!-- needs: cluster -->   the block cannot run in a test; also gpu, network, root
    <!-- runs: nightly -->    it takes longer than a test of every commit may
    <!-- given: training -->  names that an earlier part of the reader's program defines,
                              see docs/blocks.toml
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["NEEDS", "RUNNABLE", "Block", "blocks_of", "commands_of", "pages"]

RUNNABLE: Final = ("python", "sh")
"""Languages of blocks that a test runs."""
SHOWN: Final = ("text", "json", "yaml", "toml", "bibtex")
"""Languages of blocks that show data or output."""
NEEDS: Final = ("cluster", "gpu", "network", "root")

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)\s*$")
_MARKER = re.compile(r"^\s*<!-- (?P<key>needs|runs|given): (?P<value>[\w-]+) -->\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    path: Path
    line: int
    """Line of the opening fence, from 1."""
    language: str
    text: str
    markers: dict[str, str]

    @property
    def place(self) -> str:
        """Path and line, for messages."""
        return f"{self.path}:{self.line}"


def pages(root: Path) -> list[Path]:
    """README.md and the pages below docs/, in order."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a Markdown file, in order.

    Raises ValueError for a fence that does not close.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks, number = [], 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opening["ticks"]:
            end += 1
        if end == len(lines):
            raise ValueError(f"{path}:{number + 1}: the code block does not end")
        indent = len(opening["indent"])
        text = "\n".join(line[indent:] for line in lines[number + 1 : end])
        markers = _markers_above(lines, number)
        blocks.append(Block(path, number + 1, opening["language"], text + "\n", markers))
        number = end + 1
    return blocks


def commands_of(text: str) -> list[str]:
    """Return the commands of a shell block, one for each line, continuation lines joined."""
    joined = text.replace("\\\n", " ")
    return [line for line in map(str.strip, joined.splitlines()) if line and line[0] != "#"]


def _markers_above(lines: list[str], number: int) -> dict[str, str]:
    markers = {}
    for line in reversed(lines[:number]):
        marker = _MARKER.match(line)
        if marker is None:
            break
        markers[marker["key"]] = marker["value"]
    return markers
