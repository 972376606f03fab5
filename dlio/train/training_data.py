"""Open the data sets and loaders of a run on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlio.data.reader import Reader, open_split
from dlio.data.replicas import replicated
from dlio.data.splits import reading_options
from dlio.image import crop_transforms
from dlio.loader.dataloader import DataLoader
from dlio.loader.dataset import Dataset
from dlio.storage.tier_spec import Tiers, decoded_spec
from dlio.train.array_fields import is_arrays, is_table
from dlio.train.rank_layout import RankLayout
from dlio.train.train_options import TrainOptions


@dataclass(frozen=True, slots=True)
class RunData:
    """Opens the data sets of a run, and their loaders, as its options and its layout want."""

    config: TrainOptions
    layout: RankLayout

    def open(
        self, path: str, tiers: Tiers | None, training: bool, split: str | None = None
    ) -> Dataset:
        """Open a data set, or one split of it, on rank 0 first so that the others find its listing
        in the cache.

        None for `tiers` stands for the default. In training, crops and flips of images are random,
        and replicas are read from, too.
        """
        comm = self.layout.comm
        if comm.rank:
            comm.barrier()
        options, size = self.config.data, self.config.model.image_size
        replicas = options.replica if training else ()
        reader = replicated(
            [open_split(each, split, options.reader_option) for each in (path, *replicas)]
        )
        drawn = None
        if training and not is_table(reader.schema) and not is_arrays(reader.schema):
            drawn = crop_transforms.Compose(
                [
                    crop_transforms.RandomResizedCrop(size, (options.crop_scale, 1.0)),
                    crop_transforms.RandomHorizontalFlip(),
                    *self._mixtures(reader),
                ]
            )
        given: dict[str, Any] = {
            "tiers": tiers,
            "image_size": size,
            "train": training,
            "transform": drawn,
            "seed": options.seed,
            "on_error": options.on_error,
        }
        places = {"replicas": replicas, **reading_options(split, None, options.reader_option)}
        data = self.layout.open(path, reader, given, places)
        if comm.rank == 0:
            comm.barrier()
        return data

    def _mixtures(self, reader: Reader) -> list[Callable[..., Any]]:
        """Return the transforms of --mixup and --cutmix: of each step's global batch, so that
        images do not depend on the number of ranks and threads."""
        options = self.config.data
        kinds = (crop_transforms.MixUp, options.mixup), (crop_transforms.CutMix, options.cutmix)
        wanted = [(kind, alpha) for kind, alpha in kinds if alpha is not None]
        if not wanted:
            return []
        classes = len(reader.classes) or int(reader.labels.max()) + 1
        made = [kind(alpha=alpha, num_classes=classes) for kind, alpha in wanted]
        mixer = made[0] if len(made) == 1 else crop_transforms.RandomChoice(made)
        # Pixels stay 0 to 255: they are normalised on the device.
        return [crop_transforms.ToDtype(torch.float32), mixer]

    def loader(
        self, data: Dataset, training: bool, device: torch.device | None = None
    ) -> DataLoader:
        """Make the loader of a data set; it shuffles and records its trace only for training.

        It hands out batches on the model's device where this decodes or keeps images, and where a
        GPU can have crops ahead of their use, without boxes or masks whose values the host checks.
        """
        options = self.config.batches
        on_gpu = device is not None and device.type == "cuda"
        hands_over = (
            options.decode == "device"
            or decoded_spec(data.tiers, "gpu") is not None
            or (on_gpu and data.crops and not data.recipe.moves)
        )
        loader = DataLoader(
            data,
            options.batch_size,
            training,
            num_workers=options.workers,
            mode=options.shuffle,
            source_order=options.source_order if training else "sample",
            pretend_nodes=self.config.ranks.pretend_nodes,
            pin_memory=torch.cuda.is_available(),
            trace=options.trace_out if training else None,
            device=device if hands_over else None,
            decode=options.decode,
            mesh=self.layout.data_mesh,
        )
        loader.assigns_batches = False  # The worker does, for all of its loaders.
        return loader
