"""Curves that are kept in a folder, so that an interrupted benchmark goes on."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict

from dlio.errors import UsageError
from dlio.util.whole_files import write_json
from dlio_bench.prune.curves import TrainingCurve


def kept_curve(
    folder: str | None,
    name: str,
    settings: Mapping[str, object],
    train: Callable[[], TrainingCurve],
) -> TrainingCurve:
    """Return the curve of a training; the one in `folder` if there is one of the same settings.

    Args:
        name: of the training; its file's name follows from it.

    Raises UsageError if the file is of other settings.
    """
    if folder is None:
        return train()
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, re.sub(r"[^\w.]+", "-", name) + ".json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        if record["settings"] != dict(settings):
            raise UsageError(
                f"{path} is of another training: name another folder by --keep, or remove it"
            )
        return TrainingCurve(**record["curve"])
    curve = train()
    write_json(path, {"settings": dict(settings), "curve": asdict(curve)})
    return curve
