"""Choices of the features of a training script, drawn by a seed: a text for each feature.

A choice that is left out is the plainest one, so that a failing script can be made smaller by
taking its choices away one by one.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

Choices: TypeAlias = dict[str, str]

_FIRST: Final[Mapping[str, Sequence[str]]] = {
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
_LATER: Final[Mapping[str, Sequence[str]]] = {
    "data": (
        *("whole", "random_split", "fractions", "split by generator", "subset", "concat"),
        *("own class", "augmented"),
    ),
    "zero": ("optimizer", "kept", "model", "none"),
    "compiled": ("no", "disabled"),
    "order": ("subset", "subset drawn"),
    "layout": ("ragged", "ragged joined"),
    "loss": (
        *("tasks", "by samples", "by mask", "by tokens", "weighted mean", "per sample", "loop"),
        *("kl", "bce", "contrastive", "triplet", "dice", "spread"),
    ),
    "optimizer": ("nadam", "radam", "adam foreach", "adamw fused", "sgd fused"),
    "scheduler": ("warm restarts", "cyclic", "sequential", "onecycle by length", "swa"),
    "leftover": ("own",),
    "ema": ("swa",),
    "precision": ("scaler off",),
    "several": ("centers", "loaders cycled"),
    "gradient": ("weighted", "outputs", "per sample", "list"),
    "prints": ("tensor loss", "scores", "largest gradient"),
    "inner": ("scores",),
    "stop": ("patience",),
    "resume": ("second run",),
    "loader": ("sampler of batches",),
    "habit": ("mixup", "restarted", "parametrize", "functional", "sparse adam"),
}
"""Further ones, which seeds from `_MORE_FROM` on draw, too: those before keep their scripts."""
_MORE_FROM: Final = 70000
FEATURES: Final[Mapping[str, Sequence[str]]] = {
    name: (*_FIRST.get(name, ()), *_LATER.get(name, ())) for name in {**_FIRST, **_LATER}
}
"""Alternatives of each feature; the plainest first."""
PAIRS: Final = ("pairs", "contrastive", "triplet", "spread")
"""Losses that compare samples of a batch."""
UNLIKE_SAMPLES: Final = (
    *("sum", "by class", "tokens", "masked", "by tokens", "by mask", "weighted mean"),
)
"""Losses that are sums, or means over other elements than samples."""
TOKENS: Final = ("tokens", "by tokens")
RAGGED: Final = ("ragged", "ragged joined")
"""Layouts of batches that are lists of tensors of unlike lengths."""
LOADERS: Final = ("loaders", "loaders cycled")
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
_OF_LATER: Final = {"loss": 0.65, "habit": 0.75, "layout": 0.92, "gradient": 0.85, "zero": 0.75}
"""Probability that none of the further alternatives is drawn, where it is not `_OF_MOST`."""
_OF_MOST: Final = 0.88
"""The same of some features. Those whose results are not compared, or that end most scripts, are
drawn less often."""
BY_HAND: Final = (
    *("prints", "files", "save", "resume", "stop", "skip", "loader", "inner", "order", "read"),
    "average",
)
"""Features that loops with `dlio.distribute` leave out: their results are the loop's affair."""


HABITS_OF_NETWORKS: Final = (
    *("checkpointing", "sparse", "weight norm", "spectral norm", "branch", "learned weight"),
    *("parametrize", "functional", "sparse adam"),
)
"""The habits that such loops have, too."""
_HABITS_OF_LISTS: Final = (
    *("branch", "finder", "endless", "restarted", "weight norm", "parametrize", "functional"),
)
"""The habits that scripts with batches of lists have, too."""


def draw(seed: int) -> Choices:
    """Return the choices of a seed that are not the plainest."""
    rng = random.Random(seed)
    choices = {}
    for name, alternatives in _FIRST.items():
        if rng.random() > _PROBABILITY.get(name, _RARE):
            choices[name] = rng.choice(alternatives[1:])
    for name, alternatives in _LATER.items() if seed >= _MORE_FROM else ():
        if rng.random() > _OF_LATER.get(name, _OF_MOST):
            choices[name] = rng.choice(alternatives[name not in _FIRST :])
    return sensible(choices)


def sensible(choices: Choices) -> Choices:
    """Return choices without those that make a script fail in one process, too."""
    chosen = _Chosen(choices)
    if chosen["optimizer"] == "by hand":
        chosen.without("groups", "scheduler", "resume")
        chosen.without_some("precision", "scaler", "scaler off")
        chosen.without_some("several", "optimizers", "gan", "centers")
        chosen.without_some("stage", "group", "optimizer", "replaced head")
        chosen.without_some("prints", "rate")
    if chosen["optimizer"].startswith("lbfgs"):
        # It takes one group, and only a plain step.
        chosen.without_some("skip", "nan at the end")
        chosen.without("groups", "accumulate", "leftover", "clip", "precision", "gradient")
        chosen.without_some("stage", "group")
        chosen.without_some("several", *LOADERS, "teacher", "centers")
    if chosen["layout"] == "time first":
        chosen.without("task")
        chosen.without_some("norm", "batch", "group")
        chosen.without_some("loss", "by class", "kl", *TOKENS, *PAIRS)
        chosen.without_some("loader", "collate dict", "sampler of batches")
        chosen.without_some("several", "gan", "centers", *LOADERS)
        chosen.without_some("gradient", "penalty")
        chosen.without_some("prints", "accuracy", "scores")
        chosen.without_some("inner", "scores")
        chosen.without_some("habit", "mixup")
    if chosen["precision"] == "bfloat16":
        chosen.without_some("order", "weighted")
        chosen.without_some("gradient", "penalty")
        chosen.without_some("skip", "nan", "loss")
        chosen.without_some("several", *LOADERS)
    if chosen["loader"] == "iterable":
        chosen.without("order", "drop_last", "data")
        chosen.without_some("resume", "in the middle")
    if chosen["loader"] == "slices":
        chosen.without("data")
        chosen.without_some("several", *LOADERS)
        chosen.without_some("inner", "train set")
        chosen.without("order", "drop_last")
        chosen.without_some("resume", "in the middle")
    if chosen["loss"] == "custom":
        chosen.without_some("precision", "autocast", "scaler", "bfloat16")
        chosen.without_some("gradient", "penalty")
    if chosen["loss"] in (*TOKENS, "by class"):
        chosen.without("task")
    if chosen["resume"] == "new objects":
        # The optimizer of one group is made again.
        chosen.without("groups", "stage", "scheduler")
        chosen.without_some("several", "optimizers", "centers")
    if chosen["stage"] == "group" and chosen["scheduler"] != "step":
        chosen.without("scheduler")
    if chosen["gradient"] in ("penalty", "two backwards"):
        chosen.without_some("precision", "autocast", "scaler")
    if chosen["gradient"] == "autograd.grad":
        chosen.without_some("skip", "nan at the end")
        chosen.without_some("precision", "scaler", "scaler off")
    if chosen["gradient"] == "twice":
        chosen.without_some("precision", "scaler", "scaler off")
    if chosen["loader"] == "fetch ahead":
        chosen.without_some("resume", "in the middle")
    _sensible_later(chosen)
    _sensible_habits(chosen)
    if chosen["norm"] == "batch":
        # Of one sample it has no statistics.
        if samples_of(chosen.choices) % int(chosen["batch"]) == 1 and chosen["drop_last"] == "no":
            chosen.without("samples", "batch", "data")
            chosen.without_some("order", "subset", "subset drawn")
        chosen.without_some("several", *LOADERS)
    return chosen.choices


def _sensible_later(chosen: "_Chosen") -> None:
    """Take choices away that the further alternatives have no place for."""
    if chosen["layout"] in RAGGED:
        chosen.without("task", "skip")
        chosen.without_some("norm", "batch")
        chosen.without_some("loss", "by class", "contrastive", *TOKENS)
        chosen.without_some("precision", "bfloat16")
        chosen.without_some("gradient", "noise", "penalty", "two backwards", "outputs", "list")
        chosen.without_some("gradient", "per sample")
        chosen.without_some("several", "gan", "teacher", "centers", *LOADERS)
        chosen.without_some("prints", "accuracy", "metric", "scores")
        chosen.without_some("inner", "scores")
        chosen.without_some("order", "weighted")
        chosen.without_some("loader", "collate dict", "iterable", "slices", "sampler of batches")
        chosen.without_some("data", "own class", "augmented")
        if chosen["habit"] not in _HABITS_OF_LISTS:
            chosen.without("habit")
    if chosen["gradient"] in ("weighted", "outputs", "per sample", "list"):
        chosen.without_some("precision", "scaler", "scaler off", "autocast")
        chosen.without_some("skip", "nan at the end", "nan")
    if chosen["gradient"] in ("outputs", "per sample", "list"):
        chosen.without("loss", "task")
    if chosen["loader"] == "sampler of batches":
        chosen.without("order")
        chosen.without_some("data", "concat")
    if chosen["several"] == "centers":
        chosen.without_some("zero", "model", "none")
        chosen.without_some("stage", "optimizer", "group", "replaced head")
    if chosen["resume"] == "second run":
        # It begins with the objects of the first one.
        chosen.without("stage", "several", "order", "ema", "data", "loader")
        chosen.without_some("scheduler", "plateau on train", "sequential")
        chosen.without_some("habit", "finder", "peek", "endless", "restarted")
        chosen.without_some("stop", "patience", "steps")
        chosen.without_some("save", "best by val", "best by train")
        chosen.without_some("files", "makedirs", "moved")
    if chosen["leftover"] == "own" and chosen["several"] in LOADERS:
        chosen.without("leftover")


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
        "endless": chosen["several"] not in LOADERS
        and chosen["resume"] != "in the middle"
        and chosen["loader"] != "fetch ahead"
        and chosen["leftover"] == "step",
        "restarted": chosen["several"] not in LOADERS
        and chosen["resume"] != "in the middle"
        and chosen["loader"] != "fetch ahead"
        and chosen["leftover"] == "step",
        "mixup": not is_closed and chosen["loss"] not in (*TOKENS, *PAIRS),
        "parametrize": chosen["tied"] == "no",
        "functional": not is_closed,
        "sparse adam": chosen["optimizer"] != "by hand"
        and chosen["groups"] == "one"
        and chosen["stage"] == "one"
        and chosen["resume"] == "no"
        and chosen["loss"] != "penalty"
        and chosen["clip"] == "none"
        and not is_closed
        and is_plain,
        "mixed": not is_closed and chosen["loss"] not in (*TOKENS, *PAIRS),
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


def samples_of(choices: Choices) -> int:
    """Return the number of samples of a pass."""
    count = int(choices.get("samples", FEATURES["samples"][0]))
    count = {
        "random_split": count - 10,
        "split by generator": count - 10,
        "fractions": count - int(count * 0.2),
        "subset": (count + 1) // 2,
        "concat": count + 30,
    }.get(choices.get("data", ""), count)
    parts = {"subset": (count + 1) // 2, "subset drawn": count - 6}
    return parts.get(choices.get("order", ""), count)


def whole_batch(choices: Choices) -> int:
    """Return the size of the batch that ranks share in a loop of its own over `dlio.DataLoader`."""
    return 12 if int(choices.get("batch", FEATURES["batch"][0])) < 12 else 18


def runs_of(script: str) -> int:
    """Return how often a script is run, one run after the other, as a comment in it says."""
    return 2 if "# runs twice" in script else 1


def draws_by_part(choices: Choices) -> bool:
    """True if ranks draw other random numbers than one process, as each has a part of a batch."""
    draws = choices.get("dropout") == "half" or choices.get("gradient") == "noise"
    return draws or choices.get("data") == "augmented"


def without_draws(choices: Choices) -> Choices:
    """Return choices of a script whose ranks draw no other random numbers than one process."""
    plain = {("dropout", "half"): "zero", ("gradient", "noise"): "backward"}
    plain |= {("data", "augmented"): "own class"}
    return {name: plain.get((name, value), value) for name, value in choices.items()}


def decides_by(choices: Choices) -> tuple[str, ...]:
    """Return the numbers of training batches by which a script decides on; marked as `marked` tells
    them."""
    is_by_loss = (choices.get(name) for name in ("scheduler", "stop", "save"))
    numbers = ["train loss"] if any("train" in (each or "") for each in is_by_loss) else []
    numbers += ["branch"] if choices.get("habit") == "branch by data" else []
    return (*numbers, *(["skip"] if choices.get("skip") in ("loss", "nan") else []))
