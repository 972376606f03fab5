"""Read torch.distributed's checkpoints without executing code from them.

torch stores a checkpoint's metadata as a pickle. The unpickler here accepts only the few classes
that such metadata consists of. torch reads the tensors themselves as plain data.
"""

import pickle
import warnings
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dlio.errors import SourceError

__all__ = ["contents", "ignore_no_dist_warning", "read_tensors"]

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


class _Reader(FileSystemReader):
    """torch's reader with the restricted unpickler."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(f"{self.path}/.metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def ignore_no_dist_warning() -> None:
    """Silence torch's warning that it saves or loads in a single process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def contents(path: str) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of a checkpoint's tensors, by name.

    Raises SourceError if the metadata cannot be read.
    """
    try:
        held = _Reader(path).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise SourceError(
            f"{path}: the checkpoint's table of contents is damaged: {error}"
        ) from error
    return {name: entry for name, entry in held.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(path: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read some tensors into host memory. Raises SourceError if they are missing or damaged."""
    held = contents(path)
    wanted = list(names)
    missing = [name for name in wanted if name not in held]
    if missing:
        raise SourceError(f"{path}: the checkpoint has no {missing[0]}")
    tensors = {
        name: torch.empty(held[name].size, dtype=held[name].properties.dtype) for name in wanted
    }
    if tensors:
        try:
            ignore_no_dist_warning()
            load(tensors, storage_reader=_Reader(path), no_dist=True)
        except Exception as error:  # torch wraps any error of its reader.
            raise SourceError(f"{path}: the checkpoint is damaged: {error}") from error
    return tensors
