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
from torch.utils.data import IterableDataset

from dlio.errors import UsageError
from dlio.exchange.batch_share import mark, share_of
from dlio.loader.dataloader import DataLoader
from dlio.loader.third_party import accelerate
from dlio.util.input_files import as_usage, read_json
from dlio.util.printable import log_warning
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
        weight = share.weight
        if self._divides_by_items:
            weight = float(share.samples > 0)
        elif self._group_weight is not None:
            weight = self._group_weight * float(share.samples > 0)
        with _fixed(weight):
            loss = above.training_step(model, inputs, *args, **options)
        return loss * weight if weight else loss.new_zeros(loss.shape)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        trainer, above = self, super()  # type: Any, Any
        # Trainer reports one rank's own losses since the last line of its log.
        trainer._tr_loss = trainer.accelerator.gather(trainer._tr_loss).mean()
        return above._finalize_training(*args, **options)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Predict a batch, as Trainer does. Return a loss whose mean over samples is that of the
        batches, also where it is divided by the items of all ranks."""
        above: Any = super()
        loss, *others = above.prediction_step(model, inputs, *args, **options)
        share = share_of(inputs)
        if loss is not None and share is not None and share.samples and self._divides_by_items:
            loss = loss / share.weight
        return loss, *others

    _divides_by_items = False
    """True if losses are divided by the items of all ranks, such as tokens."""
    _group_weight: float | None = None
    """Weight of this rank's losses that are divided by its own items of accumulated batches."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        above, trainer = super(), self  # type: Any, Any
        items = above._get_num_items_in_batch([_counted(each) for each in batch_samples], device)
        shares = [share for each in batch_samples if (share := share_of(each)) is not None]
        across = trainer.args.average_tokens_across_devices
        self._divides_by_items, self._group_weight = items is not None and across, None
        if items is not None and not across and shares:
            ranks, all_samples = len(shares[0].counts), sum(sum(each.counts) for each in shares)
            self._group_weight = sum(each.samples for each in shares) * ranks / max(1, all_samples)
            return torch.as_tensor(items).clamp(min=1)  # A rank without any would divide 0 by 0.
        return items

    def _prepare_inputs(self, inputs: Any) -> Any:
        above: Any = super()
        prepared, share = above._prepare_inputs(inputs), share_of(inputs)
        if share is not None:
            mark(share, prepared)
        return prepared

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

    def get_train_dataloader(self) -> Any:
        """Return a loader of the training data, shuffled by (seed, epoch) or in order, as
        `train_sampling_strategy` says; Trainer's own for an iterable data set.

        Raises UsageError for other strategies, and samplers of the subclass.
        """
        trainer: Any = self
        if trainer.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        if isinstance(trainer.train_dataset, IterableDataset):
            return self._own_loader("get_train_dataloader")
        strategy = getattr(trainer.args, "train_sampling_strategy", "random")
        if getattr(trainer.args, "group_by_length", False):  # Of earlier versions.
            strategy = "group_by_length"
        if strategy not in ("random", "sequential"):
            raise UsageError(
                f"TrainerMixin: train_sampling_strategy={strategy!r} has an order that is not "
                "dlio's: use 'random' or 'sequential', or Trainer without the mixin"
            )
        self._refuse_sampler("_get_train_sampler")
        batch_size = trainer._train_batch_size
        self._train_loader = self._loader(
            trainer.train_dataset, batch_size, strategy == "random", "Training"
        )
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of the evaluation data, in order; Trainer's own for an iterable data set.

        Raises UsageError for samplers of the subclass.
        """
        trainer: Any = self
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = trainer.eval_dataset[data]
        if data is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset")
        if isinstance(data, IterableDataset):
            return self._own_loader("get_eval_dataloader", data)
        self._refuse_sampler("_get_eval_sampler")
        return self._loader(data, trainer.args.eval_batch_size, False, "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of the data to predict, in order."""
        return self.get_eval_dataloader(test_dataset)

    _train_loader: DataLoader | None = None

    def _own_loader(self, name: str, *args: Any) -> Any:
        """Return the loader that Trainer has without the mixin."""
        trainer: Any = self
        if trainer.args.world_size > 1:
            log_warning(
                "TrainerMixin: Trainer's own loader deals an iterable data set to the ranks, and "
                "fills its last batch up with samples that count twice"
            )
        return getattr(super(), name)(*args)

    def _refuse_sampler(self, name: str) -> None:
        """Raise UsageError if a subclass of Trainer has a sampler of its own."""
        for kind in type(self).__mro__:
            if name in vars(kind) and not kind.__module__.startswith("transformers."):
                raise UsageError(
                    f"TrainerMixin: {kind.__qualname__}.{name} makes a sampler that dlio's loader "
                    "does not follow: remove it, or use Trainer without the mixin"
                )

    def _loader(self, data: Any, batch_size: int, shuffle: bool, description: str) -> DataLoader:
        trainer: Any = self
        args = trainer.args
        if trainer.accelerator.split_batches:
            raise UsageError(
                "TrainerMixin: split_batches divides a batch among the ranks, and batch sizes are "
                "those of a rank here: leave it out of accelerator_config"
            )
        collate = trainer.data_collator
        if hasattr(data, "column_names"):
            data = trainer._remove_unused_columns(data, description=description)
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description=description)
        workers = args.dataloader_num_workers
        options: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": collate,
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
