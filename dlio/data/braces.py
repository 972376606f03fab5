"""Braces in names of many files, as shells know them: `{000..199}`, `{a,b}`."""

import re
from typing import Final

from dlio.errors import UsageError

MAX_FILES: Final = 1_000_000


def expand_braces(text: str) -> list[str]:
    """Expand braces as shells do: ranges of numbers, and lists. Raises UsageError for too many."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if abs(last - first) >= MAX_FILES:
            raise UsageError(f"{text} stands for over {MAX_FILES:,} files")
        width = max(len(span[1]), len(span[2])) if span[1][0] == "0" or span[2][0] == "0" else 0
        step = 1 if last >= first else -1
        options = [str(number).zfill(width) for number in range(first, last + step, step)]
    elif "," in match[1]:
        options = match[1].split(",")
    else:
        return [text]
    texts = []
    for option in options:
        texts += expand_braces(text[: match.start()] + option + text[match.end() :])
        if len(texts) > MAX_FILES:
            raise UsageError(f"{text} stands for over {MAX_FILES:,} files")
    return texts
