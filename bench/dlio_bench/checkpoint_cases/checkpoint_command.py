"""`dlio bench checkpoint`: checkpoints written, read back, and taken during training."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import torch

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import OutputOptions, RankOptions
from dlio.comm.comm_protocol import Communicator
from dlio.comm.world import world
from dlio.errors import CorruptBlock, UsageError
from dlio.launch.command_ranks import on_ranks
from dlio.util.arguments import nearest
from dlio.util.options import Option, check
from dlio.util.units import counted, format_bytes, parse_bytes
from dlio_bench.bench_data import files_below
from dlio_bench.checkpoint_cases.checkpoint_workload import (
    CheckpointWorkload,
    decoder_parameters,
    read_checkpoints,
)
from dlio_bench.checkpoint_cases.methods import (
    METHODS,
    STALLING,
    Stall,
    StallTraining,
    measure_stalls,
    random_state,
    stall_figures,
)
from dlio_bench.emulated.emulated_mount import Emulation
from dlio_bench.file_systems import check_scratch
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.repeats import ratio, turns
from dlio_bench.results.report_values import Figure, Ratio, Results
from dlio_bench.results.terminal import advance, show_figures, show_notes, working
from dlio_bench.storage_cases.page_cache import drop

_HALF, _OPTIMIZER = 2, 12
_VOCABULARY: Final = 128256


_DECODERS: Final = {
    "llama_8b": decoder_parameters(32, 4096, 14336, 32, 8, _VOCABULARY),
    "llama_70b": decoder_parameters(80, 8192, 28672, 64, 8, _VOCABULARY),
    "llama_405b": decoder_parameters(126, 16384, 53248, 128, 8, _VOCABULARY),
    "llama_1t": decoder_parameters(128, 25872, 98304, 192, 32, _VOCABULARY),
}
MODELS: Final[dict[str, int]] = {
    # float32 weights and momentum of 25.6 million parameters; He et al. (2015).
    "resnet50": 2 * 4 * 25_557_032,
    # DLIO, configs/workload/unet3d_h100.yaml: model.model_size.
    "unet3d": 499_153_191,
    **{name: (_HALF + _OPTIMIZER) * each for name, each in _DECODERS.items()},
}
"""Bytes of all ranks' checkpoint, by model."""


def checkpoint_bytes(
    model: str, ranks: int, scale: float, workload: CheckpointWorkload | None = None
) -> int:
    """Return the bytes that one rank writes: its part of a share, `scale`, of those of the model,
    or of a workload.

    Raises UsageError for an unknown model.
    """
    if workload is not None:
        return max(1, round(workload.bytes * scale / ranks))
    if model not in MODELS:
        raise UsageError(
            f"--model {model}: choose one of {', '.join(MODELS)}{nearest(model, MODELS)}"
        )
    return max(1, round(MODELS[model] * scale / ranks))


# The command


_CASES: Final = ("write", "stall")
_MIB: Final = 1 << 20
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class CheckpointCase:
    """A measurement of checkpoints; options of `dlio bench checkpoint`."""

    path: Annotated[
        str,
        Option("Folder on the storage to measure.", positional=True, metavar="PATH"),
    ]
    model: Annotated[
        str,
        Option(f"Model whose checkpoint is written: {', '.join(MODELS)}.", metavar="NAME"),
    ] = "resnet50"
    workload: Annotated[
        str,
        Option(
            "Workload whose checkpoints are written, in place of --model's: a YAML file with the "
            "keys of DLIO and MLPerf Storage, such as llama3_8b.yaml.",
            metavar="FILE",
            default_text="none",
        ),
    ] = ""
    settings: Annotated[
        tuple[str, ...],
        Option(
            "Override one of the workload's keys, such as model.num_layers=4. Repeatable.",
            name="set",
            metavar="KEY=VALUE",
            needs="workload",
        ),
    ] = ()
    scale: Annotated[
        float, Option("Share of the model's bytes that is written.", above=0, most=1)
    ] = 1.0
    size: Annotated[
        str | None,
        Option(
            "Bytes that each rank writes, such as 200MiB.",
            metavar="SIZE",
            default_text="the model's, divided among the ranks",
        ),
    ] = None
    case: Annotated[
        tuple[str, ...],
        Option(
            "write: write and read back, compared with torch.distributed.checkpoint and dd. stall: "
            "a training loop that checkpoints interrupt. Repeatable.",
            choices=_CASES,
        ),
    ] = _CASES
    repeats: Annotated[
        int | None,
        Option("Checkpoints of each kind.", least=1, default_text="5, or the workload's"),
    ] = None
    every: Annotated[
        int, Option("Steps per checkpoint that the share of the stall is stated for.", least=1)
    ] = 50
    steps: Annotated[
        int, Option("Steps that are timed before and after each checkpoint.", least=1)
    ] = 10
    batch_size: Annotated[int, Option("Samples of a step.", unit="samples", least=1)] = 256

    def __post_init__(self) -> None:
        check(self)
        self.bytes_per_rank(1)

    def described(self) -> CheckpointWorkload | None:
        """Return the workload, if there is one. Raises UsageError."""
        return read_checkpoints(self.workload, self.settings) if self.workload else None

    def times(self) -> int:
        """Return the number of checkpoints of each kind."""
        described = self.described()
        said = None if described is None else described.writes
        return self.repeats or said or _REPEATS

    def bytes_per_rank(self, ranks: int) -> int:
        """Return the bytes that each rank writes."""
        if self.size is not None:
            return parse_bytes(self.size, "--size")
        return checkpoint_bytes(self.model, ranks, self.scale, self.described())


@with_help(
    usual=(
        *("path", "model", "workload", "size"),
        ("case", "write, or stall: of a training loop. Repeatable"),
        *("repeats", "emulate", "ranks", "report"),
    ),
)
def command(
    case: CheckpointCase, emulation: Emulation, ranks: RankOptions, output: OutputOptions
) -> None:
    """Measure checkpoints: bandwidth of writing and reading back, and the stall of training.

    Every rank writes its shard with dlio's checkpoints, with torch.distributed.checkpoint's save
    and async_save, and with dd conv=fsync, in turn; each ends when all is on the disk. What is
    read back is compared. Then a training loop on the processor is interrupted by checkpoints.
    """
    output.check_writable()
    emulation.check_possible()
    check_scratch(case.path)
    on_ranks(ranks.ranks, run_checkpoint, case, emulation, output, backend=ranks.backend, live=True)


def run_checkpoint(case: CheckpointCase, emulation: Emulation, output: OutputOptions) -> None:
    """Measure on this rank, and report on rank 0. Collective."""
    comm = world()
    started = begin(output)
    size, repeats = case.bytes_per_rank(comm.size), case.times()
    rates: dict[tuple[str, str], list[float]] = {}
    stalls: list[Stall] = []
    shown = comm.rank == 0
    with _folder(case.path, emulation, comm) as folder:
        _check_room(folder, size, comm)
        if "write" in case.case:
            with working("checkpoints", repeats * len(METHODS), shown=shown):
                for _, name in turns(METHODS, repeats):
                    for kind, rate in _moved(name, folder, size, comm).items():
                        rates.setdefault((name, kind), []).append(rate)
                    advance()
        if "stall" in case.case:
            training = StallTraining(size, case.batch_size)
            with working("stalls", (repeats + 1) * len(STALLING), shown=shown):
                stalls = measure_stalls(folder, STALLING, training, case.steps, repeats, comm)
    if comm.rank:
        return
    figures = [
        Figure(kind, "MiB/s", tuple(rates[name, kind]), {"method": name}, "higher")
        for kind in ("write", "read")
        for name in METHODS
        if rates
    ]
    ratios = [
        Ratio(
            f"write, dlio / {name}",
            tuple(ratio(rates["dlio", "write"], rates[name, "write"])["all"]),
        )
        for name in METHODS
        if name != "dlio" and rates
    ]
    notes = [f"{counted(comm.size, 'rank')} with {format_bytes(size)} each"]
    show_figures(f"{notes[0]}, in {case.path}", figures, ratios)
    if stalls:
        more, more_ratios = stall_figures(stalls, case.every)
        show_figures("stall of training, rank 0", more, more_ratios)
        figures, ratios = [*figures, *more], [*ratios, *more_ratios]
        notes.append(
            "blocked: time in calls; slower: all time beyond plain steps, that of other threads on "
            "the same processors included"
        )
    notes.append("each rank writes files of its own; torch's functions with no_dist=True")
    if (described := case.described()) is not None:
        notes += described.notes
    show_notes(notes)
    results = Results(
        "checkpoint",
        settings={
            **asdict(case),
            **asdict(emulation),
            "repeats": repeats,
            "ranks": comm.size,
            "bytes": size,
        },
        seeds={"seed": 0},
        figures=figures,
        ratios=ratios,
        notes=notes,
        paths=(case.path,),
    )
    finish(output, results, started)


@contextlib.contextmanager
def _folder(path: str, emulation: Emulation, comm: Communicator) -> Iterator[str]:
    """A folder of all ranks, behind emulated storage if wanted; removed afterwards."""
    with contextlib.ExitStack() as stack:
        scratch = ""
        if comm.rank == 0:
            made = tempfile.TemporaryDirectory(
                prefix="dlio-bench-checkpoint-", dir=path, ignore_cleanup_errors=True
            )
            scratch = stack.enter_context(made)
        yield stack.enter_context(emulation.mounted(scratch, comm))


def _check_room(folder: str, size: int, comm: Communicator) -> None:
    """Raise UsageError unless the checkpoints of one method fit."""
    free = shutil.disk_usage(folder).free
    if free < 3 * size * comm.size:
        raise UsageError(
            f"{folder}: checkpoints of {format_bytes(size)} from {counted(comm.size, 'rank')} "
            "need three "
            f"times their size, and {format_bytes(free)} are free: name another folder, or --size"
        )


def _moved(name: str, folder: str, size: int, comm: Communicator) -> dict[str, float]:
    """Write a checkpoint, read it back and compare it; return the MiB/s of both. Collective."""
    tensors = random_state(size, comm.rank)
    inside = os.path.join(folder, f"{name.replace(' ', '-')}-{comm.rank}")
    method = METHODS[name](inside)
    try:
        method.save(1, tensors)  # Allocates what later ones use again.
        method.finish()
        comm.barrier()
        began = time.perf_counter()
        method.save(2, tensors)
        method.before_update()
        method.finish()
        comm.barrier()
        written_s = time.perf_counter() - began
        drop(files_below(inside))
        back = {key: torch.zeros_like(value) for key, value in tensors.items()}
        comm.barrier()
        began = time.perf_counter()
        method.read(2, back)
        comm.barrier()
        read_s = time.perf_counter() - began
        if name != "dd" and not all(torch.equal(back[key], tensors[key]) for key in tensors):
            raise CorruptBlock(f"{folder}: {name} gave other bytes than were written")
    finally:
        method.close()
    mib = comm.size * sum(tensor.nbytes for tensor in tensors.values()) / _MIB
    return {"write": mib / written_s, "read": mib / read_s}
