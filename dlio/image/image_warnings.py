"""Pictures that are read with a warning, as every other loader reads them."""

import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.reader_contract import Reader, SampleName
from dlio.util.printable import log_warning

_MOST: Final = 1 << 16
"""Names that are kept."""
_Key = tuple[str, object]


class ImageWarnings:
    """The warnings of this process's pictures. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[_Key, str] = {}
        self._told: set[str] = set()

    def note(self, name: object, reason: str, kind: str = "damage") -> None:
        """Keep the warning of a picture; the first one of each kind in the process is logged."""
        key = _key(name)
        with self._lock:
            is_first = kind not in self._told
            self._told.add(kind)
            if len(self._reasons) < _MOST:
                self._reasons.setdefault(key, reason)
        if is_first:
            log_warning(
                "%s is read with a warning: %s. Other loaders read it the same way; `dlio verify` "
                "lists all pictures with warnings",
                name,
                reason,
            )

    def of(self, name: object) -> str | None:
        """Return the warning of a picture; None if it was read without one."""
        if not self._reasons:
            return None
        with self._lock:
            return self._reasons.get(_key(name))

    def among(self, reader: Reader, samples: npt.NDArray[np.int64]) -> list[int]:
        """Return those of a data set's samples whose picture was read with a warning."""
        if not self._reasons:
            return []
        numbers = map(int, samples)
        return [k for k in numbers if self.of(SampleName(reader, k)) is not None]


def _key(name: object) -> _Key:
    # Data sets may have pictures of one name, such as those of two splits.
    if isinstance(name, SampleName):
        return name.reader.fingerprint, name.sample
    return "", str(name)


WARNINGS: Final = ImageWarnings()
"""Those of this process."""
