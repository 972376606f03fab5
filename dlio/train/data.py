"""Open the data sets and loaders of a run on every rank."""

from collections.abc import Iterable

import torch

from dlio.comm import Communicator
from dlio.data.reader import open_reader
from dlio.data.schema import IMAGES, Schema
from dlio.image import transforms
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset
from dlio.loader.opened import open_dataset
from dlio.storage.spec import Tiers
from dlio.train.config import TrainConfig

__all__ = ["difference", "is_table", "make_loader", "open_data"]


def open_data(
    comm: Communicator,
    path: str,
    config: TrainConfig,
    tiers: Tiers | None,
    training: bool,
) -> Dataset:
    """Open a data set, on rank 0 first so that the others find its listing in the cache.

    Args:
        tiers: specification of the tiers to cache it in; None for the default.
        training: apply random crops and flips to images, and read from the replicas too.
    """
    size, scale = config.image_size, (config.crop_scale, 1.0)
    drawn = transforms.Compose(
        [transforms.RandomResizedCrop(size, scale), transforms.RandomHorizontalFlip()]
    )

    def open_it() -> Dataset:
        reader = open_reader(path)
        return open_dataset(
            reader,
            tiers=tiers,
            image_size=size,
            train=training,
            transform=drawn if training and not is_table(reader.schema) else None,
            seed=config.seed,
            on_error=config.on_error,
            replicas=config.replica if training else (),
        )

    if comm.rank == 0:
        data = open_it()
        comm.barrier()
        return data
    comm.barrier()
    return open_it()


def is_table(schema: Schema) -> bool:
    """True if samples are rows of numbers and texts, and not of images or larger arrays."""
    kinds = schema.kinds.values()
    return (
        schema.structure is None
        and not any(kind.text in IMAGES for kind in kinds)
        and any(kind.scalar or kind.text == "text" or len(kind.shape) == 1 for kind in kinds)
        and all(len(kind.shape) <= 1 for kind in kinds)
    )


def make_loader(data: Dataset, config: TrainConfig, training: bool) -> DataLoader:
    """Make the loader of a data set; it shuffles and records its trace only for training."""
    loader = DataLoader(
        data,
        config.batch_size,
        training,
        num_workers=config.workers,
        mode=config.shuffle,
        source_order=config.source_order if training else "sample",
        pretend_nodes=config.pretend_nodes,
        pin_memory=torch.cuda.is_available(),
        trace=config.trace_out if training else None,
    )
    loader.deals = False  # The worker does, for all of its loaders.
    return loader


def difference(one: Iterable[str], other: Iterable[str]) -> str:
    """Describe the difference between two lists of class names."""
    names = sorted(set(one) ^ set(other))
    return f"{len(names)} differ, such as {names[:3]}" if names else "in another order"
