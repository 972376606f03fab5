"""Training scripts as text, from the choices of their features."""

from tests.fuzz.training.choices import (
    BY_HAND,
    FEATURES,
    HABITS_OF_NETWORKS,
    PAIRS,
    RAGGED,
    UNLIKE_SAMPLES,
    Choices,
    samples_of,
    whole_batch,
)
from tests.fuzz.training.data_lines import DataLines
from tests.fuzz.training.loop_lines import LoopLines
from tests.fuzz.training.model_lines import ModelLines


def marked(script: str) -> dict[int, tuple[str, ...]]:
    """Return the lines of a script that read numbers of training batches, with their uses.

    Such a line ends in a comment, as `total += loss.item()  # reads train loss`.
    """
    return {
        number: tuple(line.rpartition("  # reads ")[2].split(", "))
        for number, line in enumerate(script.splitlines(), 1)
        if "  # reads " in line
    }


def render(choices: Choices, way: str = "run") -> str:
    """Return the script of some choices.

    Args:
        way: `run` for a script of one process; `distribute` for a loop that shares its data by
            `dlio.DataLoader`, `slices` for one that does so itself, both with `dlio.distribute`.
    """
    chosen = {name: alternatives[0] for name, alternatives in FEATURES.items()} | choices
    if way != "run":
        chosen |= {name: FEATURES[name][0] for name in BY_HAND}
        if chosen["habit"] not in HABITS_OF_NETWORKS:
            chosen["habit"] = "none"
        if chosen["scheduler"] == "plateau on train":
            chosen["scheduler"] = "plateau"
        if chosen["data"] == "augmented":
            chosen["data"] = "own class"  # Draws of samples are the loop's affair.
        if chosen["several"] == "loaders cycled":
            chosen["several"] = "one"
        if chosen["layout"] in RAGGED:
            # Of batches of lists, loops of their own have losses that are means over samples.
            chosen["loss"] = "by samples" if chosen["loss"] == "by samples" else "loop"
            if way == "slices":
                chosen["layout"] = FEATURES["layout"][0]
        if chosen["loss"] in ("root", "dice", *PAIRS):
            chosen["loss"] = "mean"  # The loop's losses have to be means.
        if way == "distribute" and chosen["loss"] in UNLIKE_SAMPLES:
            chosen["loss"] = "mean"  # Over samples, as it does not weigh by itself.
        if chosen["optimizer"] == "by hand":
            chosen["optimizer"] = "sgd"
        if chosen["optimizer"] == "lbfgs with a search":
            chosen["optimizer"] = "lbfgs"  # By the last bit of a sum a search ends elsewhere.
        if chosen["optimizer"] == "lbfgs" and chosen["dropout"] == "half":
            chosen["dropout"] = "zero"  # Parts drop others: the search is another one.
        if way == "slices":
            chosen["data"] = FEATURES["data"][0]
            _weigh_at_once(chosen)
        is_single = way == "slices" or samples_of(chosen) % whole_batch(chosen) == 1
        if is_single and chosen["norm"] == "batch":
            chosen["norm"] = "layer"  # Of one sample it has no statistics.
    return _Script(chosen, way).text()


def _weigh_at_once(chosen: dict[str, str]) -> None:
    """Take choices away for which one call of `weigh` does not do: terms of a loss that are means
    over other elements. Nor can a loop of its own decide by the loss of a part."""
    chosen["skip"] = "none" if chosen["skip"] in ("nan", "loss") else chosen["skip"]
    if chosen["loss"] == "masked" and chosen["dropout"] == "half":
        chosen["dropout"] = "zero"  # Else another forward pass counts other elements.
    if chosen["loss"] in UNLIKE_SAMPLES:
        if chosen["gradient"] in ("penalty", "two backwards"):
            chosen["gradient"] = FEATURES["gradient"][0]
        if chosen["several"] in ("teacher", "centers"):
            chosen["several"] = FEATURES["several"][0]
    if chosen["stage"] == "optimizer":
        chosen["stage"] = FEATURES["stage"][0]


class _Script(DataLines, ModelLines, LoopLines):
    """A script in the making."""

    def text(self) -> str:
        """Return the whole script."""
        self._imports()
        self._data()
        self._loaders()
        self._model()
        self._loss()
        self._optimizer()
        self._loop()
        self._end()
        return "\n".join(self._lines) + "\n"
