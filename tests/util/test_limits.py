"""Errors while data are parsed: damage, or a machine that has no more to give."""

import errno

import pytest

from dlio.errors import SourceError
from dlio.util.limits import parsing


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad header"), "cannot be read: bad header; check it"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit"),
        (RuntimeError("can't start new thread"), "ulimit"),
        (RuntimeError("bad header"), "cannot be read: bad header; check it"),
        (MemoryError(), "needs more memory"),
    ],
)
def test_a_lack_of_resources_is_not_damage(error: Exception, words: str) -> None:
    with pytest.raises(SourceError, match=words) as raised, parsing("/data"):
        raise error
    assert ("restore it" in str(raised.value)) == ("damaged" in words)
    assert raised.value.__cause__ is error
