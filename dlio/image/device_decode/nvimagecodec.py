"""nvImageCodec, loaded at first use, and its decoders.

Source: https://docs.nvidia.com/cuda/nvimagecodec. Its CPU backend needs neither a GPU nor CUDA.
"""

import ctypes.util
import glob
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import UsageError
from dlio.util.child_processes import variable
from dlio.util.forks import new_lock

_BY_CUDA: Final = {
    "12": "`pip install 'nvidia-nvimgcodec-cu12[nvjpeg]'` (dlio's extra gpu)",
    "13": "`pip install 'nvidia-nvimgcodec-cu13[nvjpeg]'` (dlio's extra gpu-cu13)",
}
REMEDY: Final = _BY_CUDA.get((torch.version.cuda or "").partition(".")[0], _BY_CUDA["12"])
"""Names the package for torch's release of CUDA, as `dlio.util.extras` does."""
_MODULE: Final = "nvidia.nvimgcodec"
_WHEELS: Final = ("nvjpeg", "cu13")
"""Folders of the wheels of nvJPEG for CUDA 12 and 13, in the package `nvidia`."""
_TOOLKIT: Final = "/usr/local/cuda/lib64"
_VERBOSITY: Final = "PYNVIMGCODEC_VERBOSITY"
_OPTIONS: Final = ":fancy_upsampling=0 :fast_idct=1"
"""The pixels of the CPU decoder: upsampling by repetition and libjpeg's fast inverse transform."""
_UNUSED: Final = (b"nvjpeg2k", b"nvJPEG2000", b"nvtiff", b"nvTIFF", b"load nvjpeg library")
"""Words in complaints about libraries for other formats, and about nvJPEG, which `NvImageCodec`
looks for itself where it needs it."""
_lock = new_lock()


@dataclass(frozen=True, slots=True)
class PixelBuffer:
    """Memory for the pixels of one image, in flat memory for many."""

    pixels: torch.Tensor
    """uint8, of one dimension."""
    at: int
    """Of its first byte."""
    height: int
    width: int

    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of shape (height, width, 3)."""
        count = 3 * self.height * self.width
        return self.pixels[self.at : self.at + count].view(self.height, self.width, 3)


class _DevicePixels:
    """Memory of a device, for nvImageCodec. A tensor would take longer to make, and release the
    interpreter's lock, for which hundreds of images would wait one after another."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, place: PixelBuffer, first: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (place.height, place.width, 3),
            "typestr": "|u1",
            "data": (first + place.at, False),
            "version": 2,
        }


class NvImageCodec:
    """Decodes batches of JPEGs into memory of the caller. One call of `decode` at a time. `threads`
    of the CPU do the work that a device leaves to it.

    Raises UsageError where nvImageCodec, or nvJPEG for a CUDA device, is not installed.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._module = module = _load()
        kinds = [module.BackendKind.CPU_ONLY]
        number = module.NVIMGCODEC_DEVICE_CPU_ONLY
        if device.type == "cuda":
            if not _has_nvjpeg():
                raise UsageError(f"decode='device' on {device} needs nvJPEG: {REMEDY}")
            # Hardware engines where the GPU has them, then its processors; not the CPU, whose
            # pixels would lie on the host.
            kinds = [
                module.BackendKind.HW_GPU_ONLY,
                module.BackendKind.GPU_ONLY,
                module.BackendKind.HYBRID_CPU_GPU,
            ]
            number = torch.cuda.current_device() if device.index is None else device.index
        self._decoder = module.Decoder(
            device_id=number,
            max_num_cpu_threads=threads,
            backends=[module.Backend(kind) for kind in kinds],
            options=_OPTIONS,
        )
        self._params = module.DecodeParams(
            apply_exif_orientation=False,
            color_spec=module.ColorSpec.SRGB,
            sample_format=module.SampleFormat.I_RGB,
        )

    def source(self, image: npt.NDArray[np.uint8], part: tuple[int, int, int, int]) -> object:
        """Return a part of an image, for `decode`; None if it cannot be decoded. From any thread.
        The bytes of the JPEG are not copied; `part` is (top, left, bottom, right) in pixels."""
        module = self._module
        try:
            source = module.CodeStream(image)
            if part != (0, 0, source.height, source.width):
                source = source.get_sub_code_stream(region=module.Region(*part))
        except RuntimeError:  # The CPU decoder says why.
            return None
        return source

    def decode(
        self, sources: Sequence[object], into: Sequence[PixelBuffer], stream: int
    ) -> list[bool]:
        """Decode parts of images; False for those that could not be decoded.

        `sources` are results of `source`, of which none is None; `into` is memory for RGB on the
        library's device, all in one tensor. The pixels are written in the order of `stream`, a
        `cudaStream_t`.
        """
        if not sources:
            return []
        module, pixels = self._module, into[0].pixels
        if pixels.device.type == "cpu":
            targets: list[Any] = [place.tensor().numpy() for place in into]
        else:
            first = pixels.data_ptr()
            targets = [_DevicePixels(place, first) for place in into]
        wrapped = module.as_images(targets, stream, sample_format=module.SampleFormat.I_RGB)
        done = self._decoder.decode(
            list(sources), images=wrapped, params=self._params, cuda_stream=stream
        )
        return [image is not None for image in done]

    def close(self) -> None:
        """End the library's threads."""
        self._decoder = None


def is_installed() -> bool:
    """True if nvImageCodec can be loaded."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(_MODULE) is not None
    return False


def _has_nvjpeg() -> bool:
    """True if nvJPEG is where nvImageCodec looks: in NVIDIA's wheels or in CUDA's toolkit."""
    if ctypes.util.find_library("nvjpeg") is not None:
        return True
    wheels = importlib.util.find_spec("nvidia")
    roots = [] if wheels is None else list(wheels.submodule_search_locations or ())
    folders = [os.path.join(root, kind, "lib") for root in roots for kind in _WHEELS]
    return any(glob.glob(os.path.join(each, "libnvjpeg.so*")) for each in [*folders, _TOOLKIT])


def _load() -> Any:
    """Return the module of nvImageCodec. Raises UsageError where it is not installed."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    with _lock, _without_complaints():
        try:
            return importlib.import_module(_MODULE)
        except ImportError as error:
            raise UsageError(
                f"decode='device' needs nvImageCodec ({error}): {REMEDY}, or leave decode= out"
            ) from error


@contextmanager
def _without_complaints() -> Iterator[None]:
    """Keep complaints about libraries for other formats from stderr; pass on the rest.

    They are written by C++ code that knows no setting for it. Other threads' lines come late.
    """
    quiet = variable(_VERBOSITY, os.environ.get(_VERBOSITY, "0"))
    with quiet, tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        try:
            stderr = os.dup(2)
        except OSError:  # Closed.
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not any(word in line for word in _UNUSED):
                    os.write(2, line)
