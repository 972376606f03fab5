"""Other people's training loops.

PyTorch Lightning takes a `dlio.DataLoader` as any other: what it re-creates in distributed runs
keeps its options. Hugging Face Accelerate's `prepare` leaves it as it is: it shares the data
itself. Hugging Face's Trainer makes loaders of its own; with the mixin it makes ours. Lightning's
strategy "dlio" is in `dlio.integrations.lightning`.
"""

from typing import Any

from dlio.loader.dataloader import DataLoader

__all__ = ["TrainerMixin"]


class TrainerMixin:
    """Feeds Hugging Face's Trainer from dlio.

        class Trainer(dlio.integrations.TrainerMixin, transformers.Trainer):
            loader_options = {"tiers": "ram:8GiB"}

    The loaders share the data among the ranks themselves. `loader_options` are further options of
    `dlio.DataLoader`.
    """

    loader_options: dict[str, Any] = {}  # noqa: RUF012 - the subclass's own

    def get_train_dataloader(self) -> DataLoader:
        """The training data, shuffled by (seed, epoch)."""
        trainer: Any = self
        if trainer.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        return self._loader(trainer.train_dataset, trainer._train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The evaluation data, in their own order; on every rank the same number of samples."""
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
