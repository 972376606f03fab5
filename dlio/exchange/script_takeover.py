"""Agreement on the distributor of a script: `dlio run`, or the script by Lightning's strategy."""

import contextlib
from collections.abc import Callable, Iterator

_step_aside: Callable[[], None] | None = None


@contextlib.contextmanager
def on_takeover(act: Callable[[], None]) -> Iterator[None]:
    """Have `take_over` call `act` inside the `with` block."""
    global _step_aside
    _step_aside = act
    try:
        yield
    finally:
        _step_aside = None


def take_over() -> None:
    """Have `dlio run`, if it runs this script, leave the training to the script."""
    if _step_aside is not None:
        _step_aside()
