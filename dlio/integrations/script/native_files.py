"""Libraries that open files without Python, and where their functions take the path."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_UPDATE: Final = os.O_RDWR | os.O_CREAT
_MODES: Final = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": _WRITE,
    "w-": _UPDATE | os.O_EXCL,
    "x": _UPDATE | os.O_EXCL,
    "a": _UPDATE,
}


class _Opener(NamedTuple):
    """A function of a library that opens a file."""

    function: str
    place: int
    """Position of the path among the arguments."""
    name: str
    """Name of that argument."""
    flags: int | None
    """Flags of os.open that it stands for; None if it has a `mode` next to the path."""


_SAFETENSORS: Final = (
    _Opener("serialize_file", 1, "filename", _WRITE),
    _Opener("safe_open", 0, "filename", os.O_RDONLY),
)
_SQLITE: Final = (_Opener("connect", 0, "database", _UPDATE),)
_NATIVE: Final = {
    "safetensors": _SAFETENSORS,
    "safetensors.torch": _SAFETENSORS,
    "safetensors.numpy": _SAFETENSORS,
    "sqlite3": _SQLITE,
    "sqlite3.dbapi2": _SQLITE,
    "h5py._hl.files": (_Opener("File.__init__", 1, "name", None),),
    "cv2": (
        _Opener("imwrite", 0, "filename", _WRITE),
        _Opener("imread", 0, "filename", os.O_RDONLY),
    ),
    "pyarrow.parquet.core": (_Opener("ParquetWriter.__init__", 1, "where", _WRITE),),
    "pyarrow.dataset": (_Opener("write_dataset", 1, "base_dir", _WRITE | os.O_DIRECTORY),),
    "pyarrow.feather": (_Opener("write_feather", 1, "dest", _WRITE),),
    "pyarrow.csv": (_Opener("write_csv", 1, "output_file", _WRITE),),
    "tokenizers": (
        _Opener("Tokenizer.save", 1, "path", _WRITE),
        _Opener("Tokenizer.from_file", 0, "path", os.O_RDONLY),
    ),
    "torch.jit": (
        _Opener("RecursiveScriptModule.save", 1, "f", _WRITE),
        _Opener("ScriptFunction.save", 1, "filename", _WRITE),
        _Opener("load", 0, "f", os.O_RDONLY),
    ),
    "torchvision.io.image": (_Opener("write_file", 0, "filename", _WRITE),),
}
ROOTS: Final = frozenset(name.partition(".")[0] for name in _NATIVE)
"""Packages after whose import `replace_native` is to be called."""


def replace_native(
    place_of: Callable[[Any, int], Any], replace: Callable[[Any, str, Any], None]
) -> None:
    """Have the libraries that are imported so far ask `place_of(path, flags)` where to open a file.

    `replace(owner, name, value)` sets an attribute, once.
    """
    for module, openers in _NATIVE.items():
        there = sys.modules.get(module)
        for opener in openers if there is not None else ():
            owner: Any = there
            *path, name = opener.function.split(".")
            for each in path:
                owner = getattr(owner, each, None)
            # A module whose import is under way may not have it yet.
            original = None if owner is None else getattr(owner, name, None)
            if original is not None and not hasattr(original, "_dlio_opener"):
                replace(owner, name, _wrapped(original, opener, place_of))


def _wrapped(
    original: Callable[..., Any], opener: _Opener, place_of: Callable[[Any, int], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def opened(*args: Any, **options: Any) -> Any:
        flags = opener.flags
        if flags is None:
            after = args[opener.place + 1 :]
            flags = _MODES.get(options.get("mode", after[0] if after else "r"), _UPDATE)
        if opener.name in options:
            options[opener.name] = place_of(options[opener.name], flags)
        elif len(args) > opener.place:
            k = opener.place
            args = (*args[:k], place_of(args[k], flags), *args[k + 1 :])
        return original(*args, **options)

    opened._dlio_opener = opener  # type: ignore[attr-defined]
    return opened


def replace_torch(
    place_of: Callable[[Any, int], Any], replace: Callable[[Any, str, Any], None]
) -> None:
    """As `replace_native`, for torch's zip files, of torch.save, torch.export and torch.package."""
    import torch

    class PlacedFileWriter(torch._C.PyTorchFileWriter):
        """A writer of zip files at the rank's own place."""

        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            super().__init__(place_of(file, _WRITE), *args, **options)

    class PlacedFileReader(torch._C.PyTorchFileReader):
        """A reader of zip files at the rank's own place."""

        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            super().__init__(place_of(file, os.O_RDONLY), *args, **options)

    replace(torch._C, "PyTorchFileWriter", PlacedFileWriter)
    replace(torch._C, "PyTorchFileReader", PlacedFileReader)
