"""Choices of the features of a training script, drawn by a seed: a text for each feature.

A choice that is left out is the plainest one, so that a failing script can be made smaller by
taking its choices away one by one.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Choices: TypeAlias = dict[str, str]

FEATURES: Final[Mapping[str, Sequence[str]]] = {
    "samples": ("48", "37", "61", "49", "64", "50"),
    "batch": ("12", "8", "16", "7", "2", "25"),
    "order": ("given", "shuffled", "generator", "weighted"),
    "drop_last": ("no", "yes"),
    "layout": ("samples first", "time first"),
    "task": ("numbers", "classes"),
    "loss": (
        *("mean", "smooth", "penalty", "sum", "by class", "tokens", "pairs", "two terms"),
        *("root", "by hand", "masked", "custom"),
    ),
    "norm": ("none", "layer", "batch", "group"),
    "dropout": ("none", "zero", "half"),
    "tied": ("no", "yes"),
    "frozen": ("no", "yes"),
    "optimizer": (
        *("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"),
        *("lbfgs", "lbfgs with a search", "by hand"),
    ),
    "groups": ("one", "two", "decay"),
    "scheduler": ("none", "step", "cosine", "onecycle", "warmup", "plateau", "plateau on train"),
    "accumulate": ("1", "2", "3"),
    "leftover": ("step", "drop"),
    "clip": ("none", "norm", "value"),
    "ema": ("none", "averaged", "by hand"),
    "precision": ("float32", "float64", "autocast", "scaler", "bfloat16"),
    "several": ("one", "optimizers", "loaders", "gan", "teacher"),
    "stage": ("one", "unfreeze", "freeze", "optimizer", "group", "replaced head"),
    "gradient": ("backward", "autograd.grad", "noise", "twice", "penalty", "two backwards"),
    "read": ("before", "after"),
    "average": ("samples", "batches", "dataset"),
    "prints": (
        *("none", "val", "train loss", "last loss", "accuracy", "norm", "rate", "each step"),
        "metric",
    ),
    "inner": ("none", "eval", "no_grad", "with gradients", "train set"),
    "stop": ("none", "val", "train", "steps"),
    "skip": ("none", "every third", "nan at the end", "loss", "nan"),
    "save": ("none", "end", "epochs", "best by val", "best by train", "replaced"),
    "resume": ("no", "between epochs", "new objects", "in the middle"),
    "files": (
        *("none", "csv", "json", "makedirs", "logging", "numpy", "removed", "kept open"),
        *("moved", "each step"),
    ),
    "loader": (
        *("plain", "workers", "batch sampler", "collate dict", "fetch ahead"),
        *("iterable", "slices"),
    ),
    "epochs": ("2", "3"),
    "habit": (
        *("none", "peek", "checkpointing", "sam", "statistics", "sparse", "weight norm"),
        *("spectral norm", "branch", "branch by data", "finder", "endless", "mixed", "centred"),
        *("hardest", "learned weight", "collected"),
    ),
}
"""Alternatives of each feature; the plainest first."""
_RARE: Final = 0.78
"""Probability of the plainest alternative."""
_PROBABILITY: Final = {
    **dict.fromkeys(("samples", "batch", "order", "optimizer", "task", "loss"), 0.4),
    "prints": 0.2,
    "read": 0.5,
    "average": 0.5,
    "layout": 0.88,
    "dropout": 0.85,
    "skip": 0.88,
    "habit": 0.7,
}
"""The same of some features. Those whose results are not compared, or that end most scripts, are
drawn less often."""
BY_HAND: Final = (
    *("prints", "files", "save", "resume", "stop", "skip", "loader", "inner", "order", "read"),
    "average",
)
"""Features that loops with `dlio.distribute` leave out: their results are the loop's affair."""


HABITS_OF_NETWORKS: Final = (
    *("checkpointing", "sparse", "weight norm", "spectral norm", "branch", "learned weight"),
)
"""The habits that such loops have, too."""


def draw(seed: int) -> Choices:
    """Return the choices of a seed that are not the plainest."""
    rng = random.Random(seed)
    choices = {}
    for name, alternatives in FEATURES.items():
        if rng.random() > _PROBABILITY.get(name, _RARE):
            choices[name] = rng.choice(alternatives[1:])
    return sensible(choices)


def sensible(choices: Choices) -> Choices:
    """Return choices without those that make a script fail in one process, too."""
    chosen = _Chosen(choices)
    if chosen["optimizer"] == "by hand":
        chosen.without("groups", "scheduler", "resume")
        chosen.without_some("precision", "scaler")
        chosen.without_some("several", "optimizers", "gan")
        chosen.without_some("stage", "group", "optimizer", "replaced head")
        chosen.without_some("prints", "rate")
    if chosen["optimizer"].startswith("lbfgs"):
        # It takes one group, and only a plain step.
        chosen.without_some("skip", "nan at the end")
        chosen.without("groups", "accumulate", "leftover", "clip", "precision", "gradient")
        chosen.without_some("stage", "group")
        chosen.without_some("several", "loaders", "teacher")
    if chosen["layout"] == "time first":
        chosen.without("task")
        chosen.without_some("norm", "batch", "group")
        chosen.without_some("loss", "by class", "tokens", "pairs")
        chosen.without_some("loader", "collate dict")
        chosen.without_some("several", "gan", "loaders")
        chosen.without_some("gradient", "penalty")
        chosen.without_some("prints", "accuracy")
    if chosen["precision"] == "bfloat16":
        chosen.without_some("order", "weighted")
        chosen.without_some("gradient", "penalty")
        chosen.without_some("skip", "nan", "loss")
        chosen.without_some("several", "loaders")
    if chosen["loader"] == "iterable":
        chosen.without("order", "drop_last")
        chosen.without_some("resume", "in the middle")
    if chosen["loader"] == "slices":
        chosen.without_some("several", "loaders")
        chosen.without_some("inner", "train set")
        chosen.without("order", "drop_last")
        chosen.without_some("resume", "in the middle")
    if chosen["loss"] == "custom":
        chosen.without_some("precision", "autocast", "scaler", "bfloat16")
        chosen.without_some("gradient", "penalty")
    if chosen["loss"] in ("tokens", "by class"):
        chosen.without("task")
    if chosen["resume"] == "new objects":
        # The optimizer of one group is made again.
        chosen.without("groups", "stage", "scheduler")
        chosen.without_some("several", "optimizers")
    if chosen["stage"] == "group" and chosen["scheduler"] != "step":
        chosen.without("scheduler")
    if chosen["gradient"] in ("penalty", "two backwards"):
        chosen.without_some("precision", "autocast", "scaler")
    if chosen["gradient"] == "autograd.grad":
        chosen.without_some("skip", "nan at the end")
        chosen.without_some("precision", "scaler")
    if chosen["gradient"] == "twice":
        chosen.without_some("precision", "scaler")
    if chosen["loader"] == "fetch ahead":
        chosen.without_some("resume", "in the middle")
    _sensible_habits(chosen)
    if chosen["norm"] == "batch":
        # Of one sample it has no statistics.
        count, batch = int(chosen["samples"]), int(chosen["batch"])
        if count % batch == 1 and chosen["drop_last"] == "no":
            chosen.without("samples", "batch")
        chosen.without_some("several", "loaders")
    return chosen.choices


def _sensible_habits(chosen: "_Chosen") -> None:
    """Take habits away that the other choices have no place for."""
    habit, precise = chosen["habit"], chosen["precision"] in ("float32", "float64")
    is_plain = chosen["gradient"] == "backward" and chosen["several"] == "one" and precise
    is_closed = chosen["optimizer"].startswith("lbfgs")
    is_fit = {
        "sam": is_plain and not is_closed and chosen["accumulate"] == "1",
        "statistics": chosen["norm"] == "batch" and chosen["loader"] != "collate dict",
        "sparse": chosen["optimizer"] in ("sgd", "adagrad", "by hand")
        and chosen["groups"] != "decay"
        and chosen["loss"] != "penalty"
        and chosen["clip"] == "none"
        and is_plain,
        "spectral norm": chosen["tied"] == "no" and precise,
        "weight norm": precise,
        "finder": chosen["optimizer"] != "by hand"
        and not is_closed
        and chosen["loader"] not in ("iterable",)
        and precise,
        "endless": chosen["several"] != "loaders"
        and chosen["resume"] != "in the middle"
        and chosen["loader"] != "fetch ahead"
        and chosen["leftover"] == "step",
        "mixed": not is_closed and chosen["loss"] not in ("tokens", "pairs"),
        "centred": not is_closed,
        "hardest": not is_closed,
        "learned weight": not is_closed and chosen["optimizer"] != "by hand",
    }
    if not is_fit.get(habit, True):
        chosen.without("habit")


class _Chosen:
    """Choices, with the plainest alternative of each feature that is left out."""

    def __init__(self, choices: Choices) -> None:
        self.choices = dict(choices)

    def __getitem__(self, name: str) -> str:
        return self.choices.get(name, FEATURES[name][0])

    def without(self, *names: str) -> None:
        """Take some choices away."""
        for name in names:
            self.choices.pop(name, None)

    def without_some(self, name: str, *alternatives: str) -> None:
        """Take a choice away if it is one of some."""
        if self.choices.get(name) in alternatives:
            del self.choices[name]


def draws_by_part(choices: Choices) -> bool:
    """True if ranks draw other random numbers than one process, as each has a part of a batch."""
    return choices.get("dropout") == "half" or choices.get("gradient") == "noise"


def decides_by(choices: Choices) -> tuple[str, ...]:
    """Return the numbers of training batches by which a script decides on; marked as `marked` tells
    them."""
    is_by_loss = (choices.get(name) for name in ("scheduler", "stop", "save"))
    numbers = ["train loss"] if any("train" in (each or "") for each in is_by_loss) else []
    numbers += ["branch"] if choices.get("habit") == "branch by data" else []
    return (*numbers, *(["skip"] if choices.get("skip") in ("loss", "nan") else []))
