"""Folders that hold the parts of a data set, such as `train` and `val`, next to each other."""

import logging
from collections.abc import Sequence
from typing import Final

TRAIN_FOLDERS: Final = ("train", "training")
VAL_FOLDERS: Final = ("val", "validation", "valid", "dev", "eval", "test", "testing")

_log = logging.getLogger("dlio")


def is_split(name: str) -> bool:
    """True for the name of a folder that usually holds a part of a data set, such as `train`."""
    return name.lower() in (*TRAIN_FOLDERS, *VAL_FOLDERS)


def warn_of_splits(path: str, classes: Sequence[str]) -> None:
    """Warn if the classes of a data set are the names of its parts."""
    names = [name.lower() for name in classes]
    train = [name for name, low in zip(classes, names, strict=True) if low in TRAIN_FOLDERS]
    held_out = [low for low in names if low in VAL_FOLDERS]
    if train and len(train) + len(held_out) == len(names):
        _log.warning(
            "%s holds %s, read as classes, not as parts of a data set: open %s/%s",
            path,
            " and ".join(classes),
            path.rstrip("/"),
            train[0],
        )
