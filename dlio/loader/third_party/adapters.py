"""Data sets of other libraries that dlio understands, and reads through its tiers.

These are torchvision's ImageFolder and DatasetFolder with torchvision's own image loader, whose
images dlio decodes and transforms itself if it knows the pipeline (`why_called`), Hugging
Face `datasets` of images, and torch's Subset and ConcatDataset of those, and of data sets of
`dlio.open`. They are recognised by
the names of their classes, so that neither torchvision nor `datasets` need be installed.
"""

import io
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dlio.data.reader import Reader, open_reader
from dlio.data.schema import Buffer
from dlio.data.selection import SelectionReader
from dlio.errors import DecodeError, SourceError, printable
from dlio.image.fusion import options_of, why_not_fused
from dlio.loader.contract import Sample, UserDataset
from dlio.loader.dataset import Dataset, open_dataset
from dlio.loader.third_party.huggingface import ForeignFile, ImageSet, is_image_set
from dlio.storage.tier_spec import Tiers
from dlio.util.printable import log_warning
from dlio.util.thread_copies import mine

_Part = tuple[UserDataset, npt.NDArray[np.int64]]
"""(whole data set, indices into it)"""


class _TorchvisionFolder:
    """A data set of torchvision's. As an `ImageSet` it has a reader of the same samples in the same
    order, and the user's functions of samples, which may draw random numbers."""

    def __init__(self, folder: Any, reader: Reader) -> None:
        self.folder = folder
        self.reader = reader
        self.functions: list[object] = [folder.transform, folder.target_transform]

    def finished(self, payload: Buffer, sample: int) -> Sample:
        """Return the result of the data set's own `[i]`, from bytes that have been read."""
        from PIL import Image

        folder = self.folder
        values = self.reader.schema.split(payload)
        try:
            with Image.open(io.BytesIO(values["image"])) as image:
                picture: Any = image.convert("RGB")
        except OSError as error:
            name = self.reader.name(sample)
            raise DecodeError(f"{name} cannot be decoded: {error}") from error
        if folder.transform is not None:
            picture = mine(folder.transform)(picture)
        target = folder.samples[sample][1]
        if folder.target_transform is not None:
            target = mine(folder.target_transform)(target)
        return picture, target


_AdaptedDataset = ImageSet | _TorchvisionFolder


def read_by_dlio(data: UserDataset, tiers: Tiers | None, seed: int | None = None) -> Dataset | None:
    """Return a map-style data set as dlio reads it; None if torch's way is to be taken.

    With `tiers`, the samples of a data set that dlio does not understand are kept in them too.
    `seed` is that of the transforms' random numbers; None for torch's.
    """
    dataset = adapted(data, tiers, seed)
    if dataset is None and tiers is not None:
        return open_dataset(data, tiers=tiers, image_size=None)
    return dataset


def adapted(data: UserDataset, tiers: Tiers | None, seed: int | None = None) -> Dataset | None:
    """Return a data set of another library as dlio reads it; None for one it cannot read."""
    parts = _parts(data)
    if not parts:
        return None
    wholes: list[UserDataset] = []
    for whole, _ in parts:
        # By identity: comparing data sets may compare their samples.
        if all(whole is not each for each in wholes):
            wholes.append(whole)
    numbers = [next(k for k, w in enumerate(wholes) if w is whole) for whole, _ in parts]
    owners = np.repeat(np.array(numbers, np.int64), [len(picked) for _, picked in parts])
    inner = np.concatenate([picked for _, picked in parts])
    first = wholes[0]
    if isinstance(first, Dataset):
        # One data set of dlio has one way of decoding and one set of tiers.
        if not all(isinstance(each, Dataset) and first.reads_like(each) for each in wholes):
            return None
        chosen = SelectionReader([each.reader for each in wholes], owners, inner)
        return first.with_reader(chosen, tiers)
    known = _all_understood(wholes)
    if known is None:
        return None
    readers = [each.reader for each in known]
    is_whole = len(readers) == 1 and np.array_equal(inner, np.arange(len(first)))
    view: Reader = readers[0] if is_whole else SelectionReader(readers, owners, inner)
    folders = [each.folder for each in known if isinstance(each, _TorchvisionFolder)]
    if folders:
        reason = why_called(folders)
        if not reason:
            # In torch's memory layout: scripts call `view`, and so do models.
            return Dataset(
                view,
                tiers=tiers,
                seed=seed,
                transform=folders[0].transform,
                contiguous=True,
            )
        if reason not in _told:
            _told.add(reason)
            log_warning(
                "%s: no faster than in torch's loader, since %s: begin its transform with "
                "RandomResizedCrop, or Resize and CenterCrop, and end with ToTensor, or open the "
                "folder by dlio.open, whose transform gets tensors",
                *(printable(type(first).__name__), reason),
            )
    transform = _SampleTransform(known, owners, inner)
    return Dataset(view, tiers=tiers, seed=seed, finish=transform)


def contents_of(data: UserDataset) -> tuple[object, ...] | None:
    """Return what decides how `adapted` reads a data set, to be compared later: its list of
    samples, its transforms and their options; None for one of an unknown class."""
    if isinstance(data, Dataset):
        return (data,)
    if _is_folder(data):
        steps = options_of(data.transform)
        return data.root, data.target_transform, hash(tuple(map(tuple, data.samples))), *steps
    if is_image_set(data):
        return data._fingerprint, data.format["format_kwargs"].get("transform")
    kind = type(data).__module__.split(".")[0], type(data).__name__
    if kind == ("torch", "Subset"):
        return contents_of(data.dataset), np.asarray(data.indices, np.int64).tobytes()
    if kind == ("torch", "ConcatDataset"):
        return tuple(map(contents_of, data.datasets))
    return None


_told: set[str] = set()
"""Reasons that have been logged; each is once a process."""


def why_called(folders: Sequence[Any]) -> str:
    """Return why samples of torchvision's folders are made one by one, of Pillow's images; "" if
    dlio makes the same ones."""
    first = folders[0]
    if any(each.transform is not first.transform for each in folders):
        return "its folders have different transforms"
    if any(each.target_transform is not None for each in folders):
        return "it has a target_transform"
    return why_not_fused(first.transform)


class _SampleTransform:
    """Makes samples as the data sets of other libraries do."""

    def __init__(
        self,
        known: Sequence[_AdaptedDataset],
        owners: npt.NDArray[np.int64],
        inner: npt.NDArray[np.int64],
    ) -> None:
        self._known, self._owners, self._inner = known, owners, inner
        self.functions: Sequence[object] = [own for each in known for own in each.functions]

    def __call__(self, payload: Buffer, sample: int, /) -> Sample:
        owner = self._known[int(self._owners[sample])]
        return owner.finished(payload, int(self._inner[sample]))


def _all_understood(wholes: list[UserDataset]) -> list[_AdaptedDataset] | None:
    """Whole data sets of one schema as dlio reads them; None, and all closed, if one is not."""
    known: list[_AdaptedDataset] = []
    for whole in wholes:
        understood = _understood(whole)
        if understood is not None:
            known.append(understood)
        # Payloads of a tier have one schema. Otherwise torch's way is taken, which takes any
        # samples.
        if understood is None or understood.reader.schema != known[0].reader.schema:
            for opened in known:
                opened.reader.close()
            return None
    return known


def _parts(data: UserDataset) -> list[_Part] | None:
    """The parts of a data set in the order of its indices; None if one is of an unknown class."""
    if isinstance(data, Dataset) or _is_folder(data) or is_image_set(data):
        return [(data, np.arange(len(data), dtype=np.int64))]
    kind = type(data).__module__.split(".")[0], type(data).__name__
    if kind == ("torch", "Subset"):
        inner = _parts(data.dataset)
        return None if inner is None else _picked(inner, np.asarray(data.indices, np.int64))
    if kind == ("torch", "ConcatDataset"):
        known = [each for each in map(_parts, data.datasets) if each is not None]
        return list(chain(*known)) if len(known) == len(data.datasets) else None
    return None


def _picked(parts: list[_Part], indices: npt.NDArray[np.int64]) -> list[_Part]:
    """The parts that a Subset's indices pick, in their order."""
    owner = np.repeat(np.arange(len(parts)), [len(picked) for _, picked in parts])[indices]
    inner = np.concatenate([picked for _, picked in parts])[indices]
    edges = np.flatnonzero(np.diff(owner)) + 1
    runs = zip(np.split(owner, edges), np.split(inner, edges), strict=True)
    return [(parts[int(o[0])][0], i) for o, i in runs if len(o)]


def _understood(data: UserDataset) -> _AdaptedDataset | None:
    """A whole data set as dlio reads it; None if dlio would read other samples."""
    try:
        if is_image_set(data):
            return ImageSet(data)
        reader = _reader_of(data)
    except ForeignFile:
        raise
    except SourceError:
        return None
    return None if reader is None else _TorchvisionFolder(data, reader)


def holds_own(data: UserDataset) -> bool:
    """True for a data set of `dlio.open`, and for torch's Subset and ConcatDataset of such."""
    inner = getattr(data, "datasets", None) or [getattr(data, "dataset", None)]
    return isinstance(data, Dataset) or any(each is not None and holds_own(each) for each in inner)


def _is_folder(data: UserDataset) -> bool:
    """True for torchvision's ImageFolder or DatasetFolder of images, unmodified."""
    kinds = [(each.__module__, each.__name__) for each in type(data).__mro__]
    ours = ("torchvision.datasets.folder", "DatasetFolder")
    if ours not in kinds:
        return False
    loader = getattr(data, "loader", None)
    # A subclass that makes its samples itself may do anything with a file; dlio would ignore it.
    plain = type(data).__getitem__.__qualname__ == "DatasetFolder.__getitem__"
    return plain and getattr(loader, "__name__", "") in ("default_loader", "pil_loader")


def _reader_of(folder: Any) -> Reader | None:
    """A reader of the same files in the same order; None if dlio lists other files."""
    reader = open_reader(str(folder.root))
    # Files may have been added since, `is_valid_file` may leave some out, and `find_classes` may
    # number classes in another way.
    if (
        reader.format == "folder"
        and len(reader) == len(folder.samples)
        and all(
            path.endswith(reader.name(sample)) and int(reader.labels[sample]) == number
            for sample, (path, number) in enumerate(folder.samples)
        )
    ):
        return reader
    reader.close()
    return None
