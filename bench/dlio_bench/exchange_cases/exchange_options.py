"""Options of `dlio bench exchange`."""

from dataclasses import dataclass
from typing import Annotated, Final

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.features.batch_norm.batch_norm_feature import group_size
from dlio.train.names import DEFAULT_MODEL
from dlio.util.options import Option, check
from dlio_bench.bench_ranks import FABRICS, LINK
from dlio_bench.trainings import check_plot

_PACED: Final = "dlio_bench.exchange_cases.paced_network:paced_network"

MessageTime = Annotated[
    float | None,
    Option(
        "Time of a message between nodes in the model.",
        unit="microseconds",
        above=0,
        default_text="as measured over TCP on this machine",
    ),
]
LinkBandwidth = Annotated[
    float | None,
    Option(
        "Bandwidth between nodes in the model.",
        unit="GB/s",
        above=0,
        default_text="as measured over TCP on this machine",
    ),
]


@dataclass(frozen=True, slots=True)
class ExchangeBenchOptions:
    """Options of the command; each case uses some of them."""

    source: Annotated[
        str | None,
        Option("Class folders of images to train on.", positional=True, metavar="SRC"),
    ] = None
    val: Annotated[
        str | None,
        Option("Held-out data for the cases training and placement.", metavar="PATH"),
    ] = None
    repeats: Annotated[int, Option("Timed passes of each figure.", least=1)] = 5
    exchanges: Annotated[
        tuple[str, ...],
        Option(
            "Exchange to measure instead of a case's own, as for `dlio train --exchange`. "
            "Repeatable.",
            name="exchange",
            metavar="EXCHANGE",
        ),
    ] = ()
    network: str = "resnet50"
    """Network of the cases overlap and step."""
    batch_size: Annotated[
        int,
        Option(
            "Samples of each rank in one batch, for the cases overlap and step.",
            unit="samples",
            least=2,
        ),
    ] = 16
    fabrics: Annotated[
        tuple[str, ...],
        Option(
            "Fabric that messages go through: memory, tcp, or link, which is TCP at 1 Gbit/s in "
            "each direction and needs root. Repeatable.",
            name="fabric",
            choices=(*FABRICS, LINK),
            default_text="all that this machine has",
        ),
    ] = ()
    plot: Annotated[
        str | None,
        Option(
            "Draw the model of messages for up to 10,000 ranks into this PNG or SVG file.",
            metavar="FILE",
        ),
    ] = None
    alpha_us: MessageTime = None
    bandwidth_gbs: LinkBandwidth = None
    ranks: Annotated[int, Option("Ranks of the case training.", short="-n", least=2)] = 2
    counts: tuple[int, ...] = (2, 4, 8, 16)
    """Numbers of ranks whose messages are counted."""
    seeds: Annotated[
        int, Option("Seeds of the cases training, placement and unequal.", least=1)
    ] = 5
    epochs: Annotated[int, Option("Epochs of the cases training and placement.", least=1)] = 3
    keep: Annotated[
        str | None,
        Option(
            "Keep reports of the cases training and placement in this folder, so that an "
            "interrupted run continues.",
            metavar="FOLDER",
        ),
    ] = None
    settings: Annotated[
        tuple[str, ...],
        Option(
            "Option of `dlio train` for the case training, such as image-size=32 or balance=true. "
            "Repeatable.",
            name="set",
            metavar="OPTION=VALUE",
        ),
    ] = ()
    pace: Annotated[
        float | None,
        Option(
            "Have each rank of the case training sleep for each sample, in place of an "
            "accelerator that computes.",
            unit="milliseconds",
            above=0,
            default_text="no sleep",
        ),
    ] = None
    slow: Annotated[
        float | None,
        Option(
            "How many times as long the last rank of the case training sleeps.",
            least=1,
            default_text="as long as the others",
            needs="pace",
        ),
    ] = None
    seconds: float = 5.0
    """Seconds of a pass of the case slow-rank."""
    images: int = 960
    """Images that the cases balance and unequal train on."""
    batch_norms: Annotated[
        tuple[str, ...],
        Option(
            "Batch normalisation of the case placement, as for `dlio train --batch-norm`. "
            "Repeatable.",
            name="batch-norm",
            metavar="MODE",
            default_text="average, sync and ghost(16)",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)
        for each in self.exchanges:
            parse_exchange(each)
        for mode in self.batch_norms:
            group_size(mode)
        self.train_options()

    def train_options(self) -> dict[str, object]:
        """Return options of `dlio train` for the case training, by their names in its report.

        Raises UsageError for what is not OPTION=VALUE.
        """
        options: dict[str, object] = {}
        for each in self.settings:
            name, equals, value = each.partition("=")
            if not (name and equals and value):
                raise UsageError(f"--set {each}: give OPTION=VALUE, such as image-size=32")
            options[name.removeprefix("--").replace("-", "_")] = _parsed(value)
        if self.pace is not None:
            model = str(options.get("model", DEFAULT_MODEL))
            options["model"] = (
                f"{_PACED}(model={model!r}, sample_ms={self.pace!r}, slow={self.slow or 1.0!r})"
            )
        return options


def _parsed(text: str) -> object:
    """Return an option's value as its report has it."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
