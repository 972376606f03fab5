"""The exceptions that dlio raises deliberately.

    DlioError                 an error that a user can act on; the CLI prints one line, exit code 2
    ├── UsageError            an unsuitable option, specification or combination
    ├── SourceError           the data set's own files are missing, empty, changed or unreadable
    │   └── DecodeError       a sample's payload is not an image, or is damaged
    ├── CorruptBlock          bytes in a shard or tier fail their checksum or their bounds
    ├── TierError             a tier cannot be used: not writable, not dlio's, wrong owner
    │   └── TierFull          a tier, or the disk below it, has no room
    └── CommError             communication between ranks failed
        ├── CommTimeout       a deadline passed; names the ranks that did not answer
        └── PeerLost          a rank is gone; the others may go on without it

Each message names the error, its place (path, block, sample, rank) and the remedy. It is one line
of printable characters, even if names in it are not: see `printable`.
"""

import re
from typing import Final

__all__ = [
    "CommError",
    "CommTimeout",
    "CorruptBlock",
    "DecodeError",
    "DlioError",
    "PeerLost",
    "SourceError",
    "TierError",
    "TierFull",
    "UsageError",
    "printable",
    "redact",
    "shortened",
]

_MOST_SHOWN: Final = 4096
_HEAD_SHOWN: Final = 3000
_TAIL_SHOWN: Final = 600
"""Characters of a message, and of its ends if it is longer."""


def redact(text: str) -> str:
    """Return a URL, or a message with URLs, without users, passwords and signatures."""
    if "://" not in text:
        return text
    text = re.sub(r"://[^/\s]*@", "://***@", text)
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1?***", text, flags=re.IGNORECASE)


def printable(text: str | bytes) -> str:
    """Escape what a terminal would obey instead of show: control characters, line ends and so on,
    and invalid bytes; and leave out the secrets of URLs.

    Names of files, classes and columns come from data that others have made. Everything that shows
    them passes through here, most of it as the text of a DlioError.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shortened(text: str) -> str:
    """Leave out the middle of a text that nobody would read to its end, where the remedy is: data
    of others may have a hundred thousand columns, or a name of a megabyte."""
    if len(text) <= _MOST_SHOWN:
        return text
    left = len(text) - _HEAD_SHOWN - _TAIL_SHOWN
    return f"{text[:_HEAD_SHOWN]} ... ({left:,} characters) ... {text[-_TAIL_SHOWN:]}"


class DlioError(Exception):
    """Base class of all errors that a user can act on."""

    def __str__(self) -> str:
        return shortened(printable(super().__str__()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class UsageError(DlioError, ValueError):
    """An option, a specification or a combination of these is unsuitable."""


class SourceError(DlioError, OSError):
    """The data set's own files are missing, empty, changed or unreadable."""


class DecodeError(SourceError):
    """A sample's payload is not an image, or is damaged."""


class CorruptBlock(DlioError):
    """Bytes in a shard or tier fail their checksum or their bounds."""


class TierError(DlioError, OSError):
    """A tier cannot be used."""


class TierFull(TierError):
    """A tier, or the disk below it, has no room."""


class CommError(DlioError, RuntimeError):
    """Communication between ranks failed."""


class CommTimeout(CommError, TimeoutError):
    """A deadline passed while waiting for other ranks."""


class PeerLost(CommError):
    """A rank is gone: the generation of communicators that it belonged to is over.

    `dlio.comm.survival.membership` makes the next one of the ranks that are left.
    """
