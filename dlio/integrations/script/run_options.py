"""Options of `dlio run`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.util.options import Option, check


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a script is run on many ranks."""

    exchange: Annotated[
        str,
        Option(
            "How ranks keep one model, as for `dlio train --exchange`.",
            metavar="EXCHANGE",
        ),
    ] = "allreduce"
    batch: Annotated[
        Literal["global", "per-rank"],
        Option(
            "global: divide each batch of the script among the ranks, so that its learning rate "
            "stays right. per-rank: give each rank a batch of its own, so that an epoch has fewer "
            "steps."
        ),
    ] = "global"
    tiers: Annotated[
        str | None,
        Option(
            "Tiers of each node for data that dlio can read, such as "
            "ram:2GiB,/local/scratch:20GiB.",
            metavar="TIERS",
            default_text="DLIO_TIERS, or RAM",
        ),
    ] = None
    seed: Annotated[int, Option("Seed for scripts that set none themselves.", least=0)] = 0
    pretend_nodes: Annotated[
        int | None,
        Option("Number of nodes to pretend: the ranks are divided into this many groups.", least=1),
    ] = None
    fault_tolerance: Annotated[
        Literal["off", "shrink"],
        Option(
            "shrink: when ranks are lost, the others go on without them, in the same step; each "
            "sample of a pass is still trained on exactly once. off: the run ends.",
        ),
    ] = "off"
    min_ranks: Annotated[
        int, Option("Fewest ranks that go on with --fault-tolerance shrink.", least=1)
    ] = 1
    balance: Annotated[
        bool,
        Option("Give ranks that compute faster more of each batch, from the second pass on."),
    ] = False

    def __post_init__(self) -> None:
        check(self)
        spec = parse_exchange(self.exchange)
        if self.min_ranks > 1 and self.fault_tolerance == "off":
            raise UsageError("--min-ranks needs --fault-tolerance shrink, too")
        if self.fault_tolerance != "off" and spec.ranks_differ:
            raise UsageError(
                f"--exchange {self.exchange} does not go with --fault-tolerance shrink in `dlio "
                "run`: choose one that sums over all ranks, such as allreduce or local-sgd(8)"
            )


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The part of a script that `--check` runs."""

    steps: Annotated[int, Option("Optimizer steps.", hidden=True)]
    script: Annotated[str, Option("Path of the script.", hidden=True)]
    arguments: Annotated[tuple[str, ...], Option("Arguments of the script.", hidden=True)] = ()
    home: Annotated[str, Option("Working folder of the user.", hidden=True)] = ""
    root: Annotated[str, Option("Folder that stands for / in this run.", hidden=True)] = ""
    records: Annotated[str, Option("Folder for the records.", hidden=True)] = ""
