"""TensorBoard: curves of a run, and summaries of its gradients and weights."""

from typing import TYPE_CHECKING, Final

import torch

from dlio.errors import UsageError
from dlio.storage.counters import PLACES
from dlio.train.callbacks.base import Callback, Run
from dlio.train.report import EpochReport, removed_by_kind
from dlio.util.files import unwritable

if TYPE_CHECKING:
    pass

__all__ = ["TensorBoard"]

_LOSS_EVERY: Final = 10
"""Steps between two losses; reading a loss waits for the device."""


class TensorBoard(Callback):
    """Write events of rank 0, by optimizer steps; an epoch's figures stand at its last step.

    Args:
        folder: folder of the event files.
        summaries: steps between two summaries of each parameter: norms of weight and gradient,
            their ratio, and histograms. None for no summaries.

    Raises UsageError if TensorBoard is not installed, or if the folder cannot be written.
    """

    def __init__(self, folder: str, summaries: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard: {error}; install it: pip install 'dlio[tensorboard]'"
            ) from error
        self._summaries = summaries
        try:
            self._writer: SummaryWriter = SummaryWriter(folder)
        except OSError as error:
            raise unwritable(f"--tensorboard {folder}", error) from error

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def after_step(self, run: Run) -> None:
        if run.updates % _LOSS_EVERY == 1:
            count = max(1, len(run.loader.last_samples))
            self._scalar("train/loss", float(run.last_loss) / count, run.updates)
            self._scalar("train/lr", run.optimizer.param_groups[0]["lr"], run.updates)
            if run.gradient_norm is not None:
                self._scalar("train/gradient_norm", float(run.gradient_norm), run.updates)
        if self._summaries is not None and run.updates % self._summaries == 0:
            self._summarise(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        step = run.updates
        for name, value in {
            "epoch/loss": report.loss,
            "epoch/accuracy": report.accuracy,
            "epoch/val_accuracy": report.val_accuracy,
            "epoch/samples_per_s": report.samples_per_s,
            "epoch/stall_fraction": report.stall_fraction,
            "epoch/step_ms_median": report.step_ms["median"],
            "epoch/step_ms_p95": report.step_ms["p95"],
            "epoch/skip_share": report.skip_share,
            "exchange/wait_s": report.exchange_wait_s,
            "exchange/bytes": float(report.exchange_bytes),
            "exchange/consensus_distance": report.consensus_distance,
            **{f"data/bytes_{place}": float(report.bytes[place]) for place in PLACES},
            **_pruning(report),
        }.items():
            if value is not None:
                self._scalar(name, value, step)
        self._writer.flush()

    @torch.no_grad()
    def _summarise(self, run: Run) -> None:
        for name, parameter in run.model.named_parameters():
            weight = parameter.detach().float()
            self._writer.add_histogram(f"weights/{name}", weight.cpu(), run.updates)
            size = float(weight.norm())
            self._scalar(f"weight_norm/{name}", size, run.updates)
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            if bool(gradient.isfinite().all()):
                self._writer.add_histogram(f"gradients/{name}", gradient.cpu(), run.updates)
            norm = float(gradient.norm())
            self._scalar(f"gradient_norm/{name}", norm, run.updates)
            self._scalar(f"gradient_to_weight/{name}", norm / max(size, 1e-12), run.updates)

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)


def _pruning(report: EpochReport) -> dict[str, float]:
    """Scalars of a model that is pruned."""
    pruning = report.pruning
    if pruning is None:
        return {}
    removed = removed_by_kind([pruning])
    return {
        "pruning/parameters": float(pruning["parameters"]),
        "pruning/flops_per_sample": float(pruning["flops_per_sample"]),
        "pruning/rounds": float(len(pruning["rounds"])),
        "pruning/undone": float(pruning["undone"]),
        "pruning/statistics_share": pruning["statistics"]["share"],
        **{f"pruning/removed_{kind}": float(count) for kind, count in removed.items()},
        **{f"parameters/{name}": float(count) for name, count in pruning["layers"].items()},
    }
