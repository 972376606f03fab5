"""A LightningModule that logs without `sync_dist`: `logged_values.py WAY FOLDER`.

Ways: `one` process, the `strategy` of dlio under mpirun, and a script of `dlio run`. Rank 0 writes
the values that its logger and callbacks got, as lines of JSON, to FOLDER/WAY.
"""

# ruff: noqa: E402
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.lean_lightning import leave_out_unused_packages

leave_out_unused_packages()

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
_BATCH = 8


class Lines(Logger):  # type: ignore[misc, unused-ignore]
    """Keeps all that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    name = version = "lines"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append([step, metrics])


class Steps(lightning.Callback):  # type: ignore[misc, unused-ignore]
    """Keeps a value that a callback sees in each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["positive"]))


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(3, 1)
        self.positives = torchmetrics.SumMetric()

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch["long"] if "two" in sys.argv else batch
        out = self.layer(x)[:, 0]
        loss = (out - y).square().mean()
        if "two" in sys.argv:
            loss = loss + self.layer(batch["short"][0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar="quiet" not in sys.argv)
        self.log_dict({"positive": (out > 0).float().mean()})
        self.positives.update((out > 0).sum())
        self.log("positives", self.positives, on_step=False, on_epoch=True)
        self.log("worst", (out - y).abs().max(), on_step=False, on_epoch=True, reduce_fx="max")
        if "sum" in sys.argv:
            self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, _: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val", (self.layer(x)[:, 0] - y).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def main(way: str, folder: Path) -> None:
    strategy, kind, ranks = "auto", DataLoader, 1
    if way == "strategy":
        import dlio
        from dlio.integrations.lightning import launch_info

        strategy, kind, ranks = "dlio", dlio.DataLoader, launch_info().ranks
    torch.manual_seed(1)
    # The last batch of training has one sample, and so one rank has none.
    sets = [TensorDataset(x := torch.randn(n, 3), x.sum(1) + torch.randn(n)) for n in (33, 21, 9)]
    loaders = [kind(each, _BATCH // ranks, shuffle=False) for each in sets]
    train: Any = loaders[0]
    if "two" in sys.argv:
        short = kind(sets[1], _BATCH // ranks, shuffle=False)
        train = CombinedLoader({"long": train, "short": short}, "max_size_cycle")
    saved = ModelCheckpoint(folder / f"{way}-saved", "{epoch}-{loss_epoch:.3f}", "loss_epoch")
    saved.save_top_k = 2
    lines, steps = Lines(), Steps()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=lines,
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved, EarlyStopping("loss_epoch", patience=9)],
    )
    shared: list[object] = []
    if "quiet" in sys.argv:
        from dlio.integrations.lightning_logs import LoggedMeans

        share = LoggedMeans._share
        LoggedMeans._share = lambda *args: [shared.append(args), share(*args)][1]  # type: ignore
    else:
        trainer.callbacks.insert(0, steps)
    trainer.fit(Module(), train, loaders[1:])
    seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if "quiet" in sys.argv:
        seen = {"messages": len(shared)}
    names = sorted(each.name for each in (folder / f"{way}-saved").iterdir())
    if trainer.global_rank == 0:
        text = "\n".join(map(json.dumps, [*lines.lines, [0, seen], steps.seen, names]))
        (folder / way).write_text(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
