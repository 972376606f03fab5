"""The trace of an epoch that is under way, in a node's memory.

Ranks write the trace at the end of an epoch. If all are lost before, those that are started again
find the lines here. One rank of each node writes those of all ranks, which follow from a formula;
where ranks step without waiting for each other, each rank does.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from dlio.loader.assignment.assigner import BatchAssigner
from dlio.train.ledger_file import LedgerLine, placed
from dlio.train.memory_snapshot.snapshot_state import COMMON, turn_of
from dlio.util.input_files import open_text
from dlio.util.whole_files import open_own, remove_file, write_whole

_NAME: Final = "journal-"


class Journal:
    """The journal of a node, in the folder of its snapshots. One rank at a time writes it.

    `numbers` are those of this start's ranks when the job began, `start` the times that all have
    begun again, `writer` that of the part of the state it belongs to; see `snapshot_state.COMMON`.
    """

    def __init__(
        self, folder: str, numbers: Sequence[int], start: int = 0, writer: str = COMMON
    ) -> None:
        self._folder, self._numbers, self._start = folder, numbers, start
        self._writer = writer
        self._epoch = -1
        self._written = 0
        self._back: set[tuple[int, int]] = set()
        """(step, member) of this epoch's batches that are not in the model after all."""

    def begin(
        self, epoch: int, turn: int, lines: Sequence[LedgerLine], without: Sequence[LedgerLine] = ()
    ) -> None:
        """Replace an epoch's journal when all ranks start again at a turn, from a state of these
        lines.

        The weights lack those in `without`. They leave the journal with this start: the next one
        may have to begin from the same state, as this one did.
        """
        taken = [(line["step"], line["rank"]) for line in without]
        entries = [
            {"turn": turn, "start": 0, "lines": lines},
            {"turn": turn, "start": self._start, "lines": [], "without": taken},
        ]
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        path = _path(self._folder, self._writer, epoch)
        write_whole(path, lambda file: file.write(text.encode()))

    def write(self, turn: int, epoch: int, assigner: BatchAssigner, part: int) -> None:
        """Write the lines of the batches that are in the model since the last call.

        The exchange was finished `part` times in this epoch.
        """
        if epoch != self._epoch:
            # The last one is kept: another node may not have ended its epoch.
            self._epoch, self._written, self._back = epoch, 0, set()
            beginning = f"{_NAME}{self._writer}-"
            for name in os.listdir(self._folder):
                number = name.removeprefix(beginning)
                if number != name and number.isdecimal() and int(number) < epoch - 1:
                    remove_file(os.path.join(self._folder, name))
        lines: list[LedgerLine] = []
        for step, update, ranks, member, samples in assigner.trail(self._written):
            rank = self._numbers[member]
            line: LedgerLine = {"epoch": epoch, "step": step, "rank": rank, "samples": samples}
            lines.append(placed(line, update, ranks, part, self._start))
        self._written = assigner.closed
        back = set(assigner.taken_back()) - self._back
        self._back |= back
        without = sorted((step, self._numbers[member]) for step, member in back)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = open_own(_path(self._folder, self._writer, epoch), flags)
        with os.fdopen(descriptor, "a", encoding="ascii") as file:
            entry = {"turn": turn, "start": self._start, "lines": lines, "without": without}
            file.write(json.dumps(entry) + "\n")


def lines_until(
    folder: str, epoch: int, turn: int, writer: str = COMMON, start: int = sys.maxsize
) -> list[LedgerLine]:
    """Return an epoch's lines that a state has, by its turn and the writer of its place in the run.

    All ranks had begun again `start` times before it was made.
    """
    lines: dict[tuple[int, int], LedgerLine] = {}
    try:
        with open_text(_path(folder, writer, epoch), encoding="ascii") as file:
            for text in file:
                if not text.endswith("\n"):
                    break  # The writer was killed.
                entry = json.loads(text)
                if entry["turn"] <= turn and entry["start"] <= start:
                    # Another rank may have written the same again.
                    lines.update({(line["step"], line["rank"]): line for line in entry["lines"]})
                    for step, rank in entry.get("without", ()):
                        lines.pop((step, rank), None)
    except FileNotFoundError:
        return []
    return [lines[key] for key in sorted(lines)]


def divided(
    lines: Sequence[LedgerLine], reached: Mapping[int, int]
) -> tuple[list[LedgerLine], list[LedgerLine]]:
    """Return the lines whose steps are in a state's weights, and the others. Pure.

    For `reached` see `dlio.train.memory_snapshot.snapshot_state.SnapshotState`.
    """
    kept: list[LedgerLine] = []
    others: list[LedgerLine] = []
    for line in lines:
        if turn_of(line["update"] + 1, False) <= reached.get(line["rank"], math.inf):
            kept.append(line)
        else:
            others.append(line)
    return kept, others


def _path(folder: str, writer: str, epoch: int) -> str:
    return os.path.join(folder, f"{_NAME}{writer}-{epoch}")
