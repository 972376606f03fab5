"""Options of `dlio bench train`."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import NAMES, parse_exchange
from dlio.plan.exchange_cost import FORMULAE
from dlio.util.arguments import nearest
from dlio.util.options import Option, check
from dlio_bench.exchange_cases.exchange_options import LinkBandwidth, MessageTime
from dlio_bench.file_systems import check_scratch

# Names of networks, for options, which must not import torch

NETWORK_NAMES: Final = ("lenet", "alexnet", "googlenet", "resnet50", "vit", "lstm", "unet3d")
"""The keys of `bench_networks.NETWORKS`."""
CASES: Final[dict[str, str]] = {
    "scaling": "dlio_bench.training.scaling_case:measure",
    "checkpoint": "dlio_bench.training.checkpoint_case:measure",
    "ettr": "dlio_bench.training.ettr:measure",
    "script": "dlio_bench.training.script_case:measure",
}
"""Functions by case: (Options, Results to add to)."""
_LARGEST: Final = 1 << 20


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@dataclass(frozen=True, slots=True)
class TrainingBenchOptions:
    """Options of the command."""

    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure. scaling: steps on more and more ranks. checkpoint: the stall of "
            "checkpoints. ettr: the share of time that counts while ranks are killed. script: what "
            "`dlio run` adds to a script's steps. Repeatable.",
            choices=tuple(CASES),
        ),
    ] = ("scaling",)
    data: Annotated[
        str | None,
        Option(
            "Pictures to train on, read by dlio's loader.",
            metavar="SRC",
            default_text="random samples in memory",
        ),
    ] = None
    networks: Annotated[
        str,
        Option(f"Networks, separated by commas: of {', '.join(NETWORK_NAMES)}.", metavar="NAMES"),
    ] = "lenet"
    exchanges: Annotated[
        str,
        Option(
            "Exchanges, separated by commas, as for `dlio train --exchange`.", metavar="EXCHANGES"
        ),
    ] = ",".join(NAMES)
    ranks: Annotated[
        str, Option("Numbers of ranks to measure, separated by commas.", metavar="COUNTS")
    ] = "1,2,4"
    forecast: Annotated[
        str,
        Option(
            "Numbers of ranks to forecast: FIRST..LAST in powers of two, numbers separated by "
            "commas, or none.",
            metavar="COUNTS",
        ),
    ] = "8..1024"
    scaling: Annotated[
        Literal["strong", "weak", "both"],
        Option(
            "strong: the batch of all ranks together stays the same. weak: that of each rank does."
        ),
    ] = "both"
    steps: Annotated[
        int,
        Option(
            "Timed steps of each pass at least; more if they take under half a second, and whole "
            "periods.",
            least=2,
        ),
    ] = 8
    batch_size: Annotated[
        int | None,
        Option(
            "Samples of a rank in one batch; with strong scaling, of all ranks together.",
            unit="samples",
            least=1,
            default_text="each network's own",
        ),
    ] = None
    image_size: Annotated[
        int | None,
        Option(
            "Side of images and volumes.",
            unit="pixels",
            least=16,
            most=1024,
            default_text="each network's own",
        ),
    ] = None
    repeats: Annotated[int, Option("Rounds; each measures all numbers of ranks.", least=1)] = 3
    per_node: Annotated[
        int, Option("Ranks of a node in the forecast; each has a core of its own.", least=1)
    ] = 8
    alpha_us: MessageTime = None
    bandwidth_gbs: LinkBandwidth = None
    checkpoints: Annotated[
        str | None,
        Option(
            "Folder for the checkpoints of the case checkpoint, on the storage to measure.",
            metavar="PATH",
            default_text="the folder for temporary files",
        ),
    ] = None
    kills: Annotated[int, Option("Ranks to kill in the case ettr.", least=1)] = 5
    every: Annotated[
        float,
        Option("Mean time between two kills in the case ettr.", unit="seconds", above=0, most=1e6),
    ] = 5.0
    seed: Annotated[int, Option("Seed of weights, samples and kills.", least=0)] = 0

    def __post_init__(self) -> None:
        """Raises UsageError for unknown names and numbers that do not suit."""
        check(self)
        if self.checkpoints is not None:
            check_scratch(self.checkpoints)
        for name in self.network_names:
            if name not in NETWORK_NAMES:
                raise UsageError(
                    f"--networks {name}: choose of {', '.join(NETWORK_NAMES)}, separated by commas"
                    f"{nearest(name, NETWORK_NAMES)}"
                )
        for name in self.exchange_names:
            if parse_exchange(name).preset not in FORMULAE:
                raise UsageError(f"--exchanges {name}: the model of messages lacks it")
        if not self.network_names or not self.exchange_names:
            raise UsageError("--networks and --exchanges: name at least one each")
        counts, ahead = self.rank_counts, self.forecast_counts
        if counts[:2] != (1, 2):
            raise UsageError(
                f"--ranks {self.ranks}: begin with 1,2: all else is compared with one rank, and "
                "forecast from two"
            )
        if ahead and min(ahead) < 2:
            raise UsageError(f"--forecast {self.forecast}: give numbers from 2 on")

    @property
    def network_names(self) -> tuple[str, ...]:
        """Names of networks."""
        return _words(self.networks)

    @property
    def exchange_names(self) -> tuple[str, ...]:
        """Names of exchanges."""
        return _words(self.exchanges)

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """Numbers of ranks to measure, ascending."""
        return tuple(sorted({_count("--ranks", word, 64) for word in _words(self.ranks)}))

    @property
    def forecast_counts(self) -> tuple[int, ...]:
        """Numbers of ranks to forecast, ascending."""
        if self.forecast == "none":
            return ()
        first, dots, last = self.forecast.partition("..")
        if not dots:
            return tuple(sorted({_count("--forecast", w, _LARGEST) for w in _words(first)}))
        p, end = _count("--forecast", first, _LARGEST), _count("--forecast", last, _LARGEST)
        if end < p:
            raise UsageError(f"--forecast {self.forecast}: give the lower number first")
        return tuple(p << doublings for doublings in range(max(0, end // p).bit_length()))

    @property
    def scalings(self) -> tuple[str, ...]:
        """`strong`, `weak`, or both."""
        return ("strong", "weak") if self.scaling == "both" else (self.scaling,)


def _count(option: str, word: str, most: int) -> int:
    if not word.strip().isdecimal() or not 1 <= int(word) <= most:
        raise UsageError(f"{option} {word}: give whole numbers from 1 to {most:,}")
    return int(word)
