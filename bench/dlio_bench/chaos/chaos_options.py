"""Options of `dlio bench chaos`."""

from dataclasses import dataclass
from typing import Annotated

from dlio.errors import UsageError
from dlio.exchange.exchange_spec import parse_exchange
from dlio.util.arguments import unknown_word
from dlio.util.options import Option, check
from dlio_bench.chaos.scheduled_faults import KINDS, NODE_KINDS


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of the command; the cases overhead and schedules use some of them."""

    source: Annotated[
        str | None,
        Option(
            "Training data, as for `dlio train`.",
            positional=True,
            metavar="SRC",
            default_text="480 small pictures that are drawn",
        ),
    ] = None
    ranks: Annotated[int, Option("Ranks of each job.", short="-n", least=2, most=6)] = 4
    spares: Annotated[
        int,
        Option(
            "Spares of each job, as for `dlio train --spares`: they replace the ranks that are "
            "lost.",
            least=0,
            most=64,
        ),
    ] = 0
    refill: Annotated[
        bool,
        Option(
            "Whenever too few ranks are left, have all of them begin again: Open MPI's daemon of a "
            "pretended node is killed. Ranks begin without importing torch, so that many faults "
            "take little time. Wants root and an even number of ranks."
        ),
    ] = False
    backend: Annotated[
        str,
        Option(
            "How ranks communicate, as for `dlio train --backend`.",
            choices=("auto", "mpi", "torch"),
        ),
    ] = "auto"
    kills: Annotated[int, Option("Number of faults to make.", least=1)] = 10
    every: Annotated[
        float,
        Option(
            "Mean time between two faults, while steps are made.", unit="seconds", above=0, most=1e6
        ),
    ] = 5.0
    spacing: Annotated[
        str,
        Option(
            "Times between faults: exponential, or uniform between half of --every and one and a "
            "half.",
            choices=("exponential", "uniform"),
        ),
    ] = "exponential"
    faults: Annotated[
        str,
        Option(
            "Kinds of faults, separated by commas. kill: SIGKILL. stop: SIGSTOP. segv: a crash. "
            "exit: the process ends with code 0. raise: an exception of Python. twice: two ranks "
            "are killed within 80 ms, so that the second is often lost while the others regroup. "
            "first: the first rank is killed. hang: a rank computes for ever. leave: SIGTERM, on "
            "which a rank leaves after its batch.",
            metavar="KINDS",
        ),
    ] = "kill"
    nodes: Annotated[
        int, Option("Pretended nodes of each job of the case nodes.", least=2, most=6)
    ] = 3
    node_faults: Annotated[
        str,
        Option(
            "Kinds of faults of the case nodes, separated by commas. node: all processes of a node "
            "are killed, and its memory is gone. cut: nothing passes between a node's agent and "
            "the launcher. After each, the node joins again.",
            metavar="KINDS",
        ),
    ] = "node"
    seed: Annotated[int, Option("Seed of the faults and of the training.", least=0)] = 0
    epochs: Annotated[int, Option("Epochs of each job.", least=1)] = 30
    exchange: Annotated[
        str, Option("Exchange, as for `dlio train --exchange`.", metavar="EXCHANGE")
    ] = "allreduce"
    batch_size: Annotated[
        int, Option("Samples of each rank in one batch.", unit="samples", least=1)
    ] = 4
    model: Annotated[
        str,
        Option("Model of the cases storm and nodes, as for `dlio train --model`.", metavar="MODEL"),
    ] = "resnet(width=4)"
    pause_ms: Annotated[
        float,
        Option(
            "Time that each rank sleeps in a step, in the place of a GPU's computing.",
            unit="milliseconds",
            least=0,
            most=60_000,
        ),
    ] = 0.0
    restart: Annotated[
        bool,
        Option(
            "Make the same faults in a job without fault tolerance, too, which is started again "
            "from its newest checkpoint whenever it ends."
        ),
    ] = False
    torchft: Annotated[
        str | None,
        Option(
            "Python interpreter of an environment with torchft and torch; the same faults are made "
            "in a job of torchft, too, whose replica groups are started again at once.",
            metavar="PYTHON",
        ),
    ] = None
    torchft_heartbeat_ms: Annotated[
        int,
        Option(
            "Time without a heartbeat after which torchft takes a replica group as lost.",
            unit="milliseconds",
            least=200,
            most=600_000,
        ),
    ] = 5000
    replay: Annotated[
        bool,
        Option(
            "Replay each job's trace without faults, and compare the final weights bit by bit; "
            "not for gossip and asgd."
        ),
    ] = False
    checkpoint_every: Annotated[
        int,
        Option("Steps between two checkpoints of the job with --restart.", unit="steps", least=1),
    ] = 20
    deadline: Annotated[
        float,
        Option(
            "Time without a finished step after which a job has hung.",
            unit="seconds",
            least=5,
            most=86400,
        ),
    ] = 120.0
    repeats: Annotated[
        int, Option("Pairs of runs of each model in the case overhead.", least=1)
    ] = 10
    schedules: Annotated[int, Option("Schedules of losses in the case schedules.", least=1)] = 1000
    first_schedule: Annotated[
        int,
        Option("Number of the first of these; each follows from --seed and its number.", least=0),
    ] = 0
    megabytes: Annotated[
        tuple[int, ...],
        Option(
            "Size of a model of the case overhead. Repeatable.",
            unit="MB",
            least=15,
            most=4000,
            default_text="25 and 100",
        ),
    ] = ()
    steps: Annotated[int, Option("Steps of the case suspicions.", least=1)] = 10_000
    pauses: Annotated[
        int, Option("Pauses of a rank in the case suspicions, each at a random step.", least=0)
    ] = 20
    pause_s: Annotated[
        float, Option("Length of these pauses.", unit="seconds", least=0, most=3600)
    ] = 6.0
    spinning: Annotated[
        int, Option("Processes that spin next to the job of the case suspicions.", least=0, most=64)
    ] = 4
    keep: Annotated[
        str | None,
        Option(
            "Keep the jobs' outputs, traces and reports in this folder, which must be empty.",
            metavar="FOLDER",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises UsageError for options that do not go together."""
        check(self)
        if parse_exchange(self.exchange).ranks_differ and self.replay:
            raise UsageError(
                f"--exchange {self.exchange} does not go with --replay: its weights depend on when "
                "messages arrive"
            )
        if self.spares and self.replay:
            raise UsageError(
                "--spares does not go with --replay: a job that ranks joined cannot be replayed"
            )
        others = self.spares or self.replay or self.backend == "torch"
        if self.refill and (others or self.ranks % 2):
            raise UsageError(
                "--refill goes with an even number of ranks, and neither with --spares, --replay "
                "nor --backend torch"
            )
        if self.spares and self.backend == "torch":
            raise UsageError("--spares does not go with --backend torch")
        for kind in self.node_kinds:
            if kind not in NODE_KINDS:
                raise unknown_word("--node-faults", kind, NODE_KINDS)
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown_word("--faults", kind, KINDS)
        if self.ranks < 3 and "twice" in self.kinds:
            raise UsageError("--faults twice: two of -n 2 ranks would leave none; give -n 3")

    @property
    def node_kinds(self) -> tuple[str, ...]:
        """Kinds of faults of the case nodes."""
        return tuple(each.strip() for each in self.node_faults.split(","))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of faults to make."""
        return tuple(each.strip() for each in self.faults.split(","))
