"""Read torch.distributed's checkpoints without executing code from them.

torch stores a checkpoint's metadata as a pickle. The unpickler here accepts only the few classes
that such metadata consists of. torch reads the tensors themselves as plain data.
"""

import errno
import io
import math
import os
import pickle
import pickletools
import re
import stat
import warnings
from collections.abc import Iterable
from enum import Enum
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from dlio.errors import SourceError
from dlio.train.weights import check_archive
from dlio.util.limits import open_regular, parsing
from dlio.util.printable import first_line

CONTENTS: Final = ".metadata"
_MAX_BYTES: Final = 256 << 20
_FILE: Final = re.compile(r"__[0-9]+_[0-9]+\.distcp")

_MODULES: Final = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_NAMES: Final = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
}


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, in place of the `getattr` of some versions' pickles."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it wants {name} of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = None
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in _MODULES and "." not in name:
            allowed = super().find_class(module, name)
            if not (isinstance(allowed, type) and allowed.__module__ == module):
                allowed = None
        elif (module, name) in _NAMES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            allowed = super().find_class(module, name)
        if allowed is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return allowed


class _Span(io.RawIOBase):
    """A range of a file, as a file. That of torch seeks beyond the end in place of before it."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Reader(FileSystemReader):
    """torch's reader with the restricted unpickler; it unpacks nothing that is compressed."""

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        check_archive(cast("IO[bytes]", _Span(file, sinfo.offset, sinfo.length)))
        part: IO[bytes] = super()._slice_file(file, sinfo)
        return part

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = _parsed(str(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_small(folder: str, name: str) -> bytes:
    """Read a file of a checkpoint that describes it. Raises OSError, ValueError if it is large."""
    descriptor = open_regular(os.path.join(folder, name), os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > _MAX_BYTES:
            raise ValueError(f"{name} is too large")
        return file.read()


def _parsed(folder: str) -> Metadata:
    """Read and check the metadata of a checkpoint. Raises an error of any kind."""
    data = read_small(folder, CONTENTS)
    for opcode, argument, _ in pickletools.genops(data):
        # The unpickler takes memory for all objects up to a number that it is told to remember.
        if opcode.name in ("BINPUT", "LONG_BINPUT", "PUT") and int(str(argument)) > len(data):
            raise pickle.UnpicklingError("it remembers more objects than it has")
    metadata = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    metadata.planner_data = None
    places = metadata.storage_data
    if not isinstance(places, dict) or not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError("it has no tensors")
    lengths: dict[str, int] = {}
    files: dict[str, int] = {}
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, _StorageInfo):
            raise pickle.UnpicklingError("a place is not that of a tensor")
        lengths[index.fqn] = lengths.get(index.fqn, 0) + _checked_place(folder, place, files)
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise pickle.UnpicklingError("a name is not text")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, lengths.get(name, 0))
    return metadata


def _checked_place(folder: str, place: _StorageInfo, files: dict[str, int]) -> int:
    """Return the bytes of a tensor in a file of the checkpoint; `files` keeps the files' sizes.

    Raises ValueError if they do not lie in one.
    """
    name = place.relative_path
    if not isinstance(name, str) or _FILE.fullmatch(name) is None:
        raise ValueError(f"a tensor lies in {name!r}")
    if name not in files:
        status = os.lstat(os.path.join(folder, name))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file")
        files[name] = status.st_size
    whole = all(type(each) is int and each >= 0 for each in (place.offset, place.length))
    if not whole or place.offset + place.length > files[name]:
        raise ValueError(f"a tensor lies outside of {name}: it is cut off")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{name} is stored in another way than dlio does")
    return int(place.length)


def _check_tensor(name: str, entry: TensorStorageMetadata, stored: int) -> None:
    """Compare the size that a tensor declares with its stored bytes. Raises ValueError."""
    size, properties = entry.size, entry.properties
    if not isinstance(size, torch.Size) or not isinstance(properties, TensorProperties):
        raise ValueError(f"{name} has no size")
    if not isinstance(properties.dtype, torch.dtype) or any(each < 0 for each in size):
        raise ValueError(f"{name} has an invalid size or type")
    if math.prod(size) * properties.dtype.itemsize > stored:
        raise ValueError(f"{name} claims more bytes than are stored")


def ignore_no_dist_warning() -> None:
    """Silence torch's warning that it saves or loads in a single process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def contents(path: str) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of a checkpoint's tensors, by name.

    Raises SourceError if the metadata cannot be read.
    """
    with parsing(f"{path}: the checkpoint's table of contents"):
        held = _parsed(path).state_dict_metadata
    return {name: entry for name, entry in held.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(path: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read some tensors into host memory. Raises SourceError if they are missing or damaged."""
    held = contents(path)
    wanted = list(names)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise SourceError(f"{path}: the checkpoint has no {missing[0]}")
    with parsing(f"{path}: the checkpoint"):
        tensors = {
            name: torch.empty(held[name].size, dtype=held[name].properties.dtype) for name in wanted
        }
    if tensors:
        try:
            ignore_no_dist_warning()
            load(tensors, storage_reader=_Reader(path), no_dist=True)
        # torch wraps any error of its reader in one that is not an Exception.
        except (Exception, CheckpointException) as error:
            raise SourceError(f"{path}: the checkpoint is damaged: {cause_of(error)}") from error
    return tensors


def cause_of(error: BaseException) -> str:
    """First line of the cause that torch wraps, which is the part that a user can act on."""
    causes = getattr(error, "failures", None) or {0: error}
    cause = next(iter(causes.values()))
    return first_line(cause[0] if isinstance(cause, tuple) else cause)
