"""A data set of images as torch knows them: `len`, `[i]`, `.classes`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dlio.comm import Communicator
from dlio.decode import Crop, Decoder
from dlio.errors import UsageError
from dlio.mount import Mount, mount
from dlio.reader import Reader, open_reader
from dlio.storage.spec import TierSpec, choose_tiers


class Dataset(torch.utils.data.Dataset[tuple[Any, int]]):
    """Images with labels, read through a hierarchy of tiers. Made by `dlio.open`.

    Map-style and picklable: a copy in another process opens its own files. `dataset[i]` is the
    reader's sample i, cropped as it is in epoch `dataset.epoch`, whichever process asks.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        tiers: str | Sequence[TierSpec] | None,
        image_size: int,
        train: bool,
        transform: Callable[[torch.Tensor], object] | None,
        seed: int,
        on_error: str,
    ) -> None:
        self.reader = reader
        self.tiers = tiers
        self.image_size = image_size
        self.train = train
        self.transform = transform
        self.seed = seed
        self.on_error = on_error
        self.epoch = 0
        self._mount: Mount | None = None
        self._decoder = Decoder(Crop(image_size, train), seed)

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def classes(self) -> Sequence[str]:
        """Class names; labels index them."""
        return self.reader.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def targets(self) -> list[int]:
        """The label of each sample."""
        return [int(label) for label in self.reader.labels]

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Sample `index`: (uint8 tensor of shape (3, size, size), or what `transform` makes of
        it; label). Raises IndexError, SourceError, DecodeError."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of a data set of {count}")
        sample = int(index) % count
        samples = np.array([sample], np.int64)
        if self._mount is not None:
            block, place = self.reader.layout.locate(samples)
            payload, _ = self._mount.hierarchy.read(sample, int(block[0]), int(place[0]))
        else:
            payload = self.reader.read(samples)[0]
        values = self.reader.schema.split(payload)
        image, label = values["image"], values["label"]
        assert not isinstance(image, int | float)
        pixels = np.empty((self.image_size, self.image_size, 3), np.uint8)
        uniforms = self._decoder.draw(self.epoch, samples)[0]
        self._decoder.decode(image, self.reader.name(sample), uniforms, pixels)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return self.transform(tensor) if self.transform is not None else tensor, int(label)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops `[i]` gives."""
        self.epoch = epoch

    def mount(self, comm: Communicator, pretend_nodes: int | None = None) -> Mount:
        """The data set's tiers, opened once. Collective the first time. Owned by the data set."""
        if self._mount is None:
            self._mount = mount(self.reader, self.tiers, comm, pretend_nodes)
        return self._mount

    def close(self) -> None:
        """Close tiers and files; what was in shared memory is gone."""
        if self._mount is not None:
            self._mount.close()
            self._mount = None
        self.reader.close()

    def __enter__(self) -> "Dataset":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        state = {key: value for key, value in self.__dict__.items() if key != "_decoder"}
        return {**state, "_mount": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._decoder = Decoder(Crop(self.image_size, self.train), self.seed)

    def __repr__(self) -> str:
        return (
            f"dlio.Dataset({self.path!r}, {len(self)} samples, {len(self.classes)} classes, "
            f"image_size={self.image_size}, train={self.train})"
        )


def open_dataset(
    path: str,
    *,
    tiers: str | Sequence[TierSpec] | None = None,
    image_size: int = 224,
    train: bool = True,
    transform: Callable[[torch.Tensor], object] | None = None,
    seed: int = 0,
    on_error: str = "stop",
) -> Dataset:
    """Open a data set of labelled images; exported as `dlio.open`.

    Args:
        path: a folder of class folders, or what `dlio pack` wrote.
        tiers: `"ram:2GiB,/local/scratch:20GiB"`, per node and fastest first; `"none"` for no
            tier; None for DLIO_TIERS, or RAM as far as a quarter of the free memory goes.
        image_size: side of the square crops.
        train: random resized crops and flips, keyed by (seed, epoch, sample); otherwise the
            middle of the image.
        transform: called with each crop, a uint8 tensor of shape (3, size, size), in a thread.
        seed: of crops and, in a loader, of the order.
        on_error: `stop` at a sample that cannot be read or decoded, or `skip` and count it.

    Raises UsageError for options that cannot work, SourceError when the path is no data set.
    """
    if on_error not in ("stop", "skip"):
        raise UsageError(f"on_error={on_error!r}: choose stop or skip")
    if not 1 <= image_size <= 8192:
        raise UsageError(f"image_size={image_size}: choose 1 to 8192 pixels")
    choose_tiers(tiers, 0)
    reader = open_reader(path)
    names = [name for name, _ in reader.schema.fields]
    if "image" not in names or "label" not in names:
        raise UsageError(f"{path} holds {', '.join(names)}: a loader of images wants image, label")
    return Dataset(
        reader,
        tiers=tiers,
        image_size=image_size,
        train=train,
        transform=transform,
        seed=seed,
        on_error=on_error,
    )
