"""The origin of a change of a file: the script with its libraries, or dlio itself."""

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Final

_OURS: Final = frozenset({"dlio", "dlio_readers", "dlio_staging", "dlio_bench"})
_HERE: Final = "dlio.integrations.script."
_OWN: Final = _HERE + "step_records"
"""The module of this package that writes files of dlio's."""
_LIBRARIES: Final = tuple(
    path.rstrip("/") + "/"
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(key))
)
_KERNEL: Final = ("/dev/", "/proc/", "/sys/")
_CACHES: Final = (
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "NUMBA_CACHE_DIR",
    "MPLCONFIGDIR",
)


def is_dlios(name: str) -> bool:
    """True if a module, by its name, is dlio's and not of this package."""
    return name.partition(".")[0] in _OURS and (name == _OWN or not name.startswith(_HERE))


def is_called_by_dlio() -> bool:
    """True if dlio calls, directly or by libraries; False if the script or its libraries do."""
    for name, file in _callers():
        if is_dlios(name):
            return True
        if not _is_library(name, file):
            return False
    return False  # A thread of a library.


def is_called_by(module: str) -> bool:
    """True if a function of `module` is the caller."""
    return next((name for name, _ in _callers()), "") == module


def is_called_by_script(*through: str) -> bool:
    """True if the script itself calls, by no other modules than `through`."""
    caller = next(((name, file) for name, file in _callers() if name not in through), ("", "<"))
    return is_of_script(*caller)


def is_of_script(name: str, file: str) -> bool:
    """True if a module, by its name and file, is the script or one of its own modules."""
    ours = name.partition(".")[0] in _OURS
    return not ours and not _is_library(name, file)


def _callers() -> Iterator[tuple[str, str]]:
    """Yield name of module and file of each caller, from the innermost, without this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        is_here = name.startswith(_HERE) and name != _OWN
        if not is_here and name not in ("contextlib", "functools"):
            yield name, frame.f_code.co_filename
        frame = frame.f_back


@cache
def _is_library(name: str, file: str) -> bool:
    if name == "__main__":
        return False
    return file.startswith(("<", *_LIBRARIES)) or "-packages/" in file


def shared_places() -> tuple[str, ...]:
    """Return the beginnings of absolute paths that many processes of a user share."""
    home = os.path.realpath(os.path.expanduser("~"))
    caches = [os.path.realpath(os.environ[key]) + "/" for key in _CACHES if os.environ.get(key)]
    # All that is hidden in a home is shared: .cache, .config, .triton and others.
    hidden = [] if home == "/" else [home + "/."]
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")
    return (*_KERNEL, compiled, *hidden, *caches)
