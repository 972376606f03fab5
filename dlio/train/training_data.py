"""Open the data sets and loaders of a run on every rank."""

from collections.abc import Callable
from typing import Any

import torch

from dlio.data.reader import Reader, open_reader
from dlio.image import crop_transforms
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset
from dlio.storage.tier_spec import Tiers, decoded_spec
from dlio.train.array_fields import is_arrays, is_table
from dlio.train.rank_layout import RankLayout
from dlio.train.train_options import DataOptions, TrainOptions


def open_data(
    layout: RankLayout,
    path: str,
    config: TrainOptions,
    tiers: Tiers | None,
    training: bool,
) -> Dataset:
    """Open a data set, on rank 0 first so that the others find its listing in the cache.

    None for `tiers` stands for the default. In training, crops and flips of images are random, and
    replicas are read from, too.
    """
    options, size = config.data, config.model.image_size
    scale = (options.crop_scale, 1.0)

    def open_it() -> Dataset:
        reader = open_reader(path)
        is_pictures = not is_table(reader.schema) and not is_arrays(reader.schema)
        drawn = None
        if training and is_pictures:
            drawn = crop_transforms.Compose(
                [
                    crop_transforms.RandomResizedCrop(size, scale),
                    crop_transforms.RandomHorizontalFlip(),
                    *_mixtures(options, reader),
                ]
            )
        given: dict[str, Any] = {
            "tiers": tiers,
            "image_size": size,
            "train": training,
            "transform": drawn,
            "seed": options.seed,
            "on_error": options.on_error,
            "replicas": options.replica if training else (),
        }
        return layout.open(path, reader, given)

    if layout.comm.rank == 0:
        data = open_it()
        layout.comm.barrier()
        return data
    layout.comm.barrier()
    return open_it()


def _mixtures(options: DataOptions, reader: Reader) -> list[Callable[..., Any]]:
    """Return the transforms of --mixup and --cutmix: of each step's global batch, so that images
    do not depend on the number of ranks and threads."""
    kinds = (crop_transforms.MixUp, options.mixup), (crop_transforms.CutMix, options.cutmix)
    wanted = [(kind, alpha) for kind, alpha in kinds if alpha is not None]
    if not wanted:
        return []
    classes = len(reader.classes) or int(reader.labels.max()) + 1
    made = [kind(alpha=alpha, num_classes=classes) for kind, alpha in wanted]
    mixer = made[0] if len(made) == 1 else crop_transforms.RandomChoice(made)
    # Pixels stay 0 to 255: they are normalised on the device.
    return [crop_transforms.ToDtype(torch.float32), mixer]


def make_loader(
    data: Dataset,
    config: TrainOptions,
    training: bool,
    layout: RankLayout,
    device: torch.device | None = None,
) -> DataLoader:
    """Make the loader of a data set; it shuffles and records its trace only for training. For the
    device of the model see `_hands_over`."""
    options = config.batches
    loader = DataLoader(
        data,
        options.batch_size,
        training,
        num_workers=options.workers,
        mode=options.shuffle,
        source_order=options.source_order if training else "sample",
        pretend_nodes=config.ranks.pretend_nodes,
        pin_memory=torch.cuda.is_available(),
        trace=options.trace_out if training else None,
        device=device if _hands_over(data, options.decode, device) else None,
        decode=options.decode,
        mesh=layout.data_mesh,
    )
    loader.assigns_batches = False  # The worker does, for all of its loaders.
    return loader


def _hands_over(data: Dataset, decode: str, device: torch.device | None) -> bool:
    """True if the loader hands out batches on the model's device: where the device decodes or keeps
    images, and where a GPU can have crops ahead of their use, without boxes or masks whose
    values the host checks."""
    if decode == "device" or decoded_spec(data.tiers, "gpu") is not None:
        return True
    on_gpu = device is not None and device.type == "cuda"
    return on_gpu and data.crops and not data.recipe.moves
