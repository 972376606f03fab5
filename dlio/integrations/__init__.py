"""Use dlio in other frameworks' training loops.

- PyTorch Lightning accepts a `dlio.DataLoader` like any other loader; when it re-creates the loader
  in a distributed run, the options are kept. `dlio.integrations.lightning` adds a strategy, "dlio".
- Hugging Face Accelerate's `prepare` returns a `dlio.DataLoader` unchanged, because the loader
  divides the data among ranks itself.
- Hugging Face's Trainer creates its own loaders; with `TrainerMixin` it creates dlio's.
"""

from typing import Any

from dlio.loader.dataloader import DataLoader

__all__ = ["TrainerMixin"]


class TrainerMixin:
    """Make Hugging Face's Trainer load its data with dlio.

        class Trainer(dlio.integrations.TrainerMixin, transformers.Trainer):
            loader_options = {"tiers": "ram:8GiB"}

    The loaders divide the data among the ranks themselves. `loader_options` are passed on to
    `dlio.DataLoader`.
    """

    loader_options: dict[str, Any] = {}  # noqa: RUF012 - the subclass's own

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of the training data, shuffled by (seed, epoch)."""
        trainer: Any = self
        if trainer.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        return self._loader(trainer.train_dataset, trainer._train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader of the evaluation data, in order; all ranks get as many samples."""
        trainer: Any = self
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = trainer.eval_dataset[data]
        if data is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset")
        return self._loader(data, trainer.args.eval_batch_size, shuffle=False)

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
