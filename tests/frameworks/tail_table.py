"""Trains and evaluates with Lightning, Trainer and Accelerate, and compares with one process.

`tail_table.py FOLDER FRAMEWORKS CASES`, as ranks of mpirun. A case is a size of the data set, a
batch size per rank and a number of accumulated batches. Rank 0 writes the faults to
FOLDER/faults.json, by framework, with the number of cases.
"""

# ruff: noqa: E402
import atexit
import contextlib
import gc
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lean_lightning import leave_out_unused_packages

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
RANKS = int(os.environ["OMPI_COMM_WORLD_SIZE"])

import torch
from mpi4py import MPI
from torch import nn

import dlio

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
_RATE = 0.1
Case = tuple[int, int, int]


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples of which the first value tells the number."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 3, generator=generator)
        self.inputs[:, 0] = torch.arange(count)
        self.targets = torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.inputs[index], "labels": self.targets[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(3, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        scaled = x * torch.tensor([1 / 40, 1.0, 1.0])
        outputs = self.layer(scaled)[:, 0]
        logits = torch.stack([x[:, 0], outputs], 1)
        return {"loss": (outputs - labels).square().mean(), "logits": logits}


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@dataclass(frozen=True)
class Alone:
    """An epoch in one process by torch alone, and an evaluation afterwards."""

    weights: torch.Tensor
    by_samples: float
    """Mean loss of the training's samples."""
    by_steps: float
    """Mean loss of its steps."""
    evaluated: float
    last: float
    """Loss of the last batch."""


def alone(case: Case, whole_groups: bool) -> Alone:
    """Train and evaluate. A last group of fewer accumulated batches is divided by their number,
    unless `whole_groups`."""
    size, batch_size, accumulated = case
    data, net = Numbers(size), Net()
    optimizer = torch.optim.SGD(net.parameters(), _RATE)
    batches = torch.split(torch.arange(size), batch_size * RANKS)
    total, steps = 0.0, []
    for first in range(0, len(batches), accumulated):
        group = batches[first : first + accumulated]
        steps.append(0.0)
        for batch in group:
            loss = net(data.inputs[batch], data.targets[batch])["loss"]
            part = loss / (accumulated if whole_groups else len(group))
            part.backward()
            total += float(loss) * len(batch)
            steps[-1] += float(part)
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        evaluated = float(net(data.inputs, data.targets)["loss"])
    return Alone(flat(net), total / size, sum(steps) / len(steps), evaluated, float(loss))


def compared(net: Net, case: Case, weights: torch.Tensor) -> Iterator[str]:
    """The faults of a training."""
    off = float((flat(net) - weights).abs().max())
    if not off < 1e-5:
        yield f"weights off by {off}"
    shares: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(shares, net.seen)
    if {each for share in shares for each in share} != set(range(case[0])):
        yield f"samples {shares}"


def near(name: str, value: Any, wanted: float) -> Iterator[str]:
    if not abs(float(value) - wanted) < 1e-5:
        yield f"{name} {float(value)}, not {wanted}"


def in_order(rows: Any, case: Case) -> Iterator[str]:
    numbers = [int(each) for each in rows]
    if numbers != list(range(case[0])):
        yield f"predictions of samples {numbers}"


def with_lightning(case: Case) -> Iterator[str]:
    import lightning

    import dlio.integrations.lightning

    size, batch_size, accumulated = case

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self.net(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), _RATE)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=RANKS,
        strategy="dlio",
        accumulate_grad_batches=accumulated,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = [dlio.DataLoader(Numbers(size), batch_size, seed=3) for _ in range(2)]
    trainer.fit(module, *loaders)
    one = alone(case, whole_groups=True)
    yield from compared(module.net, case, one.weights)
    yield from near("train_epoch", trainer.callback_metrics["train_epoch"], one.by_samples)
    yield from near("train_step", trainer.callback_metrics["train_step"], one.last)
    yield from near("val", trainer.callback_metrics["val"], one.evaluated)


def with_accelerate(case: Case) -> Iterator[str]:
    from accelerate import Accelerator

    size, batch_size, accumulated = case
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    net = Net()
    loaders = [dlio.DataLoader(Numbers(size), batch_size, seed=3) for _ in range(2)]
    model, optimizer, train, test = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), _RATE), *loaders
    )
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    yield from compared(net, case, alone(case, whole_groups=True).weights)
    gathered: list[float] = []
    for batch in test:
        gathered += accelerator.gather_for_metrics(batch)["x"][:, 0].tolist()
    yield from in_order(gathered, case)
    # The rest of an epoch, once over all ranks.
    skips = size // (2 * batch_size * RANKS)
    rest: list[Any] = [None] * RANKS
    mine = [
        int(number)
        for batch in accelerator.skip_first_batches(test, skips)
        if test.batch_share.samples
        for number in batch["x"][:, 0]
    ]
    torch.distributed.all_gather_object(rest, mine)
    numbers = sorted(number for share in rest for number in share)
    if numbers != list(range(skips * batch_size * RANKS, size)):
        yield f"after {skips} batches samples {numbers}"


class MoreNumbers(Numbers):
    """With a value that no network takes: Trainer leaves it out."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "unused": torch.tensor(index)}


class ItemNet(Net):
    """Divides its loss by the number of items that it is told, as language models do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **options: Any) -> dict[str, Any]:
        outputs: dict[str, Any] = super().forward(x, labels)
        return {**outputs, "loss": outputs["loss"] * len(x) / options["num_items_in_batch"]}


def with_items(case: Case) -> Iterator[str]:
    """Trainer with losses that are divided by the items of a step, of all ranks or of each."""
    size, batch_size, accumulated = case
    group = batch_size * accumulated
    one = alone((size, group, 1), whole_groups=False)
    yield from with_transformers(case, ItemNet(), one)
    yield from with_transformers(case, ItemNet(), one, average_tokens_across_devices=False)


def with_transformers(
    case: Case, net: Net | None = None, one: Alone | None = None, **options: Any
) -> Iterator[str]:
    import transformers

    from dlio.integrations import TrainerMixin

    size, batch_size, accumulated = case

    class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
        pass

    net, one = net or Net(), one or alone(case, whole_groups=False)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=accumulated,
            learning_rate=_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(
            model=net,
            args=args,
            train_dataset=MoreNumbers(size),
            eval_dataset=MoreNumbers(size),
            optimizers=(torch.optim.SGD(net.parameters(), _RATE), None),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            done = trainer.train()
        yield from compared(net, case, one.weights)
        yield from near("train_loss", done.training_loss, one.by_steps)
        predicted = trainer.predict(Numbers(size))
        yield from in_order(predicted.predictions[:, 0], case)
        yield from near("eval_loss", predicted.metrics["test_loss"], one.evaluated)


def main(folder: Path, frameworks: list[str], cases: list[Case]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # Looked at, not used.
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(RANK)}
    where = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", where, rank=RANK, world_size=RANKS)
    result: dict[str, Any] = {}
    for framework in frameworks:
        train = globals()[f"with_{framework}"]
        faults = {}
        for case in cases:
            of_case = list(train(case))
            if of_case:
                faults[str(case)] = of_case
            if case == cases[0]:
                gc.freeze()  # Frameworks look for garbage at each end: not among the modules.
        result[framework] = {"cases": len(cases), "faults": faults}
    if RANK == 0:
        (folder / "faults.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    leave_out_unused_packages()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3]))
    # Threads of gloo outlive its group; one that frees a tensor while Python ends aborts the rank.
    atexit._run_exitfuncs()
    MPI.Finalize()
    os._exit(0)
