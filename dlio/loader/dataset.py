"""A data set as torch knows them: `len`, `[i]`, `.classes`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dlio.comm import Communicator
from dlio.data.reader import Reader, open_reader
from dlio.data.replicas import replicated
from dlio.data.schema import Buffer
from dlio.errors import UsageError
from dlio.image.crop import Crop
from dlio.image.decode import Decoder
from dlio.image.transforms import fused
from dlio.loader.sample import decode_sample, image_and_label
from dlio.storage.mount import Mount, mount
from dlio.storage.spec import TierSpec, choose_tiers, decoded_spec


class Dataset(torch.utils.data.Dataset[Any]):
    """Samples that are read through a hierarchy of tiers. Made by `dlio.open`.

    Map-style and picklable: a copy in another process opens its own files. `dataset[i]` is the
    reader's sample i: (crop, label) for labelled images, cropped as in epoch `dataset.epoch`,
    whichever process asks; otherwise its fields, see `dlio.loader.sample.decode_sample`.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        tiers: str | Sequence[TierSpec] | None,
        image_size: int | None,
        train: bool,
        transform: Callable[[Any], object] | None,
        seed: int,
        on_error: str,
        finish: Callable[[Buffer, int], Any] | None = None,
    ) -> None:
        self.reader = reader
        found = image_and_label(reader.schema)
        crop, self.transform, self.batch_transform = fused(transform)
        """What is done to a sample behind its crop, and to a batch of them where it lies."""
        self.crops = found is not None and (image_size is not None or crop is not None)
        """Whether samples are crops of images, with labels."""
        self.image_field, self.label_field = found or ("", "")
        self.tiers = tiers
        self.image_size = image_size
        self.train = train
        self.crop = Crop(image_size or 1, train) if crop is None else crop
        if not self.crops:
            self.transform, self.batch_transform = transform, None
        self.seed = seed
        self.on_error = on_error
        self.finish = finish
        """Makes a sample of (payload, index), where another library's data set is read."""
        self.epoch = 0
        self._mount: Mount | None = None
        self._decoder = self._made_decoder()

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

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, through `transform` if there is one.

        Labelled images: (uint8 tensor of shape (3, size, size), or what `transform` makes of it;
        label). Raises IndexError, SourceError, DecodeError.
        """
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
        if self.finish is not None:
            return self.finish(payload, sample)
        name = self.reader.name(sample)
        if not self.crops:
            whole = decode_sample(self.reader.schema, payload, name)
            return self.transform(whole) if self.transform is not None else whole
        values = self.reader.schema.split(payload)
        pixels = np.empty((self.crop.size, self.crop.width, 3), np.uint8)
        uniforms = self._decoder.draw(self.epoch, samples)[0]
        self._decoder.decode(values[self.image_field], name, uniforms, pixels)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        made = self.transform(tensor) if self.transform is not None else tensor
        if self.batch_transform is not None:
            made = self.batch_transform(made)
        return made, int(values[self.label_field])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops `[i]` gives."""
        self.epoch = epoch

    def retier(self, tiers: str | Sequence[TierSpec]) -> None:
        """Choose other tiers. Raises UsageError once they are in use."""
        choose_tiers(tiers, 0)
        if self._mount is not None:
            raise UsageError(f"tiers={tiers!r}: {self.path} is in use with tiers={self.tiers!r}")
        self.tiers = tiers
        self._decoder = self._made_decoder()

    def _made_decoder(self) -> Decoder:
        kept = decoded_spec(self.tiers) is not None
        if kept and not self.crops:
            raise UsageError(
                f"tiers={self.tiers!r}: {self.path} is not cropped here, and decoded tiers keep "
                "labelled images for crops: leave :decoded out"
            )
        return Decoder(self.crop, self.seed, kept)

    @property
    def mounted(self) -> Mount | None:
        """The tiers, once they are open."""
        return self._mount

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
        self._decoder = self._made_decoder()

    def __repr__(self) -> str:
        return (
            f"dlio.Dataset({self.path!r}, {len(self)} samples, {len(self.classes)} classes, "
            f"image_size={self.image_size}, train={self.train})"
        )


def open_dataset(
    path: Any,
    *,
    tiers: str | Sequence[TierSpec] | None = None,
    image_size: int | None = 224,
    train: bool = True,
    transform: Callable[[Any], object] | None = None,
    seed: int = 0,
    on_error: str = "stop",
    replicas: Sequence[str] = (),
    **options: Any,
) -> Dataset:
    """Open a data set; exported as `dlio.open`.

    Args:
        path: of any format that `dlio ls` knows: a folder, a file, a pattern, a URL, a list of
            them, with `::` and the names of fields behind them (`file.h5::images,labels`); or a
            map-style data set of torch's.
        tiers: `"ram:2GiB,/local/scratch:20GiB"`, per node and fastest first; `"none"` for no
            tier; None for DLIO_TIERS, or RAM as far as a quarter of the free memory goes.
        image_size: side of the square crops of labelled images; None for samples as they are.
        train: random resized crops and flips, keyed by (seed, epoch, sample); otherwise the
            middle of the image.
        transform: of `dlio.transforms`, beginning with what is cut out, which takes the place of
            `image_size` and `train`; or anything that can be called, in a thread, with each crop,
            a uint8 tensor of shape (3, size, size), or each sample that is no labelled image.
        seed: of crops and, in a loader, of the order.
        on_error: `stop` at a sample that cannot be read or decoded, or `skip` and count it.
        replicas: other places where the same data set lies. Each read goes to the copy that is
            expected to give it first, by what `dlio bench tiers` measured and by how long reads
            take; and to another one when it fails.
        options: the reader's own, such as `select` for a slab of every HDF5 or Zarr sample.

    Raises UsageError for options that cannot work, SourceError when the path is no data set.
    """
    if on_error not in ("stop", "skip"):
        raise UsageError(f"on_error={on_error!r}: choose stop or skip")
    if image_size is not None and not 1 <= image_size <= 8192:
        raise UsageError(f"image_size={image_size}: choose 1 to 8192 pixels")
    choose_tiers(tiers, 0)
    return Dataset(
        replicated([open_reader(each, **options) for each in (path, *replicas)]),
        tiers=tiers,
        image_size=image_size,
        train=train,
        transform=transform,
        seed=seed,
        on_error=on_error,
    )
