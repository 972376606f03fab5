"""`dlio launch`: start the ranks of any command, here, in an allocation, or by a job of Slurm's."""

import glob
import os
import shlex
import shutil
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import RankOptions
from dlio.cli.train_command import find_parts
from dlio.comm.allocation import Allocation, find_allocation
from dlio.comm.launch_detection import check_launch, under_torchrun
from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.data.splits import split_words
from dlio.errors import UsageError
from dlio.launch import mpi_launch, spread, torch_launch
from dlio.launch.command_ranks import has_mpi
from dlio.launch.rank_log import LOGS, logged
from dlio.launch.slurm_follow import follow
from dlio.launch.slurm_script import JobScript, parse_slurm, submit
from dlio.launch.slurm_tasks import become_rank, is_task
from dlio.util.arguments import nearest
from dlio.util.child_processes import module_command
from dlio.util.options import Option, as_mapping, check
from dlio.util.printable import print_line
from dlio.util.settings import settings
from dlio.util.signals import passing_on, passing_on_warnings
from dlio.util.units import counted

_SHOWN_HOSTS: Final = 4


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
        int | None, Option("Ranks on each node of an allocation.", least=1)
    ] = None
    backend: Annotated[
        Literal["auto", "mpi", "torch"],
        Option(
            "Library by which the ranks communicate. mpi: MPI, under mpirun. torch: "
            "torch.distributed, without MPI. auto: MPI if it is installed."
        ),
    ] = "auto"
    logs: Annotated[
        str | None,
        Option(
            "Folder for a copy of each rank's output: rank-0.log, rank-1.log, ...",
            metavar="FOLDER",
        ),
    ] = None
    slurm: Annotated[
        tuple[str, ...],
        Option(
            "Submit a job to Slurm: nodes=4,ranks-per-node=8,time=2h,account=...,partition=...; "
            "sbatch=--key=value passes any other option of sbatch.",
            metavar="KEY=VALUE,...",
        ),
    ] = ()
    print_script: Annotated[
        bool,
        Option("Print the job script of --slurm, and submit nothing.", name="print", needs="slurm"),
    ] = False
    follow: Annotated[
        bool,
        Option(
            "Print the output of the job of --slurm until it ends, and end as it does. Ctrl-C ends "
            "the printing, not the job.",
            needs="slurm",
        ),
    ] = False
    script: Annotated[
        str | None,
        Option(
            "File for the job script of --slurm.",
            metavar="FILE",
            default_text="NAME.sbatch here",
            needs="slurm",
        ),
    ] = None
    setup: Annotated[
        tuple[str, ...],
        Option(
            "Line of shell at the begin of the job script, such as 'module load cuda'; repeatable.",
            metavar="LINE",
            default_text="the PATH of this Python",
            needs="slurm",
        ),
    ] = ()
    stage: Annotated[
        bool,
        Option(
            "Have the job of --slurm stage the command's data to the disks of its --tiers before "
            "the ranks start, and evict them at the end.",
            needs="slurm",
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
    from dlio.cli.app import find_command, parse, places

    if not program.command:
        if not program.arguments:
            raise UsageError("COMMAND is missing: `dlio launch -n 2 train DATA`, or `-- PROGRAM`")
        return CheckedCommand(program.arguments, is_dlio=False)
    words = (program.command, *program.arguments)
    if program.command in ("launch", "join", "leave", "demo"):
        raise UsageError(f"{program.command} is not a command of many ranks: start it by itself")
    if program.command not in places():
        raise UsageError(
            f"{program.command}: no such command of dlio{nearest(program.command, places())}; any "
            f"other program comes after --, as in `dlio launch -- {' '.join(words[:2])}`"
        )
    own = find_command(words)
    records: dict[str, object] | None = {}
    named = 1
    if own is not None:
        named = len(own.name.split())
        records = parse(own, words[named:])
    if records is None:
        return None
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


@with_help(
    "dlio launch -n 4 train /data/train --epochs 10",
    "dlio launch -- python my.py",
    "dlio launch --slurm nodes=4,time=2h train /data --checkpoint ckpt",
    "dlio launch --slurm nodes=2 --stage --print train /data --tiers '$TMPDIR:9TB'",
    groups={
        "Ranks": ("ranks", "ranks_per_node", "backend", "logs"),
        "Slurm": ("slurm", "print_script", "follow", "script", "setup", "stage"),
    },
    usual=(
        *("command", "ranks", "ranks_per_node", "logs", "slurm", "print_script", "follow", "setup"),
        ("stage", "Stage the data to the nodes' disks before the ranks start"),
    ),
)
def command(program: Program, options: LaunchOptions) -> None:
    """Start a command in many ranks: here, on a job's nodes, or as a job.

    COMMAND is a command of dlio with its options (train, run, eval, stage, pack, bench ...), or,
    after --, any program. In a job of Slurm, PBS or LSF the ranks run on its nodes, as many as
    it has tasks. With --slurm, a job script is written and submitted: it stages (--stage), trains,
    goes on from its checkpoint after a preemption or at its time limit, and evicts at its end.
    """
    started = read_program(program)
    if started is None:
        return
    if options.logs and os.path.lexists(options.logs) and not os.path.isdir(options.logs):
        raise UsageError(f"--logs {options.logs}: this is not a folder; name another place")
    if options.slurm:
        _submit(started, options)
        return
    if options.logs is not None:
        os.environ[LOGS] = os.path.abspath(options.logs)  # Ranks inherit it.
    if is_task():
        become_rank(logged(started.argv), options.ranks, options.backend)
    if under_mpi() or under_torch() or under_torchrun():
        raise UsageError(
            "another launcher has started this process as a rank: leave out either "
            f"`dlio launch`, or mpirun or torchrun: `dlio launch -n 4 {_shown(started)}`"
        )
    check_launch(1)
    allocation = find_allocation()
    if allocation is None:
        if options.ranks_per_node is not None:
            raise UsageError(
                f"--ranks-per-node {options.ranks_per_node}: this is not a job of Slurm, PBS or "
                "LSF: give -n, or --slurm to submit one"
            )
        code = _run_here(started, options)
    else:
        code = _run_in_job(started, options, allocation)
    if code:
        raise SystemExit(code)


def _run_here(started: CheckedCommand, options: LaunchOptions) -> int:
    """Start ranks on this machine; return their exit code."""
    ranks = options.ranks or max(1, len(glob.glob("/dev/nvidia[0-9]*")))
    by_mpi = _uses_mpi(options.backend)
    if any(isinstance(each, RankOptions) for each in started.records.values()):  # It has -n itself.
        from dlio.cli.command_line import run_command

        words, named = list(started.words), started.named
        own = ["-n", str(ranks), "--backend", options.backend]
        run_command([*words[:named], *own, *words[named:]])
        return 0
    if shutil.which(started.argv[0]) is None:
        raise UsageError(f"{started.argv[0]}: no such program on this machine: check the name")
    _say(
        f"{counted(ranks, 'rank')} on this machine, by "
        f"{'mpirun' if by_mpi else 'torch.distributed'}"
    )
    with _warnings(started):
        starter = mpi_launch.launch if by_mpi else torch_launch.launch
        return starter(started.argv, ranks).returncode


def _run_in_job(started: CheckedCommand, options: LaunchOptions, allocation: Allocation) -> int:
    """Start ranks on the nodes of an allocation; return their exit code."""
    counts = allocation.counts(options.ranks, options.ranks_per_node)
    if started.option("fault_tolerance") not in (None, "off"):
        nodes = ",".join(counts)
        raise UsageError(
            "--fault-tolerance needs ranks that dlio itself starts on each node: in this job "
            f"`dlio train -n {sum(counts.values())} --nodes {nodes} ...`, which needs ssh between "
            "nodes"
        )
    by_mpi = _uses_mpi(options.backend)
    how = "mpirun" if by_mpi else "srun" if allocation.manager == "Slurm" else "a remote shell"
    shown = ", ".join(f"{host} {count}" for host, count in list(counts.items())[:_SHOWN_HOSTS])
    more = ", ..." if len(counts) > _SHOWN_HOSTS else ""
    _say(
        f"{counted(sum(counts.values()), 'rank')} on {counted(len(counts), 'node')} of "
        f"{allocation.manager}'s job "
        f"{allocation.job} ({shown}{more}), by {how}"
    )
    with _warnings(started):
        if by_mpi:
            return spread.run_under_mpirun(started.argv, counts)
        if allocation.manager == "Slurm":
            words = started.words if started.is_dlio else ("--", *started.words)
            return spread.run_under_srun(words, counts)
        return spread.run_by_remote_shell(started.argv, counts)


def _warnings(started: CheckedCommand) -> AbstractContextManager[None]:
    """Pass SIGUSR1 on to the ranks, and SIGTERM, too, if they then write a checkpoint."""
    saves = started.option("checkpoint") is not None
    return passing_on(enabled=True) if saves else passing_on_warnings()


def _uses_mpi(backend: str) -> bool:
    if backend == "mpi":
        mpi_launch.find_mpirun()
        return True
    return backend == "auto" and has_mpi()


def _submit(started: CheckedCommand, options: LaunchOptions) -> None:
    """Write the job script and submit it, or print it."""
    if "SLURM_JOB_ID" in os.environ and not options.print_script:
        raise UsageError(
            f"--slurm within job {os.environ['SLURM_JOB_ID']}: leave it out to start the ranks in "
            "this job, or submit from a login node"
        )
    script = job_script(started, options)
    if options.print_script:
        sys.stdout.write(script.text())
        return
    path = options.script or f"{script.name}.sbatch"
    script.write(path)
    job = submit(path)
    print_line(f"job {job} is submitted: {path}; `squeue -j {job}` shows it")
    if options.follow and (code := follow(job, script.output(job))):
        raise SystemExit(code)


def job_script(started: CheckedCommand, options: LaunchOptions) -> JobScript:
    """Return the job script of a command. Raises UsageError for options that do not fit."""
    slurm = parse_slurm(options.slurm)
    backend = () if options.backend == "auto" else ("--backend", options.backend)
    logs = () if options.logs is None else ("--logs", options.logs)
    words = started.words if started.is_dlio else ("--", *started.words)
    checkpoint = started.option("checkpoint")
    resumes = checkpoint is not None
    if resumes and started.option("resume") is False:
        words = (*words[: started.named], "--resume", *words[started.named :])
    if not resumes and started.is_dlio and started.words[0] == "train":
        _say("without --checkpoint the job does not go on after a preemption or its time limit")
    path = os.path.dirname(os.path.abspath(sys.executable))
    setup = options.setup or (f"export PATH={shlex.quote(path)}:$PATH",)
    script = JobScript(
        slurm,
        ("dlio", "launch", *backend, *logs, *words),
        setup=setup,
        # A program of another kind says by code 75 that it goes on when it is started again.
        resumes=resumes or not started.is_dlio or started.words[0] in ("pack", "stage"),
        checkpoint=checkpoint if isinstance(checkpoint, str) else None,
    )
    return _with_staging(script, started, backend) if options.stage else script


def _with_staging(
    script: JobScript, started: CheckedCommand, backend: tuple[str, ...]
) -> JobScript:
    """Return a job script that also stages the command's data and evicts them."""
    from dlio.storage.tier_spec import parse_tiers

    tiers = started.option("tiers") or settings().tiers
    source, val = started.option("source"), started.option("val")
    split, val_split = started.option("split"), started.option("val_split")
    others = started.option("reader_option")
    if isinstance(source, str) and started.words[0] == "train":
        if split is None and val_split is None:
            source, val = find_parts(source, val if isinstance(val, str) else None, quiet=True)
        elif val is None and val_split is not None:
            val = source
    sources = [(str(p), s) for p, s in ((source, split), (val, val_split)) if p is not None]
    if not sources or not isinstance(tiers, str):
        raise UsageError(
            f"--stage: {_shown(started)} names no data and --tiers: give, for example, --tiers "
            "'$TMPDIR:200GiB' (in quotes: the job's own folder is meant)"
        )
    if not any(spec.kind == "disk" for spec in parse_tiers(tiers)):
        raise UsageError(
            f"--stage: --tiers {tiers} has no disk: name one, such as --tiers '$TMPDIR:200GiB'"
        )
    once = ("dlio", "launch", *backend, "--ranks-per-node", "1", "stage")
    stage = tuple(
        (*once, each, *split_words(part, others), "--tiers", tiers, "--allow-partial")
        for each, part in sources
    )
    return replace(
        script, stage=stage, evict=("dlio", "evict", "--job", "$SLURM_JOB_ID", "--tiers", tiers)
    )


def _shown(started: CheckedCommand) -> str:
    return shlex.join(started.words[: started.named])


def _say(line: str) -> None:
    print_line(f"dlio: {line}", sys.stderr)
