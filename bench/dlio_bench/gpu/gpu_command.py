"""`dlio bench gpu`: options, the cases in turn, the report."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Final

import torch

from dlio.cli.option_records import OutputOptions
from dlio.errors import DlioError, UsageError
from dlio.launch.mpi_launch import find_mpirun
from dlio.util.cores import available_cores
from dlio.util.options import CheckedOptions, Option
from dlio_bench import bench_ranks
from dlio_bench.bench_data import drawn_pictures
from dlio_bench.gpu.gpu_cases import (
    GpuMeasurements,
    GpuRunSettings,
    decode,
    handover,
    repeated,
    step,
    tier,
)
from dlio_bench.gpu.gpu_exchange_rank import step_times
from dlio_bench.results.envelope import begin, finish, save
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import advance, expect, show_figures, show_notes, working

# Exchanges of two ranks that share one device

_EXCHANGES: Final = ("allreduce", "allreduce+onebit", "gossip", "diloco(2)")
_TIMEOUT_S: Final = 90.0


def exchanges(place: GpuRunSettings, measured: GpuMeasurements) -> None:
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


CASES: Final[dict[str, Callable[[GpuRunSettings, GpuMeasurements], None]]] = {
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
        Option("Side of the square crops.", unit="pixels", least=1, default_text="224; 32"),
    ] = None
    batch_size: Annotated[
        int | None,
        Option("Samples of a batch.", unit="samples", least=1, default_text="256; 8"),
    ] = None
    steps: Annotated[
        int | None, Option("Timed steps of a repeat.", least=1, default_text="50; 1")
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


def measure(
    case: GpuCase, after_each: Callable[[GpuMeasurements], None] = lambda _: None
) -> GpuMeasurements:
    """Run the cases in turn. A case that fails is reported among those that were skipped.

    Args:
        after_each: called with the results so far.
    """
    measured = GpuMeasurements()
    if case.device == "cuda" and not torch.cuda.is_available():
        for name in case.case:
            measured.skipped[name] = "torch finds no CUDA device"
        return measured
    expect(len(case.case))
    ends = time.monotonic() + 60 * case.minutes
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch, _one_thread(case.device):
        place = case.place(case.source or drawn_pictures(scratch, _DRAWN[case.device]), scratch)
        if case.device == "cuda":
            place = replace(place, source=repeated(place, _LEAST_BATCHES))
        for name in case.case:
            if time.monotonic() > ends:
                measured.skipped[name] = f"the {case.minutes:g} minutes of --minutes were over"
            else:
                try:
                    CASES[name](place, measured)
                except (DlioError, OSError, RuntimeError, ImportError) as error:
                    # The other cases are worth their figures on a machine that is lent for minutes.
                    reason = f"{type(error).__name__}: {str(error).strip()[-400:]}"
                    measured.skipped[name] = f"failed: {reason}"
            advance(name)
            after_each(measured)
    return measured


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Leave the cores to the loader's threads where torch would compute with them."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def command(case: GpuCase, output: OutputOptions) -> None:
    """Measure dlio on a GPU: decoding, the decoded tier, hand-over, steps, exchanges.

    Cases that cannot run here are skipped by name with the reason, and the report says so in
    `skipped`. Without a GPU all are, and the command succeeds.
    """
    started = begin(output)

    def results(measured: GpuMeasurements) -> Results:
        return Results(
            "gpu",
            settings=asdict(case),
            seeds={"seed": 0},
            figures=measured.figures,
            ratios=measured.ratios,
            notes=measured.notes,
            details={"skipped": dict(measured.skipped), "gpu": _gpu()},
            versions={"cuda": torch.version.cuda},
        )

    with working("gpu"):
        measured = measure(case, lambda so_far: save(output, results(so_far), started))
    if measured.figures:
        show_figures(f"on {_gpu() or case.device}", measured.figures, measured.ratios)
    show_notes(measured.notes)
    show_notes([f"skipped: {name}: {reason}" for name, reason in measured.skipped.items()])
    finish(output, results(measured), started)


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
