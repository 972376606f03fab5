"""A data set as torch expects it (`len`, `[i]`, `.classes`), and how it is opened: `dlio.open`."""

import copy
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dlio.comm import Communicator
from dlio.data.patches import PatchOptions
from dlio.data.reader import open_parts, open_reader
from dlio.data.reader_contract import Reader, abilities_of
from dlio.data.replicas import replicated
from dlio.data.schema import Buffer
from dlio.data.selection import SelectionReader
from dlio.errors import UsageError
from dlio.image.crop import Crop
from dlio.image.picture import check_crops
from dlio.loader import dataset_views
from dlio.loader.contract import Sample, Transform, UserDataset
from dlio.loader.patch_source import PatchRecipe, PatchSource, open_patches
from dlio.loader.recipe import CropRecipe, Recipe
from dlio.loader.sample_recipes import (
    USUAL_SIDE,
    ForeignDecoder,
    ImageSize,
    MappedRecipe,
    recipe_for,
    sides_of,
)
from dlio.plan.order import Order
from dlio.storage.mount import Mount, MountOptions, mount
from dlio.storage.tier_spec import Tiers, check_folders, choose_tiers, decoded_spec
from dlio.util.arguments import (
    MOST_SEED,
    PathText,
    check_callable,
    check_flag,
    named,
    number_in,
    one_of,
    paths_in,
    whole_number,
)
from dlio.util.closable import Closable
from dlio.util.kept_memory import counted_together
from dlio.util.units import counted

if TYPE_CHECKING:
    from dlio.loader.gallery.sample_page import SamplePage

_MOST_PIXELS: Final = 8192
_MOST_REQUESTS: Final = 4096
MOST_SHOWN: Final = 1000
"""Samples of a page, at most."""


def open_dataset(
    path: UserDataset | PathText | Sequence[PathText],
    *,
    tiers: Tiers | None = None,
    image_size: int | Sequence[int] | Literal["auto"] | None = "auto",
    train: bool = True,
    crops: int = 1,
    transform: Transform | None = None,
    seed: int | None = None,
    on_error: str = "stop",
    replicas: PathText | Sequence[PathText] = (),
    follow_links: bool | None = None,
    trust: bool | None = None,
    requests: int | None = None,
    patch: int | Sequence[int | None] | None = None,
    patches_per_volume: int = 1,
    patch_stride: int | Sequence[int] | None = None,
    pad: float | Mapping[str, float] | None = None,
    window: int | Sequence[int] | None = None,
    min_visible: float = 0.0,
    format: str | None = None,  # noqa: A002 (its name in the CLI, too)
    split: str | None = None,
    **options: object,
) -> "Dataset":
    """Open a data set; exported as `dlio.open`.

    Args:
        path: of any format that `dlio ls` knows: a folder, a file, a pattern, a URL, a list of
            them, followed by `::` and names of fields if wanted (`file.h5::images,labels`); or a
            map-style data set of torch. Paths may be of pathlib.
        tiers: `"ram:2GiB,/local/scratch:20GiB"`, bytes per node, fastest first; `"none"` for no
            tiers; None for DLIO_TIERS, or for RAM up to a quarter of the free memory.
            `"gpu:40GiB:decoded"` keeps decoded images on each rank's device.
        image_size: side of the square crops of images in pixels, or (height, width); None for
            samples as they are. By default 224 pixels without `transform`, and no crops but its own
            with it. Boxes, masks and keypoints move with the crop, which is made by default.
        train: random resized crops and flips, keyed by (seed, epoch, sample); otherwise the
            middle of the image.
        crops: random crops of each image, as self-supervised learning takes them. Samples of more
            than one have shape (crops, 3, size, size), out of one decoding.
        transform: one of `dlio.transforms`, or a pipeline of torchvision. A crop that it begins
            with replaces `image_size` and `train`; without one it gets whole images, or the crops
            of a given `image_size`. Or any callable, which is called in a thread, with each image
            or crop as a uint8 tensor of shape (3, height, width); with `image_size=None`, and where
            samples have no image, with each sample.
        seed: of crops, transforms and, in a loader, of the order. None follows torch's:
            `torch.manual_seed`, or the loader's `generator`.
        on_error: `stop` at a sample that cannot be read or decoded, or `skip` and count it.
        replicas: other places of the same data set. Each read goes to the copy that is expected
            to be fastest, by the measurements of `dlio bench tiers` and by the time that reads
            take; and to another copy when it fails.
        follow_links: follow symbolic links that lead out of the data set's folder, or refuse them;
            None for DLIO_FOLLOW_LINKS, by default no.
        trust: read the data set without the guards against files that strangers made: a file may
            then expand to more than a quarter of the memory, and HDF5, Parquet and Arrow files are
            not tried in another process first. None for DLIO_TRUST, by default no.
        requests: requests in flight from one rank to the source, at most; for a map-style data set
            the samples that it is asked for at a time. By default a number that suits the place,
            and up to 64 samples of a map-style data set, as their latency makes worth it.
        patch: size of patches of volumes along the last dimensions of the arrays, None for a whole
            one: `(64, 64, 64)`. Volumes are files, or the rows of arrays that have one dimension
            more. Places are random, keyed by (seed, epoch, sample), or the middle if `train` is
            False. Tiers hold chunks, and a patch reads those that it touches.
        patches_per_volume: patches of each volume in an epoch.
        patch_stride: patches on a grid, at this distance along each dimension, for evaluation;
            samples have a `position` and the number of their `volume`, too.
        pad: value around volumes that are smaller than a patch, for all fields or by name.
        window: (steps, stride) for windows of consecutive rows, such as steps of time, beginning
            at every `stride`-th one; all in one file.
        min_visible: least share of a box's area that a crop must show for the box to stay, 0 to 1;
            boxes without any area left are always dropped.
        format: reader of a folder that several formats fit, such as `tar`; see `dlio ls`.
        split: the one of several splits to read, such as `train` or `val`; `all` for all of them.
        options: of the reader; `dlio ls` names the format:
            coco: `pictures`, `masks`, `keypoints`, `crowds`, `labels`, `outside`.
            arrow, hdf5, mds, parquet, tables, tar, tfrecord, zarr: `label`, the field that is it.
            arrow, parquet: `columns`, numbers that become one array.
            folder: `layout`, `table`, `label`.
            hdf5: `select` (a slab of every sample), `samples` (the axis that counts them).
            masks: `images`, `masks`, `mask_suffix`.
            tables (NumPy, CSV): `select`, `columns`, `separator`, `samples`.
            tar: `fields`. tokens: `dtype`. torch (an object): `key`, `requests`. idx: `select`.
            voc: `outside`, `first_pixel`. yolo: `masks`, `outside`. zarr: `select`, `missing`.
            They are described in the guide on formats.

    Raises UsageError for options that cannot work, SourceError when the path is not a data set.
    """
    check_flag("follow_links", follow_links, optional=True)
    check_flag("trust", trust, optional=True)
    chosen = {"format": format, "split": split}
    options |= {name: value for name, value in chosen.items() if value is not None}
    size, crops, seed = check_options(tiers, image_size, train, crops, transform, seed, on_error)
    min_visible = number_in("min_visible", min_visible, 0, "a share of a box's area")
    if min_visible > 1:
        raise UsageError(f"min_visible={min_visible:g}: give a share of a box's area, 0 to 1")
    if requests is not None:
        requests = whole_number("requests", requests, 1, _MOST_REQUESTS)
        if not isinstance(path, str | os.PathLike | list | tuple):
            options["requests"] = requests
    places = [path, *paths_in("replicas", replicas)]
    cutting = PatchOptions.of(patch, patches_per_volume, patch_stride, window, pad, train)
    patches = None
    if cutting is not None:
        if options.get("select") is not None:
            raise UsageError("select= and patch= or window= exclude each other: leave one out")
        if crops > 1:
            raise UsageError("crops= are of images: with patch= give patches_per_volume=")
        size = None
        with counted_together():
            copies = [
                open_parts(each, follow_links=follow_links, trust=trust, **options)
                for each in places
            ]
        patches = open_patches(copies, cutting, options)
        reader = cast(Reader, patches.patches)
    else:
        with counted_together():
            opened = [
                open_reader(each, follow_links=follow_links, trust=trust, **options)
                for each in places
            ]
        reader = replicated(opened)
    return Dataset(
        reader,
        tiers=tiers,
        image_size=size,
        train=train,
        transform=transform,
        seed=seed,
        on_error=on_error,
        requests=requests,
        patches=patches,
        min_visible=min_visible,
        crops=crops,
    )


def check_options(
    tiers: Tiers | None,
    image_size: int | Sequence[int] | Literal["auto"] | None,
    train: bool,
    crops: int,
    transform: Transform | None,
    seed: int | None,
    on_error: str,
) -> tuple[ImageSize, int, int | None]:
    """Check options of `dlio.open` and `dlio.mix`; return (image_size, crops, seed) as integers."""
    choose_tiers(tiers, 0)
    check_folders(tiers)
    size: ImageSize = None
    if isinstance(image_size, str) and image_size == "auto":
        size = "auto" if transform else USUAL_SIDE
    elif isinstance(image_size, str) or (
        isinstance(image_size, list | tuple) and len(image_size) != 2
    ):
        raise UsageError(
            f"{named('image_size', image_size)}: give a whole number of pixels, (height, width), "
            "'auto' or None"
        )
    elif isinstance(image_size, list | tuple):
        height, width = (
            whole_number("image_size", side, 1, _MOST_PIXELS, "pixels") for side in image_size
        )
        size = height if height == width else (height, width)
    elif image_size is not None:
        size = whole_number("image_size", image_size, 1, _MOST_PIXELS, "pixels")
    check_flag("train", train)
    check_callable("transform", transform)
    one_of("on_error", on_error, ("stop", "skip"))
    if seed is not None:
        seed = whole_number("seed", seed, 0, MOST_SEED)
    return size, check_crops(crops, train), seed


class Dataset(torch.utils.data.Dataset[Sample], Closable):
    """Samples that are read through a hierarchy of tiers. Made by `dlio.open`.

    Map-style and picklable: a copy in another process opens its own files. `dataset[i]` is the
    reader's sample i: (crop, label) for labelled images, with the crop of epoch `dataset.epoch`
    whichever process asks; (crop, target) for images with boxes or masks, see
    `dlio.loader.picture_targets`; {"image": crop} for unlabelled ones; otherwise the sample's
    fields, see `dlio.loader.sample.decode_sample`.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        tiers: Tiers | None = None,
        image_size: ImageSize = None,
        train: bool = False,
        transform: Transform | None = None,
        seed: int | None = None,
        on_error: str = "stop",
        finish: ForeignDecoder | None = None,
        requests: int | None = None,
        patches: PatchSource | None = None,
        min_visible: float = 0.0,
        crops: int = 1,
        contiguous: bool = False,
    ) -> None:
        self.reader = reader
        self._contiguous = contiguous
        self._crops = crops
        self.min_visible = min_visible
        self._patches = patches
        self.requests = requests
        self.tiers = tiers
        self.image_size = image_size
        self.train = train
        self.given_seed = seed
        """None for torch's, which `seed` is then."""
        self._seeds: tuple[int, int | None] = (0, None)
        """The seed followed last, and torch's at that time."""
        self.on_error = on_error
        self.epoch = 0
        self._passed = 0
        """The epoch that a loader's pass has set last."""
        self._transform = transform
        self._finish = finish
        self.maps: tuple[Callable[[Sample], Sample], ...] = ()
        """Functions of each sample, see `map`."""
        self._mount: Mount | None = None
        self._recipe = self._early_recipe()

    @property
    def path(self) -> str:
        return self.reader.path

    @property
    def seed(self) -> int:
        """Seed of crops and transforms: the given one, or that of torch or of the last pass."""
        if self.given_seed is not None:
            return self.given_seed
        seed, followed = self._seeds
        # Workers of torch's loader have a seed of their own each; samples are not theirs.
        if followed is None or get_worker_info() is None:
            now = torch.initial_seed()
            if now != followed:
                seed = now & MOST_SEED
                self._seeds = seed, now
        return seed

    def follow_seed(self, seed: int) -> None:
        """Take the seed of a loader's pass, unless one was given, until torch is seeded anew."""
        self._seeds = seed, torch.initial_seed()

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
    def recipe(self) -> Recipe:
        """How payloads become samples."""
        if self._recipe is None:  # In a job of several ranks, one inspects the data set for all.
            self._recipe = self._make_recipe()
        if self._recipe.draws and self._recipe.seed != self.seed:
            self._recipe = self._recipe.seeded(self.seed)
        return self._recipe

    @property
    def crops(self) -> bool:
        """True if samples are crops of images."""
        return self.recipe.crops

    @property
    def has_classes(self) -> bool:
        """True if samples are crops of images, each with the number of its class."""
        return isinstance(self.recipe, CropRecipe) and self.recipe.companion.is_class

    @property
    def crop(self) -> Crop:
        """The rule for the part of an image that a sample shows."""
        if isinstance(self.recipe, CropRecipe):
            return self.recipe.crop
        height, width = sides_of(self.image_size)
        across = None if width == height else width
        return Crop(height or 1, self.train, across=across, crops=self._crops)

    @property
    def transform(self) -> Transform | None:
        """User's transform of a sample, without the steps that are done by the crop or a batch."""
        return self.recipe.transform

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: SupportsIndex | slice) -> Sample:
        """Return sample `index`, through `transform` if there is one.

        Labelled images: (uint8 tensor of shape (3, size, size), or the transform's result;
        label). A slice gives a view, a `torch.utils.data.Subset` that a loader reads as it reads
        this data set. Raises IndexError, TypeError, SourceError, DecodeError.
        """
        count = len(self)
        if isinstance(index, slice):
            try:
                return torch.utils.data.Subset(self, range(*index.indices(count)))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{named('index', index)}: {error}") from None
        try:
            number = operator.index(index)
        except (TypeError, ValueError):
            raise TypeError(
                f"{named('index', index)}: a data set takes a whole number or a slice; for several "
                "samples, torch.utils.data.Subset(data, [0, 5])"
            ) from None
        if not -count <= number < count:
            raise IndexError(f"sample {number} of a data set of {count}")
        sample = number % count
        return self.recipe.one(self.epoch, sample, self._payload(sample))

    def _payload(self, sample: int) -> Buffer:
        if self._mount is None:
            return self.reader.read(np.array([sample], np.int64))[0]
        return self._mount.hierarchy.read_one(sample)[0]

    def show(self, count: int = 12, *, shuffle: bool = True, epochs: int = 2) -> "SamplePage":
        """Return a page of samples, whole and as a loader gives them, with their labels or targets.

        A notebook shows it by itself; elsewhere, `data.show().save("page.html")`.

        Args:
            count: number of samples.
            shuffle: in the order of a shuffled epoch; otherwise the first ones.
            epochs: whose random crops are shown, from `epoch` on.
        """
        from dlio.loader.gallery.sample_page import make_page

        count = min(whole_number("count", count, 1, MOST_SHOWN), len(self))
        epochs = whole_number("epochs", epochs, 1, MOST_SHOWN)
        check_flag("shuffle", shuffle)
        order = Order(len(self), self.seed, self.epoch, shuffled=shuffle)
        samples = order.samples(np.arange(count, dtype=np.int64)).tolist()
        last = epochs if self.recipe.is_random else 1
        return make_page(self.recipe, samples, range(self.epoch, self.epoch + last), self._payload)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops `[i]` returns."""
        self.epoch = whole_number("epoch", epoch)

    def follow_epoch(self, epoch: int) -> None:
        """Take the epoch of a loader's pass, unless the user has chosen one."""
        if self.epoch == self._passed:
            self.epoch = self._passed = epoch

    def retier(self, tiers: Tiers) -> None:
        """Replace the tiers. Raises UsageError if they are already in use."""
        choose_tiers(tiers, 0)
        check_folders(tiers)
        if self._mount is not None:
            raise UsageError(f"tiers={tiers!r}: {self.path} is in use with tiers={self.tiers!r}")
        self.tiers = tiers
        self._recipe = self._early_recipe()

    def with_reader(self, reader: Reader, tiers: Tiers | None = None) -> "Dataset":
        """Return a data set of another reader with the options of this one. Its tiers are this
        one's for None."""
        tiers = self.tiers if tiers is None else tiers
        # Not of this class: chosen samples of a mixture have no weights.
        made = Dataset.__new__(Dataset)
        changed = {"reader": reader, "tiers": tiers, "epoch": 0, "_passed": 0}
        made.__setstate__({**self.__getstate__(), **changed})
        return made

    def with_maps(self, maps: tuple[Callable[[Sample], Sample], ...]) -> "Dataset":
        """Return a copy of this data set, not yet mounted, with these functions of samples."""
        made = copy.copy(self)
        made.maps = maps
        made._recipe = made._early_recipe()
        return made

    def where(
        self, field: str, wanted: Callable[[Any], Any] | Sequence[Any] | str | int | float | bool
    ) -> "Dataset":
        """Return a view of the samples with wanted values of a field; see `dataset_views`.

        Args:
            field: a name from the schema, such as `label`; `class` for names of classes. Labels
                come from the index; other fields are read in one pass, and images not decoded.
            wanted: a predicate, of the array of all values or of one value; or a value, or a list
                of values.

        Raises UsageError for an unknown field and if no sample is left.
        """
        return self.chosen(dataset_views.where(self.reader, field, wanted))

    def split(
        self, by: str | Callable[[str], Any] | None = None, seed: int = 0, **parts: float
    ) -> "dict[str, Dataset]":
        """Return disjoint views that together hold all samples, `split(train=0.9, val=0.1)`.

        A sample's part follows from a hash of its key: it is the same in every process, on every
        machine, and stays when other samples are added. So parts have about the given sizes.

        Args:
            by: the key: None for the sample's name; a field, or a function of the name, for groups
                that must stay together, such as patients.
            seed: of the hash.
            parts: fraction of each part, by name; their sum is 1.

        Raises UsageError for fractions that cannot work, and for a part without samples.
        """
        chosen = dataset_views.split(self.reader, by, seed, parts)
        return {name: self.chosen(samples) for name, samples in chosen.items()}

    def map(self, function: Callable[[Sample], Sample], kept: bool = False) -> "Dataset":
        """Return a data set whose samples are `function(sample)` of those of this one.

        Args:
            function: gets a sample as `[i]` returns it; called in threads.
            kept: tiers keep the results, stored without pickle, and each is computed once. Results
                are tensors, arrays, numbers, text, bytes or Pillow images, nested, the same each
                time; if their sizes differ, each is computed once more when this is called. False:
                the function is called for each use, and tiers keep what this data set's do.

        Raises UsageError for results that cannot be kept.
        """
        if function is None:
            raise UsageError("map(None): give a function of a sample")
        check_callable("function", function)
        check_flag("kept", kept)
        if not kept:
            return self.with_maps((*self.maps, function))
        made = copy.copy(self)
        if len(self) and (self._transform is not None or self.maps):
            self[0]  # The transform shows whether it draws random numbers.
        made.reader = dataset_views.results_reader(
            self, self.reader, self.recipe.is_random, function
        )
        made.image_size, made._transform, made._finish = None, None, None
        made._patches, made._crops = None, 1
        return made.with_maps(())

    def chosen(self, samples: npt.NDArray[np.int64]) -> "Dataset":
        """Return a view of samples, in this order, read and decoded as this data set's. `samples`
        are their indices, 0 to len - 1; shape (n,), n at least 1."""
        owners = np.zeros(len(samples), np.int64)
        return self.with_reader(SelectionReader([self.reader], owners, samples))

    @property
    def is_plain(self) -> bool:
        """True if samples are the reader's, but for crops and patches."""
        return self._transform is None and self._finish is None and not self.maps

    @property
    def has_patches(self) -> bool:
        """True if samples are patches or windows, see `open_dataset`."""
        return self._patches is not None

    def reads_like(self, other: "Dataset") -> bool:
        """True if the other data set has the same fields, options and tiers as this one."""
        alike = ["tiers", "image_size", "train", "on_error", "given_seed", "_transform", "_finish"]
        alike += ["maps", "_patches", "min_visible", "_crops"]
        return self.reader.schema == other.reader.schema and all(
            getattr(self, name) == getattr(other, name) for name in alike
        )

    @property
    def mounted(self) -> Mount | None:
        """The tiers, once they are open."""
        return self._mount

    def mount(self, comm: Communicator, pretend_nodes: int | None = None) -> Mount:
        """Open the data set's tiers, once; the data set owns them. Collective the first time."""
        if self._mount is None:
            # Patches are cut out of chunks, which lie in tiers of their own: a patch is not a unit
            # of storage, as random ones overlap.
            options, tiers = MountOptions(requests=self.requests, by_sample=True), self.tiers
            chunks = None
            if self._patches is not None:  # Tiers hold chunks.
                chunks = self._patches.mount(tiers, comm, pretend_nodes, self.requests)
                tiers = "none"
            self._mount = mount(self.reader, tiers, comm, pretend_nodes, options=options)
            if chunks is not None:
                self._mount.count_with(chunks)
        return self._mount

    def close(self) -> None:
        """Close tiers and files, and discard the contents of shared memory."""
        if self._mount is not None:
            self._mount.close()
            self._mount = None
            if self._patches is not None:
                self._patches.unmount()
        self.reader.close()
        if self._patches is not None:
            self._patches.close()

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process opens its own files, and draws its recipe from the same options.
        state = {key: value for key, value in self.__dict__.items() if key != "_recipe"}
        return {**state, "_mount": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recipe = self._early_recipe()

    def __repr__(self) -> str:
        return (
            f"dlio.Dataset({self.path!r}, {counted(len(self), 'sample')}, "
            f"{counted(len(self.classes), 'class')}, image_size={self.image_size}, "
            f"train={self.train})"
        )

    def _early_recipe(self) -> Recipe | None:
        """Return the recipe; None as long as the reader has not inspected the data set."""
        return self._make_recipe() if abilities_of(self.reader).is_inspected else None

    def _make_recipe(self) -> Recipe:
        through_decoded = any(decoded_spec(self.tiers, kind) for kind in ("ram", "gpu"))
        if through_decoded and self.maps:
            raise UsageError(
                f"tiers={self.tiers!r}: map() makes samples one by one, and decoded tiers keep "
                "images for crops: leave :decoded out"
            )
        if self._patches is not None:
            recipe: Recipe = PatchRecipe(self.reader, self._patches, self._transform, self.seed)
        else:
            recipe = recipe_for(
                self.reader,
                image_size=self.image_size,
                train=self.train,
                transform=self._transform,
                seed=self.seed,
                through_decoded=through_decoded,
                finish=self._finish,
                min_visible=self.min_visible,
                crops=self._crops,
                contiguous=self._contiguous,
            )
        if through_decoded and (not recipe.crops or recipe.moves):
            raise UsageError(
                f"tiers={self.tiers!r}: {self.path} is not cropped here, or has boxes or masks, "
                "and decoded tiers keep images with a class at most: leave :decoded out"
            )
        return MappedRecipe(recipe, self.maps) if self.maps else recipe
