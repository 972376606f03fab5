"""Reading torch.distributed's checkpoints without running what a stranger put into one.

torch keeps a checkpoint's table of contents as a pickle. It is read here by an unpickler that knows
the handful of classes which such a table is made of; tensors are read as plain data by torch.
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
    """What some versions of Python name members of an enumeration by `getattr` for."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it wants {name} of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = None
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in _MODULES and "." not in name:
            found = super().find_class(module, name)
            if not (isinstance(found, type) and found.__module__ == module):
                found = None
        elif (module, name) in _NAMES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            found = super().find_class(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


class Reader(FileSystemReader):
    """torch's reader, of tables of contents that hold nothing else."""

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


def quiet() -> None:
    """Without torch's warning that a single process is one."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def contents(path: str) -> dict[str, TensorStorageMetadata]:
    """What tensors a checkpoint holds. Raises SourceError when it cannot be read."""
    try:
        held = Reader(path).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        raise SourceError(
            f"{path}: the checkpoint's table of contents is damaged: {error}"
        ) from error
    return {name: entry for name, entry in held.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(path: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some tensors, on the host. Raises SourceError when they cannot be read."""
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
            quiet()
            load(tensors, storage_reader=Reader(path), no_dist=True)
        except Exception as error:  # torch wraps whatever its reader met.
            raise SourceError(f"{path}: the checkpoint is damaged: {error}") from error
    return tensors
