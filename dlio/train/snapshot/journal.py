"""The trace of an epoch that is under way, in a node's memory.

Ranks write the trace at the end of an epoch. If all are lost before, those that are started again
find the lines here. One rank of each node writes those of all ranks, which follow from a formula.
"""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from dlio.train.ledger_file import Line, placed
from dlio.util.files import write_whole

__all__ = ["Journal", "lines_until"]

_NAME: Final = "journal-"


class _Trail(Protocol):
    """The batches of an epoch that are in the model; see `dlio.loader.dealing.Dealing`."""

    @property
    def closed(self) -> int: ...

    def trail(self, since: int) -> Iterable[tuple[int, int, int, int, list[int]]]: ...


class Journal:
    """The journal of a node. One rank at a time writes it.

    Args:
        folder: of the node's snapshots.
        numbers: of the ranks of this start when the job began.
        start: times that all ranks have begun again.
    """

    def __init__(self, folder: str, numbers: Sequence[int], start: int = 0) -> None:
        self._folder, self._numbers, self._start = folder, numbers, start
        self._epoch = -1
        self._written = 0

    def begin(self, epoch: int, turn: int, lines: Sequence[Line]) -> None:
        """Replace an epoch's journal when all ranks start again at a turn."""
        text = json.dumps({"turn": turn, "lines": lines}) + "\n"
        write_whole(_path(self._folder, epoch), lambda file: file.write(text.encode()))

    def write(self, turn: int, epoch: int, dealing: _Trail, updates: int, part: int) -> None:
        """Write the lines of the batches that are in the model since the last call.

        Args:
            updates: optimizer steps since the run began.
            part: times that the exchange was finished in this epoch.
        """
        if epoch != self._epoch:
            # The last one is kept: another node may not have ended its epoch.
            self._epoch, self._written = epoch, 0
            for name in os.listdir(self._folder):
                number = name.removeprefix(_NAME)
                if number != name and number.isdigit() and int(number) < epoch - 1:
                    os.unlink(os.path.join(self._folder, name))
        lines: list[Line] = []
        for step, since, ranks, member, samples in dealing.trail(self._written):
            rank = self._numbers[member]
            line: Line = {"epoch": epoch, "step": step, "rank": rank, "samples": samples}
            lines.append(placed(line, updates - 1 - since, ranks, part, self._start))
        self._written = dealing.closed
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(_path(self._folder, epoch), flags, 0o600)
        with os.fdopen(descriptor, "a", encoding="ascii") as file:
            file.write(json.dumps({"turn": turn, "lines": lines}) + "\n")


def lines_until(folder: str, epoch: int, turn: int) -> list[Line]:
    """Return an epoch's lines up to a turn."""
    lines: dict[tuple[int, int], Line] = {}
    try:
        with open(_path(folder, epoch), encoding="ascii") as file:
            for text in file:
                if not text.endswith("\n"):
                    break  # The writer was killed.
                entry = json.loads(text)
                if entry["turn"] <= turn:
                    # Another rank may have written the same again.
                    lines.update({(line["step"], line["rank"]): line for line in entry["lines"]})
    except FileNotFoundError:
        return []
    return [lines[key] for key in sorted(lines)]


def _path(folder: str, epoch: int) -> str:
    return os.path.join(folder, f"{_NAME}{epoch}")
