"""Everything dlio raises on purpose.

    DlioError                 a user can act on it; the CLI prints it as one line, exit code 2
    ├── UsageError            an option, a specification or a combination that cannot work
    ├── SourceError           the data set's own files: missing, empty, changed, unreadable
    │   └── DecodeError       one sample's payload is no image, or a damaged one
    ├── CorruptBlock          bytes in a shard or tier that fail their checksum or their bounds
    ├── TierError             a tier that cannot be used: not writable, not ours, wrong owner
    │   └── TierFull          a tier, or the disk below it, has no room
    └── CommError             between ranks
        └── CommTimeout       a deadline passed; says who was waited for

Each message says what, where (path, block, sample, rank) and what to do.
"""

__all__ = [
    "CommError",
    "CommTimeout",
    "CorruptBlock",
    "DecodeError",
    "DlioError",
    "SourceError",
    "TierError",
    "TierFull",
    "UsageError",
]


class DlioError(Exception):
    """Base of all errors that a user can act on."""


class UsageError(DlioError, ValueError):
    """An option, a specification or a combination that cannot work."""


class SourceError(DlioError, OSError):
    """The data set's own files are missing, empty, changed or unreadable."""


class DecodeError(SourceError):
    """One sample's payload is no image, or a damaged one."""


class CorruptBlock(DlioError):
    """Bytes in a shard or tier fail their checksum or their bounds."""


class TierError(DlioError, OSError):
    """A tier cannot be used."""


class TierFull(TierError):
    """A tier, or the disk below it, has no room."""


class CommError(DlioError, RuntimeError):
    """Something between ranks failed."""


class CommTimeout(CommError, TimeoutError):
    """A deadline passed while waiting for other ranks."""
