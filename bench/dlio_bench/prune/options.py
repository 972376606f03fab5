"""What `dlio bench prune` is asked to do."""

from dataclasses import dataclass

from dlio.errors import UsageError


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command; a case takes those that it knows."""

    source: str | None = None
    val: str | None = None
    ranks: int = 2
    seeds: int = 3
    epochs: int | None = None
    """In the place of a case's own."""
    shrunk_epochs: int | None = None
    """Of all trainings but the one that keeps all neurons and samples."""
    width: int | None = None
    """Of the network before it is pruned, in the place of a case's own."""
    tolerance: float = 0.5
    """Points of held-out accuracy."""
    image_size: int = 64
    rows: int | None = None
    """That a perceptron learns from."""
    lr: float = 1e-3
    """Of perceptrons, at the beginning."""
    keep: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.plot is not None and not self.plot.endswith((".png", ".svg")):
            raise UsageError(f"--plot {self.plot}: give a name that ends in .png or .svg")
        if not self.lr > 0:
            raise UsageError(f"--lr {self.lr}: give a number above 0")
        if not self.tolerance >= 0:
            raise UsageError(f"--tolerance {self.tolerance}: give points of accuracy, 0 or more")

    def longer(self, epochs: int, times: float) -> int:
        """Epochs of trainings that cost less: a part of the time that they save goes into more."""
        return self.shrunk_epochs or max(epochs, round(epochs * times))

    def check_images(self, case: str) -> tuple[str, str]:
        """Training and held-out data. Raises UsageError where they lack."""
        if self.source is None or self.val is None:
            raise UsageError(f"--case {case} wants a data set and held-out data: SRC --val VAL")
        return self.source, self.val
