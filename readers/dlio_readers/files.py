"""The reader of arrays and scans of which each file is one sample, of any shape.

    train/<class>/*.npy          the folder is the label
    case/images/*.nii.gz         with case/labels/*.nii.gz: the file of the same name is the target
    scans/*.nii.gz, *.dcm        no labels

Shapes and types are read from the files' headers, once: they are kept as other indexes are.
"""

import json
import math
import re
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dlio.data.chunked_array import Box, ChunkedArray
from dlio.data.index import Arrays, cached_index, fingerprint_of
from dlio.data.interpretation import counted_below, files_further_down, named_files
from dlio.data.open_files import InMemoryFile
from dlio.data.reader_contract import Abilities, Fit
from dlio.data.schema import DTYPES, MAX_DIMENSIONS, MAX_PAYLOAD, Schema, array_kind
from dlio.data.source import File, FilePlace, Source, expand, file_at, last_name, own_name
from dlio.data.splits import chosen_split, no_splits
from dlio.errors import SourceError, UsageError
from dlio.plan.layout import shuffled_layout
from dlio.util.decompression_limits import streamed, windowed
from dlio.util.extras import how_to_install
from dlio.util.forks import new_lock
from dlio.util.limits import check_claim, parsing
from dlio.util.machine_memory import usable_memory
from dlio.util.memory import new_memory
from dlio.util.printable import log_warning, tell_once
from dlio.util.units import counted
from dlio_readers.columns import storable
from dlio_readers.dicom import DICOM_SUFFIXES, dicom_array, is_dicom, may_be_dicom
from dlio_readers.fileset import PICTURES
from dlio_readers.folder_doubts import (
    case_parts,
    doubt_of_masks,
    doubts_of_classes,
    masks_among,
    parts_of_cases,
)
from dlio_readers.hdf5file import HDF5_SUFFIXES, Hdf5File
from dlio_readers.label_tables import check_agreement, named_in, naming_table, numbered, read_table
from dlio_readers.npyfile import chunked_array, numpy_arrays
from dlio_readers.path_reader import PathReader, concurrently
from dlio_readers.ranges import StoredArray
from dlio_readers.rehearsal import rehearse
from dlio_readers.scan_folders import (
    check_kinds,
    doubts_of_scans,
    tables_above,
    tables_of_scans,
    words_of_tables,
)

# Medical images, one a file: NIfTI, as it is or gzipped; its header is read first
#
# A NIfTI file is read in place, a gzipped one as a whole, bounded by its header.
# Intensities are scaled as the header says, to float32; the other headers' fields are not read.

NIFTI_SUFFIXES: Final = (".nii", ".nii.gz")
_HEAD_BYTES: Final = 540
"""Of the longer header, NIfTI-2's."""


def nifti_array(file: File) -> ChunkedArray:
    """Return the image of a NIfTI-1 or -2 file, dimensions as the header has them (x, y, z, ...).

    Raises SourceError for damaged files and those that claim more than they hold, UsageError
    without nibabel.
    """
    try:
        from nibabel.nifti1 import Nifti1Header
        from nibabel.nifti2 import Nifti2Header
    except ImportError as error:
        raise UsageError(
            f"{file.name}: NIfTI files need nibabel: {how_to_install('medical', 'nibabel')}"
        ) from error
    packed = file.own_name.endswith(".gz")
    data = b"" if packed else file.read(0, _HEAD_BYTES)
    with parsing(file.name):
        if packed:
            data = bytes(_inflated(file, _HEAD_BYTES))
        sizes = [int.from_bytes(data[:4], order) for order in ("little", "big")]
        kind, size = (Nifti2Header, 540) if 540 in sizes else (Nifti1Header, 348)
        if size not in sizes or len(data) < size:
            shown = f"is cut off after {len(data)} bytes" if len(data) < 348 else "is not NIfTI's"
            raise SourceError(f"{file.name}: its header {shown}: write it again as NIfTI-1 or -2")
        head = kind(data[:size], check=False)
        shape, dtype = tuple(map(int, head.get_data_shape())), np.dtype(head.get_data_dtype())
        offset, (slope, inter) = int(head.get_data_offset()), head.get_slope_inter()
    if not storable(dtype) or min(shape, default=0) < 1 or offset < 0:
        raise SourceError(f"{file.name} is {dtype}{list(shape)}, which samples cannot have")
    # Whole numbers of Python, which do not overflow.
    wanted = offset + math.prod(shape) * dtype.itemsize
    scale = (1.0, 0.0) if slope is None else (float(slope), float(inter or 0.0))
    plain = scale == (1.0, 0.0)
    own = np.dtype(dtype.newbyteorder("=") if plain else np.float32)
    if packed:
        check_claim(wanted, file.size, file.name)
        if wanted > MAX_PAYLOAD:
            raise SourceError(f"{file.name} becomes {wanted} bytes, over 2 GiB: store it as .nii")

        def unpacked(box: Box) -> npt.NDArray[Any]:
            raw = _inflated(file, wanted)
            if len(raw) < wanted:
                raise SourceError(f"{file.name} is cut off: {len(raw)} bytes, not {wanted}")
            whole = np.frombuffer(raw, dtype, math.prod(shape), offset).reshape(shape, order="F")
            return _scaled(whole[box], scale, own)

        return ChunkedArray(file.name, shape, own, shape, unpacked)
    if wanted > file.size:
        raise SourceError(f"{file.name} is cut off: {file.size} bytes instead of {wanted}")
    stored = StoredArray(file, offset, shape[::-1], dtype)  # The first dimension varies fastest.

    def scaled(box: Box) -> npt.NDArray[Any]:
        return _scaled(stored.read(box[::-1]).T, scale, own)

    return ChunkedArray(file.name, shape, own, stored.sides[::-1], scaled)


def _scaled(
    part: npt.NDArray[Any], scale: tuple[float, float], own: "np.dtype[Any]"
) -> npt.NDArray[Any]:
    """Scale stored values, unless they are as they are meant."""
    if scale == (1.0, 0.0):
        return part.astype(own, copy=False)
    slope, inter = scale
    return (part.astype(np.float64) * slope + inter).astype(own)


def _inflated(file: File, most: int) -> memoryview:
    """Return up to `most` bytes of a gzipped file, of one member or several. Raises SourceError."""
    out = bytearray()
    try:
        for part in streamed("gzip", windowed(file.read)):
            out += part
            if len(out) >= most:
                break
    except EOFError:
        pass  # The caller finds out that it is cut off.
    except zlib.error as error:
        raise SourceError(
            f"{file.name} is not gzipped, or is damaged: {error}; restore it"
        ) from error
    return memoryview(out)[:most]


# Folders of files

_NUMPY: Final = (".npy", ".npz")
_GZIP: Final = b"\x1f\x8b"
_SCANS: Final = (*NIFTI_SUFFIXES, *DICOM_SUFFIXES)
_SUFFIXES: Final = (*_NUMPY, *HDF5_SUFFIXES, *_SCANS)
_INPUTS: Final = ("images", "image", "imagesTr", "inputs", "volumes")
_TARGETS: Final = ("labels", "label", "labelsTr", "masks", "mask", "segmentations", "targets")
_TRAINS, _TESTS, _TEST_TARGETS, _TRAIN_TARGETS = "imagesTr", "imagesTs", "labelsTs", "labelsTr"
_SECOND: Final = "_0001"
_CHANNEL: Final = re.compile(r"_\d{4}$", re.ASCII)
"""Ends the name of an image's channel, as nnU-Net names files; its label lacks it."""
_VERSION: Final = 2
_OPEN_FILES: Final = 64
_KEPT_BYTES: Final = 64 << 20
_KEPT_SHARE: Final = 16
"""Of the arrays of open files those that were compressed are in memory: so many bytes of them are
kept, or one in so many of the bytes that this process may have."""
_SAMPLED: Final = 256
"""Files whose contents the fingerprint samples, besides all files' sizes and times."""
_TABLES: Final = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
_TABLE_HEAD: Final = 1 << 14
_AGAIN: Final = "open it again"
_LABEL: Final = ("label",)
_PROBED: Final = 256
"""Folders by whose names of files cases are told from classes."""
_DEEPEST: Final = 32
_LOOKED_AT: Final = 2
"""Folders, and in them files without a suffix, that are looked into to recognise the format."""


@dataclass(frozen=True, slots=True)
class _SampleFiles:
    name: str
    files: tuple[FilePlace, ...]
    """The input, and the target if there are targets."""
    label: int | None = None
    """None without labels."""


@dataclass(frozen=True, slots=True)
class _ArrayFacts:
    """An array as an index has it."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: "np.dtype[Any]"


@dataclass(frozen=True, slots=True)
class _OpenArrays:
    """A file whose header has been read."""

    arrays: dict[str, ChunkedArray]
    file: Hdf5File | None = None
    """The file itself, if it stays open."""
    kept: int = 0
    """Bytes of arrays that are in memory."""


class FilesReader(PathReader):
    """Read a folder whose files are one sample each: `.npy`, `.npz`, `.h5`, `.nii`, `.nii.gz`,
    `.dcm`.

    A sample's fields are the file's arrays: `data` of a `.npy`, `image` of a scan, those of a
    `.npz` or HDF5 file by name; `label` is the number of the class folder. With targets, the input
    is `image` and its target `label`, and each file holds one array. NIfTI files need the package
    nibabel, DICOM files pydicom.

    Args:
        path: a folder, or a file, a pattern or a list of scans.
        split: `train` for `imagesTr` and its targets, as also without it, `test` for `imagesTs`,
            which may have none.
        layout: `classes` for folders that are classes, `cases` for those that are a sample each, of
            the same files, such as `flair`, `t1` and `seg`: these are its fields; None for cases
            where most folders hold files of the same names, or of the same after the folder's.
        table: the table, in the folder, that labels its files; None for `labels.csv` and the like.
        label: the column of labels in it; None for the one that is called so.

    Raises SourceError for damaged files, a missing target, and files that differ in fields, types
    or numbers of dimensions.
    """

    format = "files"
    objects = True

    def __init__(
        self,
        path: str | Sequence[str],
        split: str | None = None,
        layout: Literal["classes", "cases"] | None = None,
        table: str | None = None,
        label: str | None = None,
    ) -> None:
        self._rows, self.classes, self._sides_named = _find(path, split, layout, table, label)
        self._is_labelled = self._rows[0].label is not None
        self._found = [file for row in self._rows for file in row.files]
        self._urls = [file.url for file in self._found]
        self._sides = len(self._rows[0].files)
        kind = "-".join(["files", *self._sides_named])
        self._files = files = concurrently(FilePlace.opened, self._found, self._urls[0])
        concurrently(lambda file: file.stamp, files, self._urls[0])  # Kept by the files.
        hdf5 = [file for file in files if file.own_name.endswith(HDF5_SUFFIXES)]
        if hdf5:
            rehearse("files", "h5py", path, hdf5)
        self._lock = new_lock()
        self._opened: OrderedDict[int, _OpenArrays] = OrderedDict()
        self._most_kept = max(_KEPT_BYTES, usable_memory() // _KEPT_SHARE)
        index = cached_index(kind, _VERSION, files, self._build)
        head = json.loads(index["head"].tobytes())
        self._dtypes: dict[str, np.dtype[Any]] = {n: np.dtype(d) for n, d in head["dtypes"]}
        if head.get("fraction"):
            tell_once(
                f"{self._urls[self._sides - 1]}: a label is {head['fraction']}: round such labels, "
                "since cut to whole numbers they are off by one (nibabel scales floats that are "
                "saved under a header of integers)"
            )
        self._facts = _unpacked(head["dtypes"], index["dims"], len(self._rows))
        fields = [
            (name, array_kind(dtype, _common([facts.shape for facts in self._facts[name]])))
            for name, dtype in self._dtypes.items()
        ]
        if self._is_labelled:
            own = dict(fields).get("label")
            if own is None:
                fields.append(("label", "int64"))
            elif "[" not in own:
                is_inside = "/" in self._rows[0].name
                others = "class folders name" if is_inside else "a table names"
                raise UsageError(
                    f"{self.path}: files hold a label, and {others} another: open a pattern of "
                    f"them for their own, such as FOLDER/{'*/' * is_inside}*.npz"
                )
            else:
                tell_once(
                    f"{self.path}: the label of a sample is the array of its file, and not the "
                    "folder"
                )
                self.classes, self._is_labelled = [], False
        self.schema = Schema(tuple(fields))
        self.labels = np.array([row.label or 0 for row in self._rows], np.int64)
        self.labels *= self._is_labelled
        bodies = {
            name: np.array([np.prod(f.shape, dtype=np.int64) for f in facts], np.int64)
            * self._dtypes[name].itemsize
            for name, facts in self._facts.items()
        }
        self.sizes = self.schema.payload_sizes(len(self._rows), bodies)
        self.layout = shuffled_layout(self.sizes)
        sampled = set(
            np.linspace(0, len(files) - 1, min(len(files), _SAMPLED)).astype(int).tolist()
        )
        stamps = [
            f"{file.url} {file.stamp if k in sampled else (file.size, file.times)}"
            for k, file in enumerate(files)
        ]
        facts = [self.schema.to_json(), *self.classes, *stamps]
        self.fingerprint = fingerprint_of("files", _VERSION, *facts, index["dims"], self.labels)

    @staticmethod
    def recognises(path: str) -> str | None:
        url = expand(path)[0]
        if own_name(url).endswith(_SCANS):
            return None
        source = Source(url)
        if not source.is_folder():
            folder, _, name = url.rpartition("/")
            if may_be_dicom(name) and source.exists() and is_dicom(Source(folder or "."), name):
                return None
            return f"is neither a folder nor does it end in {', '.join(_SCANS)}"
        names = source.names()
        if any(name.lower().endswith(_SCANS) for name, folder in names if not folder):
            return None
        folders = [name for name, folder in names if folder and not name.startswith(".")]
        arrays = [n for n, folder in names if not folder and n.lower().endswith(_SUFFIXES)]
        if arrays and not any(n.lower().endswith(_TABLES) for n, folder in names if not folder):
            return "holds arrays whose rows may be samples"
        if arrays:
            return None  # `fit` looks whether a table names them.
        inputs = [name for name in folders if name in _INPUTS]
        for folder in inputs or folders[:_LOOKED_AT]:
            inside = [name.lower() for name, inner in source.names(folder) if not inner]
            if any(name.endswith(_SUFFIXES) for name in inside):
                return None
        if any(
            _unnamed(source, folder, _LOOKED_AT)
            for folder in ("", *(inputs or folders)[:_LOOKED_AT])
        ):
            return None
        return "its folders hold no arrays or scans"

    @staticmethod
    def fit(path: str, options: Mapping[str, object]) -> Fit | None:
        """Return how well a folder fits: class folders count, and pairs are marked."""
        source = Source(path)
        rows = source.names()
        here = [n for n, folder in rows if not folder and n.lower().endswith(_SUFFIXES)]
        if "samples" in options and here:
            return None
        chosen = options.get("table") or naming_table(source, here)
        if isinstance(chosen, str) and chosen:
            words = f"{named_files(here)}, one a sample, with the labels of {chosen}"
            return Fit(words, len(here), is_marked=True, used=(chosen, *here))
        if here and not any(name.lower().endswith(_SCANS) for name in here):
            return None  # Arrays whose rows may be samples.
        here = [name for name in here if name.lower().endswith(_SCANS)]
        folders = [name for name, folder in rows if folder]
        inputs = [name for name in folders if name in _INPUTS]
        if inputs:
            arrays, _ = counted_below(source, inputs, _SUFFIXES)
            pictures, _ = counted_below(source, inputs, PICTURES)
            if sum(arrays.values()) < sum(pictures.values()):
                return None  # Pictures, perhaps next to a few files of arrays.
            left: tuple[str, ...] = ()
            if FilesReader.own_splits(path, options):
                tests, _ = counted_below(source, [_TESTS], _SUFFIXES)
                files = counted(sum(tests.values()), "file")
                left = (f"{files} of {_TESTS}, which split='test' reads",)
            words = "inputs and their targets, one a file"
            return Fit(words, 1, is_marked=True, left_out=left)
        if here:
            masks = masks_among(here)
            doubts = (doubt_of_masks(masks),) if masks else ()
            below = files_further_down(source, lambda name: name.lower().endswith(_SCANS))
            words = f"{named_files(here)}, one a sample"
            tables = tables_of_scans(source, here)
            if tables:
                heads = (source.read(name, 0, _TABLE_HEAD) for name in tables)
                are_lists = all(named_in(head, here) for head in heads)
                below.append(words_of_tables(source, tables, are_lists=are_lists))
            below += filter(None, [tables_above(path, here)])
            return Fit(words, len(here), left_out=tuple(below), used=tuple(tables), doubts=doubts)
        counts, more = counted_below(source, folders, _SUFFIXES)
        if not counts:  # Scans without suffixes.
            bare = {n: source.files(n) for n in folders[:_PROBED]}
            counts = {n: k for n, own in bare.items() if (k := sum(map(may_be_dicom, own)))}
        total = sum(counts.values())
        over = "over " if more else ""
        layout = options.get("layout")
        parts = _parts(source, folders[:_PROBED], layout)
        if parts:
            words = f"cases of {counted(len(parts), 'file')} ({', '.join(parts)}), one a folder"
            doubts = () if layout else ("layout='classes' reads these folders as classes",)
            return Fit(words, total, in_folders=True, doubts=doubts)
        words = f"{counted(len(counts), 'class folder')} with {over}{total:,} arrays or scans"
        if layout:
            return Fit(words, total, in_folders=True)
        check_kinds(source, list(counts))
        probed = list(counts)[:_PROBED]
        scans = {n: _names_in(source, n) or _unnamed(source, n, _LOOKED_AT) for n in probed}
        notes = (*doubts_of_classes(list(counts), {}), *doubts_of_scans(source, scans))
        some = [name for own in scans.values() for name in own]
        tables = tables_of_scans(source, some, next(iter(counts), "."))
        left = (words_of_tables(source, tables),) if tables else ()
        return Fit(words, total, in_folders=True, left_out=left, used=tuple(tables), doubts=notes)

    @staticmethod
    def own_splits(path: str, _: Mapping[str, object]) -> list[str]:
        """Return the splits of a task of the Medical Segmentation Decathlon or of nnU-Net."""
        folders = Source(path).folders()
        return ["train", "test"] if _TRAINS in folders and _TESTS in folders else []

    @property
    def abilities(self) -> Abilities:
        # Not an attribute: it would refer to the reader, which is to go with its last user.
        return Abilities(chunked=self._chunked, files_are_samples=True)

    def name(self, sample: int) -> str:
        return self._rows[sample].name

    def read(self, samples: npt.NDArray[np.int64]) -> list[bytes | memoryview]:
        return [self._payload(int(sample)) for sample in samples]

    def _chunked(self) -> dict[str, list[ChunkedArray]]:
        return {
            name: [self._lazy(sample, name, facts) for sample, facts in enumerate(each)]
            for name, each in self._facts.items()
        }

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, OrderedDict()
        for each in opened.values():
            if each.file is not None:
                each.file.close()

    def _payload(self, sample: int) -> bytes | memoryview:
        parts = []
        for file, offset, size in self.ranges_of(sample):
            parts.append(new_memory(size))
            file.read_into(offset, parts[-1])
        if parts:
            return self.payload_of(sample, parts)
        return self._joined(sample, lambda number: self._found[number].opened())

    def ranges_of(self, sample: int) -> list[tuple[File, int, int]]:
        """Return the whole NumPy files of a sample; none for other formats."""
        files = self._files[sample * self._sides : (sample + 1) * self._sides]
        numpy = all(file.own_name.endswith(_NUMPY) for file in files)
        return [(file, 0, file.size) for file in files] if numpy else []

    def payload_of(self, sample: int, parts: Sequence[memoryview]) -> bytes | memoryview:
        """Return the payload out of the bytes of the sample's files. Raises SourceError."""
        first = sample * self._sides
        return self._joined(
            sample, lambda number: InMemoryFile(self._files[number], parts[number - first])
        )

    def _joined(self, sample: int, find: Callable[[int], File]) -> bytes | memoryview:
        """Return the payload of a sample; `find` returns a file by its number."""
        values: dict[str, Any] = {"label": self._rows[sample].label} if self._is_labelled else {}
        with ExitStack() as stack:

            def opened(number: int) -> dict[str, ChunkedArray]:
                try:
                    own = _opened(find(number))
                except SourceError as error:
                    text = f"{error}, or has changed since it was opened: {_AGAIN}"
                    raise SourceError(text) from error
                if own.file is not None:
                    stack.callback(own.file.close)
                return own.arrays

            for name, array in self._arrays_of(sample, opened).items():
                facts = self._facts.get(name)
                if facts is None or array.shape != facts[sample].shape:
                    raise SourceError(f"{array.where} has changed since it was opened: {_AGAIN}")
                values[name] = array.read(tuple(slice(0, n) for n in array.shape))
        try:
            return self.schema.join(values)
        except (ValueError, KeyError) as error:
            raise SourceError(
                f"{self.name(sample)} has changed since it was opened: {error}; {_AGAIN}"
            ) from error

    def _lazy(self, sample: int, name: str, facts: _ArrayFacts) -> ChunkedArray:
        """Return an array whose file is opened when a part is read."""

        def read(box: Box) -> npt.NDArray[Any]:
            array = self._arrays_of(sample, self._open).get(name)
            if array is None or array.shape != facts.shape:
                raise SourceError(f"{self.name(sample)} has changed since it was opened: {_AGAIN}")
            return array.read(box)

        where = f"{self.path}: {self.name(sample)}"
        return ChunkedArray(where, facts.shape, self._dtypes[name], facts.chunks, read)

    def _arrays_of(
        self, sample: int, opened: Callable[[int], dict[str, ChunkedArray]]
    ) -> dict[str, ChunkedArray]:
        """Return a sample's arrays by field; `opened` returns those of a file, by its number.

        Raises SourceError.
        """
        arrays: dict[str, ChunkedArray] = {}
        for side in range(self._sides):
            own = opened(sample * self._sides + side)
            if not self._sides_named:
                return own
            if len(own) != 1:
                raise SourceError(
                    f"{self._urls[sample * self._sides + side]} holds {len(own)} arrays: of files "
                    "that make up a sample, each holds one"
                )
            arrays[self._sides_named[side]] = next(iter(own.values()))
        return arrays

    def _open(self, number: int) -> dict[str, ChunkedArray]:
        """Return the arrays of a file, whose header is kept with those of the last few."""
        with self._lock:
            kept = self._opened.get(number)
            if kept is not None:
                self._opened.move_to_end(number)
                return kept.arrays
        opened = _opened(self._found[number].opened())
        gone: list[_OpenArrays] = []
        with self._lock:
            self._opened[number] = opened
            while len(self._opened) > _OPEN_FILES or (
                len(self._opened) > 1
                and sum(each.kept for each in self._opened.values()) > self._most_kept
            ):
                gone.append(self._opened.popitem(last=False)[1])
        for each in gone:
            if each.file is not None:
                each.file.close()
        return opened.arrays

    def _facts_of(self, sample: int) -> dict[str, _ArrayFacts]:
        arrays = self._arrays_of(sample, self._open)
        return {n: _ArrayFacts(a.shape, a.chunks, a.dtype) for n, a in arrays.items()}

    def _build(self) -> Arrays:
        """Index the arrays of all files: names, types and shapes."""
        first: dict[str, _ArrayFacts] = {}
        dims: list[list[int]] = []
        # Without the arrays: those that are compressed have been read.
        opened = concurrently(self._facts_of, range(len(self._rows)), self._urls[0])
        for row, arrays in zip(self._rows, opened, strict=True):
            first = first or arrays
            _check_alike(row.name, arrays, self._rows[0].name, first)
            flat: list[int] = []
            for array in arrays.values():
                flat += [*array.shape, *array.chunks]
            dims.append(flat)
        dtypes = [
            (name, array.dtype.newbyteorder("=").name, len(array.shape))
            for name, array in first.items()
        ]
        head = {
            "dtypes": [(name, dtype) for name, dtype, _ in dtypes],
            "fraction": self._fraction(first) if self._sides_named[-1:] == _LABEL else "",
        }
        numbers = np.array([size for _, _, size in dtypes], np.int64)
        table = np.array(dims, np.int64).reshape(len(self._rows), -1)
        return {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "dims": np.concatenate([numbers, table.reshape(-1)]),
        }

    def _fraction(self, arrays: Mapping[str, _ArrayFacts]) -> str:
        """Return a value of the first target that is not a whole number, if there is one."""
        if arrays["label"].dtype.kind != "f":
            return ""
        (target,) = self._open(self._sides - 1).values()
        values = target.read(tuple(slice(0, side) for side in target.shape))
        odd = values[np.isfinite(values) & (values != np.rint(values))]
        return f"{odd[0]:g}" if len(odd) else ""


def _opened(file: File) -> _OpenArrays:
    """Open a file. Raises SourceError."""
    name = file.own_name
    if name.endswith(NIFTI_SUFFIXES):
        return _OpenArrays({"image": nifti_array(file)})
    if not name.lower().endswith(_SUFFIXES) or name.endswith(DICOM_SUFFIXES):
        return _OpenArrays({"image": dicom_array(file)})
    with parsing(file.name):
        if name.endswith(HDF5_SUFFIXES):
            opened = Hdf5File(file)
            return _OpenArrays(opened.arrays(), opened)
        arrays = numpy_arrays(file)
        kept = sum(each.nbytes for each in arrays.values() if isinstance(each, np.ndarray))
        chunked = {n: chunked_array(each, f"{file.name}::{n}") for n, each in arrays.items()}
        return _OpenArrays(chunked, kept=kept)


def _check_alike(
    name: str,
    arrays: Mapping[str, _ArrayFacts],
    other: str,
    first: Mapping[str, _ArrayFacts],
) -> None:
    """Raise SourceError if a sample's fields are not those of the first sample."""
    for key in {**first, **arrays}:
        mine, theirs = arrays.get(key), first.get(key)
        shown = [
            "none"
            if each is None
            else f"{each.dtype.name} of {counted(len(each.shape), 'dimension')}"
            for each in (mine, theirs)
        ]
        if mine is not None and (
            mine.dtype.name not in DTYPES or len(mine.shape) > MAX_DIMENSIONS or 0 in mine.shape
        ):
            raise SourceError(f"{name}: {key!r} is {mine.dtype}{list(mine.shape)}: convert it")
        if shown[0] != shown[1]:
            folders = {each.partition("/")[0] for each in (name, other) if "/" in each}
            rest = f", or open one of {', '.join(sorted(folders))}" if len(folders) > 1 else ""
            raise SourceError(
                f"{name}: {key!r} is {shown[0]}, and in {other} {shown[1]}: make files alike{rest}"
            )
    if not arrays:
        raise SourceError(f"{name} holds no arrays: remove it")


def _unpacked(
    dtypes: Sequence[Sequence[str]], dims: npt.NDArray[np.int64], count: int
) -> dict[str, list[_ArrayFacts]]:
    """Return shapes and chunks by field, from an index."""
    numbers = dims[: len(dtypes)].tolist()
    table = dims[len(dtypes) :].reshape(count, 2 * sum(numbers)).tolist()
    facts: dict[str, list[_ArrayFacts]] = {}
    at = 0
    for (name, dtype), n in zip(dtypes, numbers, strict=True):
        facts[name] = [
            _ArrayFacts(tuple(row[at : at + n]), tuple(row[at + n : at + 2 * n]), np.dtype(dtype))
            for row in table
        ]
        at += 2 * n
    return facts


def _common(shapes: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the dimensions of some shapes, None for those that differ."""
    return [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]


def _find(
    path: str | Sequence[str],
    split: str | None,
    layout: str | None,
    table: str | None = None,
    label: str | None = None,
) -> tuple[list[_SampleFiles], list[str], Sequence[str]]:
    """Return (samples, classes, fields of the files of a sample; () for the files' own) of a path.
    Raises SourceError."""
    urls = expand(path)
    splits = FilesReader.own_splits(urls[0], {}) if Source(urls[0]).is_folder() else []
    if split is not None and not splits:
        raise no_splits(split, urls[0])
    if split is not None and chosen_split(split, splits, urls[0]) == "test":
        source, url = Source(urls[0]), urls[0]
        has_targets = source.is_folder(_TEST_TARGETS)
        return _pairs(source, url, _TESTS, _TEST_TARGETS if has_targets else None)
    if len(urls) > 1 or own_name(urls[0]).endswith(_SCANS) or not Source(urls[0]).is_folder():
        return [_SampleFiles(last_name(url), (file_at(url),)) for url in urls], [], ()
    source, url = Source(urls[0]), urls[0]
    folders = [name for name, folder in source.names() if folder and not name.startswith(".")]
    inputs = [name for name in _INPUTS if name in folders]
    targets = [name for name in _TARGETS if name in folders]
    if inputs:
        if not targets:
            raise SourceError(f"{url} has {inputs[0]}/ and no labels/: add it, or open {inputs[0]}")
        return _pairs(source, url, inputs[0], targets[0])
    own = _files(source, "")
    if own:
        return *_labelled(source, own, table, label), ()
    if table is not None or label is not None:
        raise UsageError(f"table= and label= are for the files of one folder, and {url} has none")
    parts = _parts(source, folders[:_PROBED], layout)
    if parts:
        return _cases(source, folders, parts), [], parts
    rows: list[_SampleFiles] = []
    classes: list[str] = []
    for folder in folders:
        files = _files_below(source, folder)
        if files:
            rows += [_SampleFiles(name, (each,), len(classes)) for name, each in files]
            classes.append(folder)
    if not rows:
        raise SourceError(f"{url} holds no arrays or scans: check the path")
    return rows, classes, ()


def _labelled(
    source: Source, files: Sequence[FilePlace], table: str | None, label: str | None
) -> tuple[list[_SampleFiles], list[str]]:
    """Return (the files of a folder with their labels in a table, classes); without one no labels.

    Raises SourceError if files and table disagree, UsageError for a column of no table.
    """
    names = [last_name(each.url) for each in files]
    table = table or naming_table(source, names)
    if not table and label is not None:
        raise UsageError(
            f"label={label!r}: {source.path()} has no labels.csv of its files: name a table with "
            "table="
        )
    labels = read_table(source, table, names, label) if table else {}
    if not labels:
        return [_SampleFiles(each.name, (each,)) for each in files], []
    check_agreement(source, table, labels, names, "file")
    numbers, classes = numbered([labels[name] for name in names])
    rows = zip(files, numbers.tolist(), strict=True)
    return [_SampleFiles(each.name, (each,), number) for each, number in rows], classes


def _parts(source: Source, folders: Sequence[str], layout: object) -> tuple[str, ...]:
    """Return the fields of the cases that folders are, such as `flair`, `seg` and `t1`; () for
    classes. Raises UsageError for `layout="cases"` of folders that are none."""
    if layout == "classes":
        return ()
    names = {folder: _names_in(source, folder) for folder in folders}
    stems = {folder: list(map(_stem, own)) for folder, own in names.items() if own}
    parts = parts_of_cases(stems)
    if layout == "cases" and not parts:
        raise UsageError(
            f"layout='cases': the folders of {source.path()} do not hold the same files, such as "
            "t1.nii.gz and seg.nii.gz"
        )
    return parts


def _cases(source: Source, folders: Sequence[str], parts: Sequence[str]) -> list[_SampleFiles]:
    """Return a sample for each folder. Raises SourceError for one that lacks a file."""
    rows = []
    for folder in folders:
        names = {_stem(name): name for name in _names_in(source, folder)}
        own = case_parts(folder, list(names))
        if not names:
            continue
        lost = [part for part in parts if part not in own]
        left = [names[stem] for part, stem in own.items() if part not in parts]
        if lost or left:
            raise SourceError(
                f"{source.path(folder)} is a case without {', '.join(lost) or 'a place'}"
                f"{f' for {named_files(left)}' if left else ''}, where others have "
                f"{', '.join(parts)}: make it like them, or remove it; layout='classes' reads the "
                "folders as classes"
            )
        places = tuple(source.file_at(f"{folder}/{names[own[part]]}") for part in parts)
        rows.append(_SampleFiles(folder, places))
    return rows


def _names_in(source: Source, folder: str) -> list[str]:
    names = source.files(folder)
    return [name for name in names if name.lower().endswith(_SUFFIXES) and name[0] != "."]


def _files(source: Source, folder: str) -> list[FilePlace]:
    """Return the arrays and scans of a folder, sorted."""
    names = _names_in(source, folder) or _unnamed(source, folder)
    prefix = f"{folder}/" if folder else ""
    return [source.file_at(prefix + name) for name in names]


def _files_below(source: Source, folder: str) -> list[tuple[str, FilePlace]]:
    """Return (name, place) of the arrays and scans at and below a class folder, in the order of
    their folders."""
    made: list[tuple[str, FilePlace]] = []
    stack = [(folder, 0)]
    while stack:
        here, depth = stack.pop()
        made += [(f"{here}/{each.name}", each) for each in _files(source, here)]
        inner = source.folders(here)
        if inner and depth == _DEEPEST:
            raise SourceError(f"{source.path(here)} lies too deep: move its files further up")
        stack += [(f"{here}/{name}", depth + 1) for name in reversed(inner)]
    return made


def _unnamed(source: Source, folder: str, most: int | None = None) -> list[str]:
    """Return the DICOM files of a folder that have no suffix, of the first `most` files alone.

    Others are left out, with a warning if there are some of each.
    """
    names = [name for name, inner in source.names(folder) if not inner and may_be_dicom(name)]
    names, prefix = names[:most], f"{folder}/" if folder else ""
    is_one = concurrently(lambda name: is_dicom(source, prefix + name), names, source.path(folder))
    others = [name for name, known in zip(names, is_one, strict=True) if not known]
    if most is None and others and any(is_one):
        log_warning(
            "%s: %d files without a suffix are left out, as they are not DICOM, such as %s",
            *(source.path(folder), len(others), others[0]),
        )
    return [name for name, known in zip(names, is_one, strict=True) if known]


def _pairs(
    source: Source, url: str, inputs: str, targets: str | None
) -> tuple[list[_SampleFiles], list[str], Sequence[str]]:
    """Return (samples, [], their fields): inputs with the targets of the same name, if any.

    Of nnU-Net's names, the channels of a case, `_0000` and `_0001`, are fields.

    Raises SourceError for an input without its target, and a case without a channel of others.
    """
    files = _files(source, inputs)
    if not files:
        raise SourceError(f"{url}/{inputs} holds no arrays or scans: check the path")
    by_stem = {_stem(each.name): each for each in _files(source, targets)} if targets else {}
    stems = [_stem(each.name) for each in files]
    # Without targets, ends of names are channels that are some of the images with targets.
    known = None if targets else _channels_of_training(source)
    cases: dict[str, dict[str, FilePlace]] = {}
    for each, stem in zip(files, stems, strict=True):
        case = stem if stem in by_stem else _CHANNEL.sub("", stem)
        if known is not None and stem.removeprefix(case) not in known:
            case = stem
        if targets and case not in by_stem:
            raise SourceError(
                f"{each.url} has no file of its name in {targets}/: add it, or remove it"
            )
        cases.setdefault(case, {})[stem.removeprefix(case)] = each
    left = [each.name for stem, each in by_stem.items() if stem not in cases]
    if left:
        tell_once(
            f"{url}: {named_files(left)} of {targets} left out: {inputs} has none of the name"
        )
    if all(len(own) == 1 for own in cases.values()) and len(known or ()) < 2:
        fields = ["image"]
    else:
        kinds = Counter(tuple(sorted(own)) for own in cases.values())
        ends = tuple(sorted(known)) if known else kinds.most_common(1)[0][0]
        fields = [f"image{end}" for end in ends]
        odd = next((case for case, own in cases.items() if tuple(sorted(own)) != ends), None)
        if odd is not None:
            have, shown = ", ".join(filter(None, sorted(cases[odd]))) or "none", ", ".join(ends)
            raise SourceError(
                f"{url}/{inputs}: case {odd} has the channels {have}, and others {shown}: make "
                "it like them, or remove it"
            )
    rows = [
        _SampleFiles(
            f"{inputs}/{next(iter(own.values())).name}",
            (*(own[end] for end in sorted(own)), *([by_stem[case]] if targets else ())),
        )
        for case, own in cases.items()
    ]
    if targets:
        fields.append("label")
    return rows, [], () if fields == ["image"] else tuple(fields)


def _channels_of_training(source: Source) -> set[str]:
    """Return the channels of nnU-Net's images with targets, such as `_0000`; none where images are
    called as their targets are."""
    targets = {_stem(name) for name in _names_in(source, _TRAIN_TARGETS)}
    stems = [_stem(name) for name in _names_in(source, _TRAINS)]
    ends = {stem[-len(_SECOND) :] for stem in stems if stem not in targets}
    return {end for end in ends if _CHANNEL.fullmatch(end)}


def _stem(name: str) -> str:
    """Return a file's name without the suffix of its format."""
    suffix = max((s for s in _SUFFIXES if name.lower().endswith(s)), key=len, default="")
    return name.removesuffix(name[len(name) - len(suffix) :])
