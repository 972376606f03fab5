"""Text of a script in the making, and the choices that its parts share."""

from tests.fuzz.training.choices import LOADERS, RAGGED, Choices, decides_by


class ScriptText:
    """Lines of a script, which its parts add."""

    def __init__(self, chosen: Choices, way: str) -> None:
        self._is, self._way = chosen, way
        self._lines: list[str] = []
        self._every: list[str] = []
        """Names of the optimizers that step after each backward."""
        self._weight = ""
        """The weight in a loop of its own, where the loss is not a mean over samples."""
        self._counts_loss = chosen["prints"] == "train loss" or "train loss" in decides_by(chosen)
        self._samples = "a.shape[1]" if chosen["layout"] == "time first" else "len(a)"
        self._is_ragged = chosen["layout"] in RAGGED
        self._has_loaders = chosen["several"] in LOADERS
        self._has_classes = chosen["task"] == "classes" or chosen["loss"] == "by class"
        self._more = {"gan": ("judge", "optimizer_j"), "centers": ("centers", "optimizer_c")}.get(
            chosen["several"]
        )
        """A second network and its optimizer."""
        self._mean = {
            "samples": "total / max(seen, 1)",
            "batches": "total / (number + 1)",
            "dataset": "total / len(data)",
        }[chosen["average"]]

    def _put(self, text: str, indent: int = 0) -> None:
        self._lines += [" " * 4 * indent + line for line in text.strip("\n").splitlines()]

    def _distributed(self, optimizers: list[str]) -> str:
        """Return the call of `dlio.distribute` for some optimizers."""
        model, more = "model", []
        if self._more is not None:
            model = f"nn.ModuleList([model, {self._more[0]}])"
            more = [self._more[1]] if self._more[1] not in optimizers else []
        made = f"dlio.distribute({model}, [{', '.join([*optimizers, *more])}])"
        return f"ranks = {made} if size > 1 else Alone()"

    @property
    def _own(self) -> str:
        """Argument of a loss: 1 if this rank has samples of the batch, in a loop over slices."""
        return ", float(counts[number] > 0)" if self._way == "slices" else ""

    def _unpacked(self) -> str:
        return (
            'a, b = item["x"], item["y"]'
            if self._is["loader"] == "collate dict"
            else ("a, b = item")
        )
