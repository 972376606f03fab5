"""What `dlio bench exchange` is asked to do."""

import math
from dataclasses import dataclass

from dlio.errors import UsageError
from dlio_bench.ranks import FABRICS, LINK


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command; a case takes those that it knows."""

    source: str | None = None
    val: str | None = None
    repeats: int = 5
    exchanges: tuple[str, ...] = ()
    """In the place of a case's own."""
    network: str = "resnet50"
    """Of overlap and step."""
    batch_size: int = 16
    fabrics: tuple[str, ...] = ()
    """In the place of all that there are here."""
    plot: str | None = None
    alpha_us: float | None = None
    bandwidth_gbs: float | None = None
    ranks: int = 2
    counts: tuple[int, ...] = (2, 4, 8, 16)
    """Of ranks whose messages are counted."""
    seeds: int = 5
    epochs: int = 3
    keep: str | None = None
    seconds: float = 5.0
    """Of a pass of slow-rank."""
    images: int = 960
    """That balance trains on."""

    def __post_init__(self) -> None:
        for name in self.fabrics:
            if name not in (*FABRICS, LINK):
                raise UsageError(f"--fabric {name}: choose {', '.join(FABRICS)} or {LINK}")
        for option, value in (("alpha-us", self.alpha_us), ("bandwidth-gbs", self.bandwidth_gbs)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{option} {value}: give a number above 0")
        if self.plot is not None and not self.plot.endswith((".png", ".svg")):
            raise UsageError(f"--plot {self.plot}: give a name that ends in .png or .svg")
        if self.exchanges:
            from dlio.train.exchange.spec import parse_exchange  # It loads torch.

            for each in self.exchanges:
                parse_exchange(each)

    def check_training(self) -> None:
        """Raises UsageError where training lacks data."""
        if self.source is None or self.val is None:
            raise UsageError("--case training wants a data set and held-out data: SRC --val VAL")
