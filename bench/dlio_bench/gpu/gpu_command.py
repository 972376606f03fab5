"""`dlio bench gpu`: options, the cases in turn, the report."""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Final

import torch

from dlio.cli.option_records import OutputOptions
from dlio.errors import DlioError, UsageError
from dlio.launch.mpi_launch import find_mpirun
from dlio.util.cores import available_cores
from dlio.util.options import CheckedOptions, Option
from dlio_bench import bench_ranks
from dlio_bench.bench_data import draw_pictures
from dlio_bench.bench_processes import one_thread
from dlio_bench.gpu.gpu_cases import (
    GpuResults,
    GpuRunSettings,
    decode,
    gpu_name,
    handover,
    repeated,
    step,
    tier,
)
from dlio_bench.gpu.gpu_exchange_rank import step_times
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.report_values import Figure
from dlio_bench.results.terminal import advance, show_figures, show_notes, working

# Exchanges of two ranks that share one device

_EXCHANGES: Final = ("allreduce", "allreduce+onebit", "gossip", "diloco(2)")
_TIMEOUT_S: Final = 90.0


def exchanges(place: GpuRunSettings, measured: GpuResults) -> None:
    """Milliseconds of a step of two ranks on one device, without an exchange and with each; through
    page-locked memory, as NCCL refuses two ranks on one GPU."""
    try:
        find_mpirun()
    except UsageError as error:
        measured.skipped["exchange"] = str(error)
        return
    gpus = torch.cuda.device_count() if place.device.type == "cuda" else 0
    task = {
        "device": place.device.type,
        "steps": place.steps,
        "repeats": place.repeats,
        "exchanges": list(_EXCHANGES),
        "features": 2048 if place.device.type == "cuda" else 64,
        "nccl": gpus > 1,
    }
    if gpus < 2:
        measured.skipped["exchange: NCCL"] = (
            f"needs two GPUs, and {gpus} {'is' if gpus == 1 else 'are'} here: NCCL refuses two "
            "ranks on one"
        )
    answer = bench_ranks.run(step_times, task, 2, timeout_s=_TIMEOUT_S)
    for name, seconds in answer["seconds"].items():
        values = tuple(1e3 * each for each in seconds)
        labels = {"exchange": name, "path": answer["paths"][name]}
        measured.figures.append(Figure("step of two ranks", "ms", values, labels, "lower"))


CASES: Final[dict[str, Callable[[GpuRunSettings, GpuResults], None]]] = {
    "decode": decode,
    "tier": tier,
    "handover": handover,
    "step": step,
    "exchange": exchanges,
}
_DRAWN: Final = {"cuda": 2048, "cpu": 24}
_LEAST_BATCHES: Final = 32
"""Of a pass: workers that are processes make whole batches, and each pass takes time to begin."""
_SIZES: Final = {"cuda": (224, 256, 50), "cpu": (32, 8, 1)}
"""Side of crops, batch size and steps, by device."""


@dataclass(frozen=True, slots=True)
class GpuCase(CheckedOptions):
    """A measurement of a GPU; options of `dlio bench gpu`."""

    source: Annotated[
        str,
        Option(
            "Class folders of JPEGs.",
            positional=True,
            metavar="SRC",
            default_text="2048 drawn pictures; 24 with --device cpu",
        ),
    ] = ""
    device: Annotated[
        str,
        Option(
            "cuda, or cpu for a small form of the cases that need no GPU.", choices=("cuda", "cpu")
        ),
    ] = "cuda"
    case: Annotated[
        tuple[str, ...],
        Option(
            "decode: JPEGs into crops, files and packed with restart rows, by threads, on the "
            "device, by DALI and by TurboLoader. tier: gpu:SIZE:decoded. handover: stalls of a "
            "loop of computation, and the trace of its copies. step: training steps of a ResNet-50 "
            "in bfloat16, fed by dlio and on a resident batch. exchange: two ranks on one device. "
            "Repeatable.",
            choices=tuple(CASES),
        ),
    ] = tuple(CASES)
    image_size: Annotated[
        int | None,
        Option(
            "Side of the square crops.",
            unit="pixels",
            least=1,
            default_text="224, or 32 with --device cpu",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        Option(
            "Samples of a batch.",
            unit="samples",
            least=1,
            default_text="256, or 8 with --device cpu",
        ),
    ] = None
    steps: Annotated[
        int | None,
        Option("Timed steps of a repeat.", least=1, default_text="50, or 1 with --device cpu"),
    ] = None
    workers: Annotated[
        int | None, Option("Threads of the loader.", least=1, default_text="all cores")
    ] = None
    repeats: Annotated[int, Option("Timed repeats of each contender.", least=1)] = 3
    minutes: Annotated[
        float,
        Option("Cases that would begin later than this are skipped.", unit="minutes", above=0),
    ] = 5.0

    def place(self, source: str, scratch: str) -> GpuRunSettings:
        """Return the settings of a run."""
        size, batch, steps = _SIZES[self.device]
        device = torch.device(self.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return GpuRunSettings(
            device=device,
            source=source,
            scratch=scratch,
            image_size=self.image_size or size,
            batch_size=self.batch_size or batch,
            workers=self.workers or available_cores(),
            repeats=self.repeats,
            steps=self.steps or steps,
        )


def command(case: GpuCase, output: OutputOptions) -> None:
    """Measure dlio on a GPU: decoding, the decoded tier, hand-over, steps, exchanges.

    Cases that cannot run here are skipped by name with the reason, and the report says so in
    `skipped`. Without a GPU all are, and the command succeeds.
    """
    started = begin(output)
    results = GpuResults(
        "gpu",
        settings=asdict(case),
        seeds={"seed": 0},
        versions={"cuda": torch.version.cuda},
    )
    if case.device == "cuda" and not torch.cuda.is_available():
        results.skipped |= dict.fromkeys(case.case, "torch finds no CUDA device")
    else:
        with working("gpu", len(case.case)):
            _measure(case, results, lambda: save(output, results, started))
    if results.figures:
        show_figures(f"on {gpu_name() or case.device}", results.figures, results.ratios)
    show_notes(results.notes)
    show_notes([f"skipped: {name}: {reason}" for name, reason in results.skipped.items()])
    finish(output, results, started)


def _measure(case: GpuCase, results: GpuResults, after_each: Callable[[], None]) -> None:
    """Run the cases in turn. A case that fails is reported among those that were skipped."""
    ends = time.monotonic() + 60 * case.minutes
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlio-bench-"))
        if case.device == "cpu":
            # The cores are left to the loader's threads where torch would compute with them.
            stack.enter_context(one_thread())
        source = case.source or draw_pictures(scratch, _DRAWN[case.device], 10, 10)[0]
        place = case.place(source, scratch)
        if case.device == "cuda":
            place = replace(place, source=repeated(place, _LEAST_BATCHES))
        for name in case.case:
            if time.monotonic() > ends:
                results.skipped[name] = f"the {case.minutes:g} minutes of --minutes were over"
            else:
                try:
                    CASES[name](place, results)
                except (DlioError, OSError, RuntimeError, ImportError) as error:
                    # The other cases are worth their figures on a machine that is lent for minutes.
                    reason = f"{type(error).__name__}: {str(error).strip()[-400:]}"
                    results.skipped[name] = f"failed: {reason}"
            advance(name)
            after_each()
