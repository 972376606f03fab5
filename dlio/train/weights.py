"""Weights of an earlier run: in a file, and in a model."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import torch
from torch import nn

from dlio.errors import UsageError
from dlio.train.feature_spec import find_features, load_place
from dlio.util.input_files import open_input
from dlio.util.limits import why_no_file
from dlio.util.units import counted


def stored_state(path: str) -> dict[str, torch.Tensor]:
    """Read a file that `--save` has written, and maybe another user.

    Takes no more memory than the file has bytes, and executes nothing from it.

    Raises OSError if it cannot be read, ValueError if it is not such a file.
    """
    with open_input(path) as file:
        check_archive(file)
        check_sums(file)
        with _damage_told():
            # With weights_only nothing but tensors and plain containers is unpickled.
            state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in state.items()
    ):
        raise ValueError("it holds more than weights")
    for name, each in state.items():
        if not _is_stored(each):
            raise ValueError(f"its {name[:100]} claims more than is stored, or in another form")
    return state


def check_archive(file: IO[bytes]) -> None:
    """Check that a file is one of torch.save that cannot be unpacked to more than it has.

    The file is left at its beginning. Raises OSError if it cannot be read, ValueError for another.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not a zip archive, as torch.save writes")
    with _damage_told():
        entries = zipfile.ZipFile(file).infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise ValueError("its tensors are compressed, as dlio never does")
    file.seek(0)


def check_sums(file: IO[bytes]) -> None:
    """Check the contents of an archive against its checksums, which torch does not read.

    The file is left at its beginning. Raises OSError if it cannot be read, ValueError if damaged.
    """
    with _damage_told():
        damaged = zipfile.ZipFile(file).testzip()
    if damaged is not None:
        raise ValueError(f"it is damaged: the checksum of {damaged[:100]} differs")
    file.seek(0)


@contextmanager
def _damage_told() -> Iterator[None]:
    """Raise ValueError for any error but OSError: torch and zipfile pass on those of damaged
    files as they come."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__} {lines[0][:200]}"
        raise ValueError(f"it is damaged: {reason}") from error


def _is_stored(tensor: torch.Tensor) -> bool:
    """True if all elements of a tensor lie in its memory: no view repeats any."""
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if not dense or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def read_weights(path: str, option: str = "--weights") -> dict[str, torch.Tensor]:
    """Read a file that `--save` has written.

    Raises UsageError if it cannot be read or is not such a file.
    """
    if reason := why_no_file(path):
        raise UsageError(f"{option} {path}: {reason}: give a file written by --save")
    try:
        return stored_state(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{option} {path}: it is not a file of weights: {error}; give one written by --save"
        ) from error


def load_saved(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    path: str,
    about: Mapping[str, object] | None = None,
) -> None:
    """Load the weights of an earlier run, with the shape that features have given them.

    The model is a new one, made with the same options; it is changed in place. `path` is that of a
    file of --save, or of a checkpoint, whose `RunState` is `about`.

    Raises UsageError for weights of another model, DlioError if features cannot fit the model.
    """
    for feature in find_features():
        if feature.fit_model:
            load_place(feature.fit_model)(model, path, about)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        files = [file for each in find_features() for file in each.files.items()]
        lost = [f", or its {kind} {path}{ending} was lost" for ending, kind in files]
        said = "" if about is not None else "".join(lost)
        raise UsageError(
            f"{path} holds weights of another model{said}: {str(error).splitlines()[-1].strip()}"
        ) from error


@torch.no_grad()
def load_weights(path: str, model: nn.Module, rank: int) -> None:
    """Copy those tensors of a file into a model that have the names and shapes of its own.

    Rank 0 prints how many they are. Raises UsageError if none are.
    """
    given, own = read_weights(path), model.state_dict()
    fitting = [
        name
        for name, value in own.items()
        if name in given
        and (given[name].shape, given[name].dtype) == (value.shape, value.dtype)
        # A table's description of its columns: the task has chosen between the file's and another.
        and value.dtype is not torch.uint8
    ]
    if not fitting:
        names = ", ".join(list(given)[:3])
        raise UsageError(
            f"--weights {path}: none of its tensors ({names}, ...) has a name and shape of the "
            f"model's ({', '.join(list(own)[:3])}, ...): give the --model that it was saved with"
        )
    for name in fitting:
        own[name].copy_(given[name])
    if rank == 0:
        others = [name for name in own if name not in fitting]
        rest = f"; new are {', '.join(others[:4])}" + (", ..." if len(others) > 4 else "")
        print(
            f"{len(fitting)} of {counted(len(own), 'tensor')} of the model come from {path}"
            + (rest if others else ""),
            flush=True,
        )
