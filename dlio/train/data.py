"""The data sets of a run, opened on every rank."""

from typing import Any

import torch

from dlio.comm import Communicator
from dlio.image import transforms
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset, open_dataset
from dlio.train.config import TrainConfig


def open_data(
    comm: Communicator, path: str, config: TrainConfig, tiers: Any, training: bool
) -> Dataset:
    """Open a data set; rank 0 first, so that the others find its listing in the cache."""
    size, scale = config.image_size, (config.crop_scale, 1.0)
    drawn = transforms.Compose(
        [transforms.RandomResizedCrop(size, scale), transforms.RandomHorizontalFlip()]
    )
    options: dict[str, Any] = {
        "tiers": tiers,
        "image_size": size,
        "train": training,
        "transform": drawn if training else None,
        "seed": config.seed,
        "on_error": config.on_error,
        "replicas": config.replica if training else (),
    }
    if comm.rank == 0:
        data = open_dataset(path, **options)
        comm.barrier()
        return data
    comm.barrier()
    return open_dataset(path, **options)


def make_loader(data: Dataset, config: TrainConfig, training: bool) -> DataLoader:
    return DataLoader(
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


def difference(one: Any, other: Any) -> str:
    """Between two lists of classes, in words."""
    names = sorted(set(one) ^ set(other))
    return f"{len(names)} differ, such as {names[:3]}" if names else "in another order"
