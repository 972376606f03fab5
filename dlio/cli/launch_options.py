"""Options of `dlio launch`, and the command that it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from dlio.cli.option_records import RankOptions
from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.child_processes import module_command
from dlio.util.options import Option, as_mapping, check


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Number of ranks, and where they are started."""

    ranks: Annotated[
        int | None,
        Option(
            "Number of all ranks.",
            short="-n",
            least=1,
            default_text="those of the allocation; on one machine one for each GPU, or one",
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None, Option("RankOptions on each node of an allocation.", least=1)
    ] = None
    backend: Annotated[
        Literal["auto", "mpi", "torch"],
        Option(
            "Library by which the ranks communicate. mpi: MPI, under mpirun. torch: "
            "torch.distributed, without MPI. auto: MPI if it is installed."
        ),
    ] = "auto"
    slurm: Annotated[
        tuple[str, ...],
        Option(
            "Submit a job to Slurm: nodes=4,ranks-per-node=8,time=2h,account=...,partition=...; "
            "sbatch=--key=value passes any other option of sbatch.",
            metavar="KEY=VALUE,...",
        ),
    ] = ()
    print_script: Annotated[
        bool, Option("Print the job script of --slurm, and submit nothing.", name="print")
    ] = False
    script: Annotated[
        str | None,
        Option(
            "File for the job script of --slurm.", metavar="FILE", default_text="NAME.sbatch here"
        ),
    ] = None
    setup: Annotated[
        tuple[str, ...],
        Option(
            "Line of shell at the begin of the job script, such as 'module load cuda'; repeatable.",
            metavar="LINE",
            default_text="the PATH of this Python",
        ),
    ] = ()
    stage: Annotated[
        bool,
        Option(
            "Have the job of --slurm stage the command's data to the disks of its --tiers before "
            "the ranks start, and evict them at the end."
        ),
    ] = False

    def __post_init__(self) -> None:
        check(self)
        if self.slurm:
            for name, value in (("-n", self.ranks), ("--ranks-per-node", self.ranks_per_node)):
                if value is not None:
                    raise UsageError(
                        f"{name} {value} does not go with --slurm: write --slurm "
                        "nodes=...,ranks-per-node=..."
                    )
            return
        only = {
            "--print": self.print_script,
            "--script": self.script,
            "--setup": self.setup,
            "--stage": self.stage,
        }
        for name, given in only.items():
            if given:
                raise UsageError(f"{name} needs --slurm: it is for the job script")


@dataclass(frozen=True, slots=True)
class Program:
    """The command to start, with its arguments."""

    command: Annotated[
        str,
        Option(
            "A command of dlio with its options, or, after --, any program.",
            positional=True,
            metavar="COMMAND",
        ),
    ] = ""
    arguments: Annotated[
        tuple[str, ...], Option("Arguments of the command.", rest=True, metavar="ARGS")
    ] = ()


@dataclass(frozen=True, slots=True)
class CheckedCommand:
    """A command whose options have been checked."""

    words: tuple[str, ...]
    """The command as the user gave it, without `dlio`."""
    is_dlio: bool
    """False for a program of another kind."""
    records: dict[str, object] = field(default_factory=dict)
    """Records of options of a command of dlio; empty for programs and plug-ins of typer's."""
    named: int = 1
    """Number of words that name the command: two for `bench train`."""

    @property
    def argv(self) -> list[str]:
        """Program and arguments of each rank."""
        return module_command("dlio.cli", *self.words) if self.is_dlio else list(self.words)

    @property
    def takes_ranks(self) -> bool:
        """True if the command has -n itself."""
        return any(isinstance(each, RankOptions) for each in self.records.values())

    def option(self, name: str) -> object:
        """Return the value of an option of the command, None if it has none of that name."""
        # By mapping and not by attribute: options of `dlio train` stand in records within a record.
        mappings = (as_mapping(record) for record in self.records.values())
        return next((options[name] for options in mappings if name in options), None)


def read_program(program: Program) -> CheckedCommand | None:
    """Check the command and its options without running it.

    Returns None if it only printed its help.

    Raises UsageError for an unknown command, a wrong option, or ranks that are given twice.
    """
    if not program.command:
        if not program.arguments:
            raise UsageError("COMMAND is missing: `dlio launch -n 2 train DATA`, or `-- PROGRAM`")
        return CheckedCommand(program.arguments, is_dlio=False)
    words = (program.command, *program.arguments)
    if program.command in ("launch", "join", "leave", "demo"):
        raise UsageError(f"{program.command} is not a command of many ranks: start it by itself")
    read = _records(words)
    if read is None:
        return None
    records, named = read
    started = CheckedCommand(words, True, records, named)
    for each in records.values():
        if isinstance(each, RankOptions) and each.ranks is not None:
            raise UsageError(
                f"-n {each.ranks} of {program.command}: give -n to `dlio launch` alone"
            )
    if started.option("nodes") is not None and program.command == "train":
        raise UsageError(
            "--nodes starts ranks itself: leave `launch` out, as in `dlio train -n 4 --nodes a,b`"
        )
    return started


def _records(words: Sequence[str]) -> tuple[dict[str, object], int] | None:
    """Return the records of options of a command line, and the number of words of its name."""
    from dlio.cli.app import find_command, parse, places

    name = words[0]
    if name not in places():
        raise UsageError(
            f"{name}: no such command of dlio{nearest(name, places())}; any other program comes "
            f"after --, as in `dlio launch -- {' '.join(words[:2])}`"
        )
    command = find_command(words)
    if command is None:
        return {}, 1
    named = len(command.name.split())
    records = parse(command, words[named:])
    return None if records is None else (records, named)
