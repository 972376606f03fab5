"""Errors while data are parsed: damage, or a machine that has no more to give."""

import errno

import pytest

from dlio.errors import SourceError
from dlio.util.limits import lacks_files, parsing


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


def test_a_lack_of_open_files_is_seen_whoever_says_it() -> None:
    assert lacks_files(OSError(errno.EMFILE, "Too many open files"))
    assert lacks_files(RuntimeError("[enforce fail at loop.cc:48] pipe: Too many open files"))
    assert not lacks_files(SourceError("/data cannot be read: Too many open files: use fewer"))
    assert not lacks_files(OSError(errno.EIO, "Input/output error"))
