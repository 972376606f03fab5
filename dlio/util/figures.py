"""Pictures that commands write, where matplotlib is installed."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from dlio.errors import UsageError


@contextlib.contextmanager
def picture(path: str) -> Iterator[Any]:
    """`with picture("a.svg") as pyplot:` and the figure drawn within is written, whole, as PNG or
    SVG by the name's ending.

    Raises UsageError without matplotlib.
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
