"""The journal of a search, in Optuna's format, by a descriptor that is kept while the search runs.

Optuna's own backend opens the file anew by its name for each record, and follows a link that has
taken that name meanwhile.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from dlio.errors import UsageError
from dlio.util.closable import Closable
from dlio.util.input_files import MOST_STATE, json_value
from dlio.util.whole_files import PUBLIC_FILE, open_own

_MOST_BYTES: Final = 1 << 30
_PIECE: Final = 1 << 20


class StudyJournal(Closable):
    """A journal, open until `close`, as `optuna.storages.JournalStorage` takes it.

    There is one writer, which holds the study's lock. Optuna makes the lines; the end
    of a line whose writer was killed is removed.

    Raises OSError; UntrustedFile if the file is not a regular one of this user's.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PUBLIC_FILE)
        self._starts = [0]
        """Place of each line that was read, and of the next one."""
        self._drop_torn_line()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, object]]:
        """Yield the records from a number on. Raises UsageError if a line is none."""
        first = min(log_number_from, len(self._starts) - 1)
        place, text = self._starts[first], b""
        number = first
        while piece := os.pread(self._file, _PIECE, place + len(text)):
            text += piece
            *lines, rest = text.split(b"\n")
            for line in lines:
                place += len(line) + 1
                number += 1
                if number == len(self._starts):
                    self._starts.append(place)
                if number > log_number_from:
                    yield self._record(line, number)
            text = rest
            if len(text) > MOST_STATE:
                raise self._malformed(number + 1)

    def append_logs(self, logs: Sequence[Mapping[str, object]]) -> None:
        """Add records, which are on the disk afterwards. Raises OSError."""
        text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in logs).encode()
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def _record(self, line: bytes, number: int) -> dict[str, object]:
        try:
            record = json_value(line)
        except (ValueError, RecursionError) as error:
            record = error
        if not isinstance(record, dict):
            raise self._malformed(number)
        return record

    def _malformed(self, number: int) -> UsageError:
        return UsageError(
            f"{self._path}, line {number}: not a record of a search; name another --study"
        )

    def _drop_torn_line(self) -> None:
        size = end = os.fstat(self._file).st_size
        if size > _MOST_BYTES:
            raise UsageError(f"{self._path}: larger than 1 GiB; name another --study")
        while end:
            start = max(0, end - _PIECE)
            last = os.pread(self._file, end - start, start).rfind(b"\n")
            if last >= 0:
                end = start + last + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
