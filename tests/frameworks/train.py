"""One epoch with a framework's own loop; run as one process, or as ranks of torchrun.

Prints a JSON line a rank: the samples that the model was given, and the type of the loader.
"""

import json
import logging
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import dlio

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
SEEN: list[int] = []


class Coloured(torch.utils.data.Dataset[Any]):
    """Samples that tell who they are."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"pixel_values": torch.full((4,), float(index)), "labels": index % 2}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, pixel_values: Any, labels: Any) -> Any:
        if self.training:
            SEEN.extend(int(value) for value in pixel_values[:, 0])
        loss = torch.nn.functional.cross_entropy(self.layer(pixel_values / 40), labels)
        return {"loss": loss}


def loader() -> dlio.DataLoader:
    return dlio.DataLoader(
        Coloured(), 5, shuffle=True, num_workers=2, mode="global", seed=5, on_error="skip"
    )


def with_lightning() -> dict[str, Any]:
    from tests.lean_lightning import leave_out_unused_packages

    leave_out_unused_packages()
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader())
    used: Any = trainer.train_dataloader
    return {"used": used}


def with_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    given = loader()
    model, optimizer, used = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), given)
    assert used is given
    ends = []
    for batch in used:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert accelerator.gradient_state.active_dataloader is None
    return {"used": used}


def with_transformers() -> dict[str, Any]:
    import transformers

    from dlio.integrations import TrainerMixin

    class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
        loader_options = {"mode": "global", "on_error": "skip"}  # noqa: RUF012

    args = transformers.TrainingArguments(
        output_dir=sys.argv[2],
        num_train_epochs=1,
        per_device_train_batch_size=5,
        dataloader_num_workers=2,
        use_cpu=True,
        seed=5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=Net(), args=args, train_dataset=Coloured(), eval_dataset=Coloured())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    return {"used": trainer.callback_handler.train_dataloader}


if __name__ == "__main__":
    used = {
        "lightning": with_lightning,
        "accelerate": with_accelerate,
        "transformers": with_transformers,
    }[sys.argv[1]]()["used"]
    line = (
        json.dumps(
            {
                "seen": SEEN,
                "class": f"{type(used).__module__}.{type(used).__name__}",
                "options": [used.mode, used.seed, used.on_error],
                "engine": used.stats()["engine"],
            }
        )
        + "\n"
    )
    os.write(1, line.encode())  # At once: lines of several ranks must not mix.
    if dist.is_initialized():
        dist.destroy_process_group()
