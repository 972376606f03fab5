"""A training with Lightning whose ranks end at given places: `fit.py FOLDER [OPTIONS]`.

`ENDS='{"1": ["batch", 5]}'` kills rank 1 where it comes to the place `batch` for the fifth time.
Weight i of the model gets a gradient from sample i alone, so that its change tells how often the
sample is in it. Each rank that is left writes what it has seen to FOLDER.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dlio
from dlio.integrations.lightning import DlioStrategy

N, EPOCHS = 101, 3
FOLDER = Path(sys.argv[1])
OPTIONS: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
MEMBER = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))
ENDS: tuple[str, int] = json.loads(os.environ.get("ENDS", "{}")).get(MEMBER, ("", 0))
_come: Counter[str] = Counter()


def come_to(place: str) -> None:
    """Note that this rank has come to a place; it may be its last."""
    _come[place] += 1
    if ENDS[0] == place and ENDS[1] == _come[place]:
        os.kill(os.getpid(), signal.SIGKILL)


class Strategy(DlioStrategy):
    """The strategy, with places in its collective calls."""

    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        stage = getattr(self.lightning_module.trainer.state.stage, "value", "no stage")
        come_to(f"before a sum, {stage}")
        result = super().reduce(tensor, *arguments, **options)
        come_to(f"after a sum, {stage}")
        return result


class Files(TorchCheckpointIO):  # type: ignore[misc, unused-ignore]
    """Checkpoints, with a place at which one is half written."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"half of it")
        come_to("saving")
        super().save_checkpoint(checkpoint, path, storage_options)


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """A table with one weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not OPTIONS.get("by_hand")
        self.table = nn.Embedding(N, 1)
        self.metric = torchmetrics.MeanMetric()
        self.epochs: list[list[int]] = []
        self.steps: list[int] = []
        self.validated: list[float] = []
        self.measured: list[float] = []
        self.sizes: list[int] = []

    def on_train_epoch_start(self) -> None:
        come_to("epoch")
        self.epochs.append([0] * N)
        self.steps.append(0)

    def training_step(self, batch: Any, _: int) -> Any:
        come_to("batch")
        loss = self.table(batch[0]).mean()
        self.log("loss", loss.detach(), sync_dist=True, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self._count()
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        come_to("step")
        self._count()  # Lightning does not set gradients to zero where it accumulates.
        self.before = self.table.weight.detach().clone()

    def on_before_zero_grad(self, _: Any) -> None:
        self._count()

    def on_train_epoch_end(self) -> None:
        self._count()
        come_to("epoch_end")
        self.sizes.append(self.trainer.world_size)

    def _count(self) -> None:
        if (before := getattr(self, "before", None)) is not None:
            changed = (self.table.weight.detach() != before)[:, 0]
            self.epochs[-1] = [k + int(c) for k, c in zip(self.epochs[-1], changed, strict=True)]
            self.steps[-1] += 1
            self.before = None  # type: ignore[assignment]

    def validation_step(self, batch: Any, _: int) -> None:
        come_to("validation")
        self.log("val", batch[0].float().mean(), sync_dist=True, batch_size=len(batch[0]))
        self.metric.update(batch[0].float())
        self.log("metric", self.metric)

    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))
        self.measured.append(float(self.trainer.callback_metrics["metric"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        # It refuses to step more often than planned.
        whole = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, whole, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Numbers(Dataset[Any]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor(index)]


def main() -> None:
    """Train, and write what this rank has seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind: Any = DataLoader if OPTIONS.get("torch") else dlio.DataLoader
    data = TensorDataset(torch.arange(N))
    saved = lightning.pytorch.callbacks.ModelCheckpoint(str(FOLDER / "saved"), "last")
    trainer = lightning.Trainer(
        strategy=Strategy(OPTIONS.get("exchange", "allreduce")),
        plugins=[Files()],
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=OPTIONS.get("accumulate", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved],
    )
    module = Module()
    trainer.fit(module, kind(data, 5, shuffle=True), dlio.DataLoader(Numbers(), 5, seed=1))
    strategy: Any = trainer.strategy
    gathered = strategy.all_gather(torch.tensor(int(MEMBER))).reshape(-1).tolist()
    result = {
        "epochs": module.epochs,
        "steps": module.steps,
        "sizes": module.sizes,
        "weights": module.table.weight.detach().numpy().tobytes().hex(),
        "validated": module.validated,
        "measured": module.measured,
        "rank": trainer.global_rank,
        "ranks": trainer.world_size,
        "sampler": trainer.distributed_sampler_kwargs,
        "gathered": gathered,
        "told": strategy.broadcast([int(MEMBER)]),
        "all": strategy.reduce_boolean_decision(True),
        "any": strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False),
    }
    (FOLDER / f"{MEMBER}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
