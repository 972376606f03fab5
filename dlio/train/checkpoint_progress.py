"""How far a folder of checkpoints has come, without torch."""

import os
from contextlib import suppress
from typing import Any, Final

from dlio.errors import UsageError
from dlio.train.feature_spec import fixed_options
from dlio.train.names import ARRAY_MODELS, DEFAULT_MODEL, USUAL_MODELS, USUAL_OPTIMIZERS
from dlio.train.train_options import TrainOptions
from dlio.util.input_files import read_json
from dlio.util.options import as_mapping

FIXED: Final = ("model", "optimizer", "image_size", "seed")
"""Options that cannot change when a run is resumed."""


def finished_epochs(folder: str, config: TrainOptions) -> int:
    """Return the number of epochs that the newest checkpoint in a folder has finished.

    0 if there is none, if it is within a later epoch, of another run, or cannot be read: a run that
    resumes says why.
    """
    with suppress(
        UsageError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    ):
        newest = max(name for name in os.listdir(folder) if name.startswith("step-"))
        about: Any = read_json(os.path.join(folder, newest, "about.json"))
        options = as_mapping(config)
        is_of_run = all(_is_same(name, about[name], options[name]) for name in FIXED)
        of_task = about.get("of_task", {})
        for name in ("task", "target", *fixed_options()):
            is_of_run &= options.get(name) in (None, of_task.get(name))
        for feature, own in config.each_feature():
            feature.check_saved(about, folder, feature.label(own) is not None)
        if is_of_run and about["loader"]["position"] == 0:
            return len(about["epochs"])
    return 0


def _is_same(name: str, saved: object, given: object) -> bool:
    """True if a run with this option may have saved the other value: those that are not given
    depend on the data."""
    if name == "optimizer" and given is None:
        return saved in USUAL_OPTIMIZERS.values()
    if name == "model" and given == DEFAULT_MODEL:
        return saved in (*USUAL_MODELS.values(), *ARRAY_MODELS.values())
    return saved == given
