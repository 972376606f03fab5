"""Resumes in the middle of the second of three epochs: `resumed.py FOLDER PART FRAMEWORKS`.

PART `train` saves a checkpoint of each framework after 32 samples, and `resume` continues it; as
one process, or as ranks of mpirun. Each rank writes the samples of each epoch to
FOLDER/PART-FRAMEWORK-RANKS-RANK.json. The variable LOADER names the class of the loader.
"""

# ruff: noqa: E402
import json
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.lean_lightning import leave_out_unused_packages

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
RANKS = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))

import torch
from torch import nn

import dlio

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
_COUNT, _BATCH, _EPOCHS = 24, 4, 3
STEPS = 32 // (_BATCH * RANKS)
"""Steps to the checkpoint."""
Seen = dict[int, list[int]]


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(0.0)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.latest: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.latest = x[:, 0].int().tolist()
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean() * 1e-3}


def loader() -> dlio.DataLoader:
    kind = getattr(dlio, os.environ.get("LOADER", "DataLoader"))
    made: dlio.DataLoader = kind(Numbers(), _BATCH, shuffle=True, seed=5)
    return made


def with_lightning(folder: Path, resumes: bool) -> Seen:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dlio.integrations.lightning import DlioStrategy

    seen: Seen = defaultdict(list)

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch)["loss"]
            seen[self.trainer.current_epoch] += self.net.latest
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    save = ModelCheckpoint(str(folder), "mid", every_n_train_steps=STEPS)
    trainer = lightning.Trainer(
        max_epochs=_EPOCHS,
        max_steps=-1 if resumes else STEPS,
        accelerator="cpu",
        devices=RANKS,
        strategy=DlioStrategy(),
        logger=False,
        callbacks=[] if resumes else [save],
        enable_checkpointing=not resumes,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = str(folder / "mid.ckpt") if resumes else None
    trainer.fit(Module(), loader(), ckpt_path=path, weights_only=False)
    return seen


def with_accelerate(folder: Path, resumes: bool) -> Seen:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, train = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), loader()
    )
    accelerator.register_for_checkpointing(train)
    if resumes:
        accelerator.load_state(str(folder / "state"))
    seen: Seen = defaultdict(list)
    steps = 0
    for epoch in range(1 if resumes else 0, _EPOCHS):
        train.set_epoch(epoch)
        for batch in train:
            accelerator.backward(model(**batch)["loss"])
            seen[epoch] += net.latest
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == STEPS and not resumes:
                accelerator.save_state(str(folder / "state"))
                return seen
    return seen


def with_transformers(folder: Path, resumes: bool) -> Seen:
    import transformers

    from dlio.integrations import TrainerMixin

    seen: Seen = defaultdict(list)

    class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            seen[int(self.state.epoch or 0)] += net.latest
            return loss

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not resumes

    net = Net()
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=_EPOCHS,
        per_device_train_batch_size=_BATCH,
        use_cpu=True,
        ddp_backend="gloo" if RANKS > 1 else None,
        report_to=[],
        save_strategy="no" if resumes else "steps",
        save_steps=STEPS,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=5,
    )
    trainer = Trainer(model=net, args=args, train_dataset=Numbers(), callbacks=[Stop()])
    saved = [str(path) for path in (folder / "trainer").glob("checkpoint-*")]
    trainer.train(resume_from_checkpoint=saved[0] if resumes else None)
    return seen


class Stream(torch.utils.data.IterableDataset[Any]):
    """Numbers without a length, which worker processes share; with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        numbers = range(
            *((0, _COUNT - 2, 1) if info is None else (info.id, _COUNT - 2, info.num_workers))
        )
        while self.at < len(numbers):
            self.at += 1
            yield Numbers()[numbers[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class PlainStream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(Numbers().__getitem__, range(_COUNT - 2))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], dlio.DataLoader]] = {
    "seed": loader,
    "generator": lambda: dlio.DataLoader(Numbers(), _BATCH, shuffle=True, generator=_seeded()),
    "stream": lambda: dlio.DataLoader(PlainStream(), _BATCH),
    "stateful": lambda: dlio.StatefulDataLoader(Numbers(), _BATCH, shuffle=True),
    "stateful, workers": lambda: dlio.StatefulDataLoader(
        Numbers(), _BATCH, shuffle=True, generator=_seeded(), num_workers=2
    ),
    "stateful stream": lambda: dlio.StatefulDataLoader(Stream(), _BATCH),
    "stateful stream, workers": lambda: dlio.StatefulDataLoader(Stream(), _BATCH, num_workers=2),
}


def with_boundaries(folder: Path, resumes: bool) -> dict[str, Any]:
    """Checkpoints in an epoch, at its last step, and at its end, with Lightning's own strategy: by
    loader and time, (the batches after it in the whole training, those of the resumed one)."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen: list[tuple[int, list[int]]] = []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.seen.append((self.trainer.current_epoch, self.net.latest))
            return loss

        def validation_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def train(name: str, validates: bool, path: Path | None, saves: list[Any]) -> Any:
        torch.manual_seed(7)
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=_EPOCHS,
            accelerator="cpu",
            logger=False,
            callbacks=saves,
            enable_checkpointing=bool(saves),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        also = [torch.utils.data.DataLoader(Numbers(), _COUNT)] if validates else []
        trainer.fit(module, LOADERS[name](), *also, ckpt_path=path, weights_only=False)
        return module.seen

    result: dict[str, Any] = {}
    steps = _COUNT // _BATCH
    for name in LOADERS:
        for validates in (False, True):
            own = folder / f"{name}, {validates}"
            every = ModelCheckpoint(str(own), "{step}", save_top_k=-1, every_n_train_steps=1)
            end = ModelCheckpoint(
                str(own), "end-{step}", save_top_k=-1, save_on_train_epoch_end=not validates
            )
            whole = train(name, validates, None, [every, end])
            for step, form in ((3, ""), (steps, ""), (steps, "end-"), (steps + 1, "")):
                again = train(name, validates, own / f"{form}step={step}.ckpt", [])
                result[f"{name}, {validates}, {form}{step}"] = whole[step:], again
    return result


def main(folder: Path, part: str, frameworks: list[str]) -> None:
    if RANKS > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # Looked at, not used.
        os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(RANK)}
        where = f"file://{folder}/store-{part}"
        torch.distributed.init_process_group("gloo", where, rank=RANK, world_size=RANKS)
    for framework in frameworks:
        own = folder / framework
        own.mkdir(exist_ok=True)
        seen = globals()[f"with_{framework}"](own, part == "resume")
        name = f"{part}-{framework}-{RANKS}-{RANK}.json"
        (folder / name).write_text(json.dumps(seen))
    if RANKS > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    leave_out_unused_packages()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
