"""Files and folders that systems and tools leave behind, beyond the data set itself."""

from typing import Final

# fmt: off
_LEFT_BEHIND: Final = frozenset((
    "__macosx", "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "lost+found",
    "$recycle.bin", "@eadir", "system volume information",
))
# fmt: on


def is_hidden(name: str) -> bool:
    """True for the name of a file or folder that is not listed as part of a data set.

    Names that begin with a dot (`.ipynb_checkpoints`, `.DS_Store`, `._0.jpg`), and those that
    macOS, Windows, Python and file servers leave behind.
    """
    return name.startswith(".") or name.lower() in _LEFT_BEHIND
