"""Looks through folders for calls that belong to a few modules alone."""

from collections.abc import Callable, Sequence
from pathlib import Path


def print_complaints(
    root: Path,
    rooms: Sequence[str],
    owners: Sequence[str],
    complaints: Callable[[str, str], list[str]],
) -> int:
    """Print the complaints about all modules of `rooms` but their `owners`, by text and path;
    returns the exit code."""
    every = [
        each
        for room in rooms
        for file in sorted((root / room).rglob("*.py"))
        if (path := str(file.relative_to(root))) not in owners
        for each in complaints(file.read_text(encoding="utf-8"), path)
    ]
    print("\n".join(every))
    return bool(every)
