"""Options of `dlio bench prune`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from dlio.util.options import Option, check
from dlio_bench.trainings import check_plot, training_data

SAMPLES: Final = ("dlio", "dlio(0.4)", "infobatch", "ies", "ies(0.3)", "pfb")
"""Contenders of `--case samples`; without a number with the settings of their authors."""
IMAGES: Final = (
    *("target", "magnitude", "chance", "prunetrain", "torch-pruning", "group-norm", "narrow"),
)
"""Variants of `--case images`, apart from the network as it is and with apoptosis."""


@dataclass(frozen=True, slots=True)
class PruneBenchOptions:
    """Options of the command; each case uses some of them."""

    source: Annotated[str | None, Option("Training images.", positional=True, metavar="SRC")] = None
    val: Annotated[str | None, Option("Held-out images.", metavar="PATH")] = None
    ranks: Annotated[int, Option("Ranks of --case images.", short="-n", least=1)] = 2
    seeds: Annotated[int, Option("Number of seeds.", least=1)] = 3
    epochs: Annotated[
        int | None, Option("Number of epochs.", least=1, default_text="chosen by each case")
    ] = None
    shrunk_epochs: Annotated[
        int | None,
        Option(
            "Number of epochs of all trainings except the one that keeps all neurons and samples.",
            least=1,
            default_text="more than --epochs, in part of the time that they save",
        ),
    ] = None
    width: Annotated[
        int | None,
        Option(
            "Width of networks before they are pruned.",
            least=2,
            default_text="chosen by each case",
        ),
    ] = None
    tolerance: Annotated[
        float,
        Option("Held-out accuracy that pruning may cost.", unit="percentage points", least=0),
    ] = 0.5
    image_size: Annotated[int, Option("Side of the images.", unit="pixels", least=32)] = 64
    rows: Annotated[
        int | None,
        Option(
            "Rows of the table that perceptrons learn from.",
            least=1000,
            default_text="chosen by each case",
        ),
    ] = None
    lr: Annotated[float, Option("First learning rate of Adam, for perceptrons.", above=0)] = 1e-3
    variant: Annotated[
        tuple[str, ...],
        Option(
            "Variant of --case samples or images to measure, apart from those that the others are "
            "compared with. Repeatable.",
            choices=(*SAMPLES, *IMAGES),
            default_text="all",
        ),
    ] = ()
    keep: Annotated[
        str | None,
        Option(
            "Keep reports of trainings in this folder, so that an interrupted run continues.",
            metavar="FOLDER",
        ),
    ] = None
    plot: Annotated[
        str | None,
        Option(
            "Draw accuracy over time, and layers, into this PNG or SVG file; with several cases, "
            "each has its name before the ending.",
            metavar="FILE",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)

    def longer(self, epochs: int, times: float) -> int:
        """Return the epochs of trainings that cost less: they spend part of the time they save."""
        return self.shrunk_epochs or max(epochs, round(epochs * times))

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return the variants of a case, of which it has `names`, that are to be measured."""
        return [name for name in names if not self.variant or name in self.variant]

    def check_images(self, case: str) -> tuple[str, str]:
        """Return (training data, held-out data). Raises UsageError when one is missing."""
        return training_data(case, self.source, self.val)
