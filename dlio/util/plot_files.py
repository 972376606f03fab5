"""Plots of commands, for which matplotlib must be installed."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

from dlio.errors import UsageError
from dlio.util.extras import how_to_install
from dlio.util.whole_files import write_whole


@contextlib.contextmanager
def picture(path: str) -> Iterator[ModuleType]:
    """Draw a figure with pyplot inside the `with` block, and write it when the block ends.

        with picture("a.svg") as pyplot:
            pyplot.plot(...)

    The file appears under its name once it is complete; its suffix chooses PNG or SVG.

    Raises UsageError if matplotlib is not installed, or if the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib: {how_to_install('plot')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        yield pyplot
        write_whole(path, lambda file: pyplot.gcf().savefig(file, format=path[-3:]))
    finally:
        pyplot.close("all")
