"""Checks of the strategy "dlio" on any number of ranks: `lightning_checks.py FOLDER`.

A step trains on the same number of samples on one rank and on several. Each rank writes its results
to FOLDER.
"""

# ruff: noqa: E402
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.lean_lightning import leave_out_unused_packages

leave_out_unused_packages()

import lightning
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import dlio
from dlio.errors import UsageError
from dlio.integrations.lightning import DlioStrategy

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
_GLOBAL_BATCH = 8
COLUMN = 4
"""Of samples; its mean is below 0 on one of two ranks, and above 0 on the other and on both."""


class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """A small net, trained by automatic optimisation, that records the samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.error = torchmetrics.MeanMetric()
        self.seen: list[float] = []
        self.largest = 0.0

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        self.seen += x[:, 0].tolist()
        return (self.net(x)[:, 0] * self.scale - y).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        errors = (self.net(x)[:, 0] * self.scale - y).square()
        self.log("val", errors.mean(), sync_dist=True, batch_size=len(x))
        self.error.update(errors)
        self.log("metric", self.error)

    def on_before_zero_grad(self, _: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        if norms:
            self.largest = max(self.largest, float(torch.stack(norms).norm()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.2)


class ByHand(Module):
    """The net with two optimizers and manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        rest = [self.scale, *self.net[2].parameters()]
        return [torch.optim.SGD(self.net[0].parameters(), 0.01), torch.optim.SGD(rest, 0.02)]


class Unfrozen(Module):
    """The net, of which the first layer is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = self.net[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.02)


class Scheduled(Module):
    """The net, whose learning rate follows a value that each rank has of its own samples."""

    rates: list[float]

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("own", batch[0][:, COLUMN].mean() * (1 + self.current_epoch))

    def on_train_epoch_start(self) -> None:
        self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}


def _data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, 3 * torch.tanh(x @ torch.arange(6.0)))


class Pairs(Dataset[Any]):
    """The same samples, for a loader that distributes them over ranks itself."""

    def __init__(self) -> None:
        self._data = _data(44)

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def _trainer(strategy: Any, ranks: int, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "enable_checkpointing": False, **options},
    )


def _loader(ranks: int, count: int = 48) -> DataLoader[Any]:
    return DataLoader(_data(count), _GLOBAL_BATCH // ranks, shuffle=False)


def check_values(strategy: DlioStrategy, rank: int, ranks: int) -> None:
    """Check the communication between ranks that Lightning asks of a strategy."""
    said = {"path": Path("a"), "many": [1, (2.5, None)], 3: "text"}
    assert strategy.broadcast(said if rank == 0 else None) == said
    assert strategy.broadcast(rank, src=ranks - 1) == ranks - 1
    tensor = strategy.broadcast(torch.full((2, 2), float(rank), dtype=torch.bfloat16))
    assert tensor.dtype == torch.bfloat16
    assert not tensor.any()
    try:
        strategy.broadcast(object() if rank == 0 else None)
    except UsageError as error:
        assert "value of type object" in str(error)  # noqa: PT017 - runs without pytest
    else:
        raise AssertionError("no error")
    mine = torch.tensor(float(rank))
    assert float(strategy.reduce(mine.clone())) == (ranks - 1) / 2
    assert float(strategy.reduce(mine.clone(), reduce_op="sum")) == ranks * (ranks - 1) / 2
    assert (
        float(strategy.reduce(mine.clone(), reduce_op=torch.distributed.ReduceOp.MAX)) == ranks - 1
    )
    assert int(strategy.reduce(torch.tensor(rank), reduce_op="min")) == 0
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    assert strategy.reduce_boolean_decision(rank == 0) is False
    assert strategy.reduce_boolean_decision(True) is True
    gathered = strategy.all_gather(torch.tensor([rank, 5]))
    assert gathered.tolist() == [[each, 5] for each in range(ranks)]
    weight = torch.tensor([1.0 + rank], requires_grad=True)
    strategy.all_gather(weight, sync_grads=True).square().sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) == ranks * 2 * (1 + rank)
    strategy.barrier()


class Values(lightning.Callback):  # type: ignore[misc, unused-ignore]
    def on_fit_start(self, trainer: Any, _: Any) -> None:
        if trainer.world_size > 1:
            check_values(trainer.strategy, trainer.global_rank, trainer.world_size)


def main(folder: Path) -> None:
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    results: dict[str, Any] = {}

    module = Module()
    callback = lightning.pytorch.callbacks.ModelCheckpoint(str(folder / "saved"), "last")
    trainer = _trainer(
        "dlio",
        ranks,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        enable_checkpointing=True,
        callbacks=[callback, Values()],
    )
    rank = trainer.global_rank
    sampler: Any = DistributedSampler(_data(48), ranks, rank, shuffle=False)
    in_order = DataLoader(sampler.dataset, _GLOBAL_BATCH // ranks, sampler=sampler)
    trainer.fit(module, in_order, _loader(ranks, 16))
    assert trainer.world_size == ranks
    assert trainer.global_step == 6
    results["weights"] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    results["largest"] = module.largest
    results["seen"] = module.seen
    results["val"] = float(trainer.callback_metrics["val"])
    results["metric"] = float(trainer.callback_metrics["metric"])
    # A second entry point, after the teardown of the first.
    results["again"] = trainer.validate(module, _loader(ranks, 16), verbose=False)[0]["val"]
    saved = torch.load(folder / "saved" / "last.ckpt", weights_only=False)
    for name, tensor in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], tensor), name

    module = ByHand()
    trainer = _trainer(DlioStrategy("hierarchical"), ranks)
    loader = dlio.DataLoader(Pairs(), _GLOBAL_BATCH // ranks, shuffle=True, seed=5, num_workers=2)
    trainer.fit(module, loader)
    results["by_hand"] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    results["seen_by_hand"] = module.seen
    assert trainer.train_dataloader is loader
    loader.close()

    module = Unfrozen()
    finetuning = lightning.pytorch.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.02)
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2)
    trainer = _trainer("dlio", ranks, callbacks=[finetuning, averaging], max_epochs=4)
    before = module.backbone.weight.detach().clone()
    trainer.fit(module, dlio.DataLoader(_data(44), _GLOBAL_BATCH // ranks, shuffle=True, seed=5))
    assert not torch.equal(before, module.backbone.weight)
    results["unfrozen"] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()

    module = Scheduled()
    trainer = _trainer("dlio", ranks, max_epochs=4)
    loader = dlio.DataLoader(_data(44), _GLOBAL_BATCH // ranks, shuffle=True, seed=5)
    trainer.fit(module, loader, _loader(ranks, 16))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    results["scheduled"] = [*module.rates, *weights.tolist()]

    for exchange in ("gossip", "gossip(gradient)", "local-sgd(2)+int8", "asgd"):
        module = Module()
        strategy = DlioStrategy(exchange)
        trainer = _trainer(strategy, ranks, gradient_clip_val=1.0)
        counted: dict[str, float] = {}

        class Counts(lightning.Callback):  # type: ignore[misc, unused-ignore]
            def on_train_end(self, trainer: Any, _: Any) -> None:
                counted.update(trainer.strategy.statistics())  # noqa: B023

        trainer.callbacks.append(Counts())
        trainer.fit(module, _loader(ranks), _loader(ranks, 16))
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        results[exchange] = [
            weights.tolist(),
            counted["messages"],
            trainer.global_step,
            module.seen,
        ]
        assert not strategy.statistics()

    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
