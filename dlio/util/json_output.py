"""Results as JSON (RFC 8259), which any program can read: it has no NaN and no infinity.

Messages and state that dlio alone reads back are not written so: they keep Python's numbers.
"""

import json
import math


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON, in which numbers that are not finite are null.

    Raises TypeError for a value that JSON does not have.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    """Return a value with None in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
