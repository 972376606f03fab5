"""Plots that commands write, where matplotlib is installed."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType

from dlio.errors import UsageError

__all__ = ["picture"]


@contextlib.contextmanager
def picture(path: str) -> Iterator[ModuleType]:
    """Draw a figure with pyplot inside of the block, and write it when the block ends.

        with picture("a.svg") as pyplot:
            pyplot.plot(...)

    The file appears under its name when it is complete; its ending chooses PNG or SVG.

    Raises UsageError when matplotlib is not installed.
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
