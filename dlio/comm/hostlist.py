"""Lists of hosts as Slurm writes them: `n[1-3,7],login2` for n1, n2, n3, n7 and login2."""

import itertools
import re
from collections.abc import Iterator
from typing import Final

from dlio.errors import UsageError

_PART: Final = re.compile(r"([^\[\],]*)\[([0-9,-]+)\]|([^\[\],]+)|(,)")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MOST: Final = 100_000
"""Largest number of hosts: more are a damaged list."""


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list, in its order. Raises UsageError for a malformed list."""
    hosts: list[str] = []
    for pieces in _split(text):
        names = list(itertools.islice(map("".join, itertools.product(*pieces)), _MOST + 1))
        hosts += names
        if len(hosts) > _MOST:
            raise _malformed(text)
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `2(x3),1`, for 2, 2, 2 and 1.

    Raises UsageError for a malformed list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MOST:
            raise _malformed(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _split(text: str) -> Iterator[list[list[str]]]:
    """Yield each item of a list: for each of its pieces, the texts that it stands for."""
    at = 0
    item: list[list[str]] = []
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise _malformed(text)
        at = match.end()
        if match[4]:
            if not item:
                raise _malformed(text)
            yield item
            item = []
        elif match[3]:
            item.append([match[3]])
        else:
            item += [[match[1]], list(_numbers(match[2], text))]
    if not item:
        raise _malformed(text)
    yield item


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers of ranges such as `01-03,7`, with their leading zeros."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST:
            raise _malformed(text)
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"{text[:200]!r} is not a list of Slurm's, such as n[1-3,7]: is the environment damaged?"
    )
