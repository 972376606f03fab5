"""The value of `--batch-norm`, without torch."""

import re
from typing import Final

from dlio.errors import UsageError

MODES: Final = ("local", "average", "sync")
"""Values besides `ghost(SAMPLES)`."""
USAGE: Final = "choose average, sync, local, or ghost(SAMPLES) such as ghost(16)"
_GHOST: Final = re.compile(r"ghost\((\d+)\)")


def group_size(batch_norm: str) -> int | None:
    """Return the samples of a group of `ghost(SAMPLES)`; None for another mode.

    Raises UsageError for any other text, and for groups of fewer than 2 samples.
    """
    if batch_norm in MODES:
        return None
    match = _GHOST.fullmatch(batch_norm.strip())
    if match is None:
        raise UsageError(f"--batch-norm {batch_norm}: {USAGE}")
    if int(match[1]) < 2:
        raise UsageError(f"--batch-norm {batch_norm}: give groups of 2 samples or more")
    return int(match[1])
