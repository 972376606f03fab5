"""Opening a data set by its path or object: `dlio.open`."""

import os
from collections.abc import Mapping, Sequence
from typing import Final, cast

from dlio.data.patches import PatchOptions
from dlio.data.reader import Reader, open_parts, open_reader
from dlio.data.replicas import replicated
from dlio.errors import UsageError
from dlio.image.picture import check_crops
from dlio.loader.contract import Transform, UserDataset
from dlio.loader.dataset import Dataset
from dlio.loader.patch_source import open_patches
from dlio.storage.tier_spec import Tiers, choose_tiers
from dlio.util.arguments import (
    PathText,
    check_callable,
    check_flag,
    number_in,
    one_of,
    paths_in,
    whole_number,
)

_MOST_PIXELS: Final = 8192
_MOST_REQUESTS: Final = 4096
_MOST_SEED: Final = 2**63 - 1


def open_dataset(
    path: UserDataset | PathText | Sequence[PathText],
    *,
    tiers: Tiers | None = None,
    image_size: int | None = 224,
    train: bool = True,
    crops: int = 1,
    transform: Transform | None = None,
    seed: int = 0,
    on_error: str = "stop",
    replicas: PathText | Sequence[PathText] = (),
    follow_links: bool | None = None,
    requests: int | None = None,
    patch: int | Sequence[int | None] | None = None,
    patches_per_volume: int = 1,
    patch_stride: int | Sequence[int] | None = None,
    pad: float | Mapping[str, float] | None = None,
    window: int | Sequence[int] | None = None,
    min_visible: float = 0.0,
    **options: object,
) -> Dataset:
    """Open a data set; exported as `dlio.open`.

    Args:
        path: of any format that `dlio ls` knows: a folder, a file, a pattern, a URL, a list of
            them, followed by `::` and names of fields if wanted (`file.h5::images,labels`); or a
            map-style data set of torch. Paths may be of pathlib.
        tiers: `"ram:2GiB,/local/scratch:20GiB"`, bytes per node, fastest first; `"none"` for no
            tiers; None for DLIO_TIERS, or for RAM up to a quarter of the free memory.
            `"gpu:40GiB:decoded"` keeps decoded images on each rank's device.
        image_size: side of the square crops of images, in pixels; None for samples as they are.
            Boxes, masks and keypoints move with the crop.
        train: random resized crops and flips, keyed by (seed, epoch, sample); otherwise the
            middle of the image.
        crops: random crops of each image, as self-supervised learning takes them. Samples of more
            than one have shape (crops, 3, size, size), out of one decoding.
        transform: one of `dlio.transforms`, or a pipeline of torchvision. A crop that it begins
            with replaces `image_size` and `train`; one that changes the size otherwise gets whole
            images. Or any callable, which is called in a thread, with each crop as a uint8 tensor
            of shape (3, size, size), or with each sample that is not cropped.
        seed: of crops, transforms and, in a loader, of the order.
        on_error: `stop` at a sample that cannot be read or decoded, or `skip` and count it.
        replicas: other places of the same data set. Each read goes to the copy that is expected
            to be fastest, by the measurements of `dlio bench tiers` and by the time that reads
            take; and to another copy when it fails.
        follow_links: follow symbolic links that lead out of the data set's folder, or refuse them;
            None for DLIO_FOLLOW_LINKS, by default no.
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
        options: of the reader, such as `select` for a slab of every HDF5 or Zarr sample.

    Raises UsageError for options that cannot work, SourceError when the path is not a data set.
    """
    one_of("on_error", on_error, ("stop", "skip"))
    if image_size is not None:
        image_size = whole_number("image_size", image_size, 1, _MOST_PIXELS, "pixels")
    check_flag("train", train)
    crops = check_crops(crops, train)
    check_flag("follow_links", follow_links, optional=True)
    check_callable("transform", transform)
    seed = whole_number("seed", seed, 0, _MOST_SEED)
    choose_tiers(tiers, 0)
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
        image_size = None
        copies = [open_parts(each, follow_links=follow_links, **options) for each in places]
        patches = open_patches(copies, cutting, options)
        reader = cast(Reader, patches.patches)
    else:
        opened = [open_reader(each, follow_links=follow_links, **options) for each in places]
        reader = replicated(opened)
    return Dataset(
        reader,
        tiers=tiers,
        image_size=image_size,
        train=train,
        transform=transform,
        seed=seed,
        on_error=on_error,
        requests=requests,
        patches=patches,
        min_visible=min_visible,
        crops=crops,
    )
