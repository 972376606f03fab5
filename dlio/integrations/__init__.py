"""Use dlio in other frameworks' training loops.

- PyTorch Lightning accepts a `dlio.DataLoader` like any other loader; when it re-creates the loader
  in a distributed run, the options are kept. `dlio.integrations.lightning` adds a strategy, "dlio".
- Hugging Face Accelerate's `prepare` returns a `dlio.DataLoader` unchanged, because the loader
  divides the data among ranks itself.
- Hugging Face's Trainer creates its own loaders; with `TrainerMixin` it creates dlio's.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, Final

import torch

from dlio.errors import UsageError
from dlio.exchange.batch_share import share_of
from dlio.loader.dataloader import DataLoader
from dlio.loader.third_party import accelerate
from dlio.util.input_files import as_usage, read_json
from dlio.util.units import counted
from dlio.util.whole_files import write_whole

__all__ = ["TrainerMixin"]

_LOADER_STATE: Final = "dlio_loader.json"
"""File of a Trainer's checkpoint with the state of the loader of the training data."""


class TrainerMixin:
    """Make Hugging Face's Trainer load its data with dlio.

        class Trainer(dlio.integrations.TrainerMixin, transformers.Trainer):
            loader_options = {"tiers": "ram:8GiB"}

    The loaders divide the data among the ranks themselves. Each sample counts once: ranks' losses
    are weighed by their samples, and predictions come in the order of the data set. Checkpoints
    have the loader's state, for any number of ranks. `loader_options` are passed on to
    `dlio.DataLoader`.
    """

    loader_options: dict[str, Any] = {}  # noqa: RUF012 - the subclass's own

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        accelerate.prepare()  # Trainer keeps a function of it when it is made.

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Train on a batch, as Trainer does, with the weight of this rank's samples. Return the
        loss times the weight, whose mean over ranks is that of the whole batch."""
        above: Any = super()
        share = share_of(inputs)
        if share is None or len(share.counts) == 1:
            return above.training_step(model, inputs, *args, **options)
        items = options.get("num_items_in_batch", args[0] if args else None)
        weight = share.weight
        trainer: Any = self
        if items is not None and trainer.args.average_tokens_across_devices:
            weight = float(share.samples > 0)  # The loss is divided by all ranks' items.
        with _fixed(weight):
            loss = above.training_step(model, inputs, *args, **options)
        return loss * weight if weight else loss.new_zeros(loss.shape)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        trainer, above = self, super()  # type: Any, Any
        # Trainer reports one rank's own losses since the last line of its log.
        trainer._tr_loss = trainer.accelerator.gather(trainer._tr_loss).mean()
        return above._finalize_training(*args, **options)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        above: Any = super()
        return above._get_num_items_in_batch([_counted(each) for each in batch_samples], device)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        above: Any = super()
        above._save_checkpoint(*args, **options)
        trainer: Any = self
        loader = trainer.callback_handler.train_dataloader
        if not isinstance(loader, DataLoader) or not loader.follows_formula():
            return
        trial = options.get("trial", args[1] if len(args) > 1 else None)
        written = f"checkpoint-{trainer.state.global_step}"
        folder = os.path.join(trainer._get_output_dir(trial=trial), written)
        if trainer.is_world_process_zero() and os.path.isdir(folder):
            state = {"loader": loader.state_dict(), "batch": loader.global_batch}
            text = json.dumps(state).encode()
            write_whole(os.path.join(folder, _LOADER_STATE), lambda file: file.write(text))

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        above: Any = super()
        trainer: Any = self
        begun: tuple[int, int] = above._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        path = os.path.join(str(resume_from_checkpoint), _LOADER_STATE)
        if resume_from_checkpoint is None or not os.path.isfile(path):
            return begun
        with as_usage(path, "resume from another checkpoint"):
            saved: Any = read_json(path)
            loader, state = self._train_loader, saved["loader"]
            if not isinstance(loader, DataLoader) or saved["batch"] == loader.global_batch:
                return begun
            # Trainer counts by optimizer steps, of which an epoch has others on other ranks.
            epoch, position, samples = (
                int(state[name]) for name in ("epoch", "position", "samples")
            )
        if position >= samples:
            epoch, position = epoch + 1, 0
        left = -(-(samples - position) // loader.global_batch)
        done, accumulated = len(loader) - left, trainer.args.gradient_accumulation_steps
        if done % accumulated:
            raise UsageError(
                f"{resume_from_checkpoint}: {counted(position, 'sample')} of epoch {epoch} were "
                f"used in batches of {saved['batch']}, and no whole number of optimizer steps is "
                f"left with batches of {loader.global_batch} and {accumulated} accumulated: resume "
                "on as many ranks as before, or from a checkpoint at an epoch's end"
            )
        trainer.state.global_step = epoch * num_update_steps_per_epoch + done // accumulated
        if position:
            loader.load_state_dict(state)
        return epoch, done

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of the training data, shuffled by (seed, epoch)."""
        trainer: Any = self
        if trainer.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        batch_size = trainer._train_batch_size
        self._train_loader = self._loader(trainer.train_dataset, batch_size, shuffle=True)
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of the evaluation data, in order."""
        trainer: Any = self
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = trainer.eval_dataset[data]
        if data is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset")
        return self._loader(data, trainer.args.eval_batch_size, shuffle=False)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return a loader of the data to predict, in order."""
        return self.get_eval_dataloader(test_dataset)

    _train_loader: DataLoader | None = None

    def _loader(self, data: Any, batch_size: int, shuffle: bool) -> DataLoader:
        trainer: Any = self
        args = trainer.args
        workers = args.dataloader_num_workers
        options: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": trainer.data_collator,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "drop_last": args.dataloader_drop_last,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }
        if workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["persistent_workers"] = args.dataloader_persistent_workers
        loader = DataLoader(data, batch_size, shuffle, **{**options, **self.loader_options})
        prepared: DataLoader = trainer.accelerator.prepare(loader)
        return prepared


@contextlib.contextmanager
def _fixed(weight: float) -> Iterator[None]:
    """Have losses inside the `with` block count by a weight."""
    weights = accelerate.loss_weights()
    weights.fixed = weight
    try:
        yield
    finally:
        weights.fixed = None


def _counted(batch: Any) -> Any:
    """Return a batch whose labels are all to be ignored if it repeats samples of other ranks."""
    share = share_of(batch)
    if share is None or share.samples:
        return batch
    labels = {name: batch[name] for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **{name: torch.full_like(each, -100) for name, each in labels.items()}}
