"""Exchanges of two ranks that share one device."""

from typing import Any, Final

from dlio.errors import UsageError
from dlio.launch.mpi_launch import find_mpirun
from dlio_bench import bench_ranks
from dlio_bench.gpu.gpu_measurements import GpuMeasurements, GpuRunSettings
from dlio_bench.results.report_values import Figure

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
    gpus = _gpus(place)
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
    answer: dict[str, Any] = bench_ranks.run(
        "dlio_bench.gpu.gpu_exchange_rank", task, 2, timeout_s=_TIMEOUT_S
    )
    for name, seconds in answer["seconds"].items():
        values = tuple(1e3 * each for each in seconds)
        labels = {"exchange": name, "path": answer["paths"][name]}
        measured.figures.append(Figure("step of two ranks", "ms", values, labels, "lower"))


def _gpus(place: GpuRunSettings) -> int:
    import torch

    return torch.cuda.device_count() if place.device.type == "cuda" else 0
