"""Where the rows of arrays lie in local files, for those that need no library to be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.data.open_files import open_file
from dlio.data.reader_contract import PART, FileLocations, locate_in_memory
from dlio.data.schema import Schema
from dlio.data.source import File

_I64 = npt.NDArray[np.int64]
_MOST_PARTS: Final = 16
"""Fields of a sample, each of which is a read of its own."""


@dataclass(frozen=True, slots=True)
class RowsInFile:
    """Rows of an array that lie in a file as payloads have them, without gaps."""

    file: File
    offset: int
    row_bytes: int
    count: int


StoredField = Sequence[RowsInFile] | npt.NDArray[Any]
"""The values of a field: in files one after another, or in memory, in C order and little-endian."""


class StoredRows:
    """The places of samples that are rows of arrays: one for each field. Thread-safe."""

    def __init__(self, fields: Sequence[StoredField]) -> None:
        self._fields = fields
        self._firsts = [
            np.cumsum([0, *(part.count for part in field[:-1])])
            if not isinstance(field, np.ndarray)
            else np.zeros(1, np.int64)
            for field in fields
        ]

    @classmethod
    def of(cls, schema: Schema, fields: Mapping[str, StoredField | None]) -> "StoredRows | None":
        """Return the rows of fields; None if some have to be read otherwise."""
        if not schema.is_fixed or len(fields) > _MOST_PARTS:
            return None
        ordered: list[StoredField] = []
        for name, kind, _ in schema.places():
            field = fields[name]
            if field is None or not kind.bytes or not _is_stored(field, kind.bytes):
                return None
            ordered.append(field)
        if all(isinstance(field, np.ndarray) for field in ordered):
            return None
        return cls(ordered)

    def locate(self, samples: _I64, _: object, __: object) -> FileLocations:
        """Return where samples lie; see `Abilities.locate`."""
        count = len(samples)
        parts = np.zeros((count, len(self._fields)), PART)
        known = np.ones(count, np.bool_)
        holders: list[object] = []
        for number, field in enumerate(self._fields):
            part = parts[:, number]
            if isinstance(field, np.ndarray):
                locate_in_memory(part, field, samples)
                holders.append(field)
                continue
            firsts = self._firsts[number]
            of_file = np.searchsorted(firsts, samples, side="right") - 1
            for at in np.unique(of_file).tolist():
                here, rows = of_file == at, field[at]
                holder = open_file(rows.file)
                if holder is None:
                    known &= ~here
                    continue
                holders.append(holder)
                part["descriptor"][here], part["bytes"][here] = holder.number, rows.row_bytes
                part["offset"][here] = rows.offset + (samples[here] - firsts[at]) * rows.row_bytes
        return FileLocations.of_parts(known, parts, holders)


def _is_stored(field: StoredField, row_bytes: int) -> bool:
    if isinstance(field, np.ndarray):
        return field.ndim == 1 and field.itemsize == row_bytes and field.flags.c_contiguous
    return all(part.row_bytes == row_bytes for part in field)
