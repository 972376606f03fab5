"""Plots of commands, for which matplotlib must be installed."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

from dlio.errors import UsageError

__all__ = ["picture"]


@contextlib.contextmanager
def picture(path: str) -> Iterator[ModuleType]:
    """Draw a figure with pyplot inside the `with` block, and write it when the block ends.

        with picture("a.svg") as pyplot:
            pyplot.plot(...)

    The file appears under its name once it is complete; its suffix chooses PNG or SVG.

    Raises UsageError if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'dlio[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        yield pyplot
        pyplot.gcf().savefig(temporary, format=path[-3:])
        os.replace(temporary, path)
    finally:
        pyplot.close("all")
        if os.path.exists(temporary):
            os.unlink(temporary)
