"""Pictures that are read with a warning: damaged, and read as every other loader reads them."""

import threading
from typing import Final

from dlio.util.printable import log_warning

_MOST: Final = 1 << 16
"""Names that are kept."""


class ImageWarnings:
    """The warnings of this process's pictures. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}

    def note(self, name: object, reason: str) -> None:
        """Keep the warning of a picture; the first one of the process is logged."""
        shown = str(name)
        with self._lock:
            is_first = not self._reasons
            if len(self._reasons) < _MOST:
                self._reasons.setdefault(shown, reason)
        if is_first:
            log_warning(
                "%s is damaged: %s. It is read as other loaders read it, and so are other pictures "
                "with such warnings; `dlio verify` lists them all",
                shown,
                reason,
            )

    def of(self, name: object) -> str | None:
        """Return the warning of a picture; None if it was read without one."""
        with self._lock:
            return self._reasons.get(str(name))


WARNINGS: Final = ImageWarnings()
"""Those of this process."""
