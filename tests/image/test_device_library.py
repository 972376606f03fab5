"""The calls of nvImageCodec and of CUDA's streams, by stand-ins that record them."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlio.errors import UsageError
from dlio.image.device_decode import nvimagecodec
from dlio.image.device_decode.jpeg_codec import CudaQueue, HostQueue, queue_for
from dlio.image.device_decode.nvimagecodec import NvImageCodec, PixelBuffer


class _Module:
    """nvImageCodec, as far as it is used: its third image cannot be decoded."""

    NVIMGCODEC_DEVICE_CPU_ONLY = -99999
    BackendKind = SimpleNamespace(
        CPU_ONLY="cpu", HW_GPU_ONLY="hw", GPU_ONLY="gpu", HYBRID_CPU_GPU="hybrid"
    )
    ColorSpec = SimpleNamespace(SRGB="srgb")
    SampleFormat = SimpleNamespace(I_RGB="rgb")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def Backend(self, kind: str) -> str:  # noqa: N802
        return kind

    def DecodeParams(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def Region(self, *sides: int) -> tuple[int, ...]:  # noqa: N802
        return sides

    def CodeStream(self, image: Any) -> Any:  # noqa: N802
        if not len(image):
            raise RuntimeError("not an image")
        return SimpleNamespace(
            height=10, width=20, get_sub_code_stream=lambda region: ("part", region)
        )

    def as_images(self, targets: list[Any], stream: int, sample_format: str) -> list[Any]:
        self.calls.append(("as_images", targets, stream, sample_format))
        return targets

    def Decoder(self, **options: Any) -> Any:  # noqa: N802
        self.calls.append(("Decoder", options))
        return SimpleNamespace(decode=self._decode)

    def _decode(self, sources: list[Any], images: list[Any], params: Any, cuda_stream: int) -> Any:
        self.calls.append(("decode", sources, cuda_stream, params["apply_exif_orientation"]))
        return [image if k != 2 else None for k, image in enumerate(images)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> _Module:
    made = _Module()
    monkeypatch.setattr(nvimagecodec, "_load", lambda: made)
    return made


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_batch_is_decoded_by_one_call(
    device: str, module: _Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvimagecodec, "_has_nvjpeg", lambda: True)
    codec = NvImageCodec(torch.device(device), 3)
    name, options = module.calls[0]
    assert (name, options["max_num_cpu_threads"]) == ("Decoder", 3)
    on_gpu = ["hw", "gpu", "hybrid"]
    assert options["backends"] == (["cpu"] if device == "cpu" else on_gpu)
    assert options["device_id"] == (-99999 if device == "cpu" else 1)
    # In place of memory of a GPU, of which there is none.
    pixels = torch.empty(4 * 600, dtype=torch.uint8, device="cpu" if device == "cpu" else "meta")
    into = [PixelBuffer(pixels, 600 * k, 10, 20) for k in range(4)]
    coded = [np.zeros(k, np.uint8) for k in (5, 0, 5, 5)]
    parts = [(0, 0, 10, 20), (0, 0, 10, 20), (2, 3, 10, 20), (0, 0, 10, 19)]
    made = [codec.source(image, part) for image, part in zip(coded, parts, strict=True)]
    assert [each is None for each in made] == [False, True, False, False]
    known = [0, 2, 3]
    sources = [made[k] for k in known]
    assert codec.decode(sources, [into[k] for k in known], 77) == [True, True, False]
    name, targets, *rest = module.calls[1]
    assert (name, len(targets), rest) == ("as_images", 3, [77, "rgb"])
    for target, k in zip(targets, (0, 2, 3), strict=True):
        if device == "cpu":
            assert target.shape == (10, 20, 3)
            assert target.ctypes.data == pixels.data_ptr() + 600 * k
        else:
            described = target.__cuda_array_interface__
            assert described["shape"] == (10, 20, 3)
            assert described["data"] == (pixels.data_ptr() + 600 * k, False)
    _, sources, stream, applies_exif = module.calls[2]
    assert (stream, applies_exif) == (77, False)
    assert sources[0].height == 10  # The whole image, without a part.
    assert sources[1:] == [("part", (2, 3, 10, 20)), ("part", (0, 0, 10, 19))]
    codec.close()


@pytest.mark.parametrize("wheel", ["nvjpeg", "cu13"])
def test_a_gpu_needs_nvjpeg(
    module: _Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: str
) -> None:
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("dlio.image.device_decode.nvimagecodec._TOOLKIT", str(tmp_path))
    with pytest.raises(UsageError, match=r"nvJPEG: .*nvimgcodec-cu1[23]\[nvjpeg\]"):
        NvImageCodec(torch.device("cuda:0"), 1)
    (tmp_path / wheel / "lib").mkdir(parents=True)
    (tmp_path / wheel / "lib" / "libnvjpeg.so.1").touch()
    NvImageCodec(torch.device("cuda:0"), 1).close()
    NvImageCodec(torch.device("cpu"), 1).close()


def test_a_cuda_queue_waits_for_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            done.append(("event", blocking))

        def record(self, stream: Any) -> None:
            done.append(("record", stream.cuda_stream))

        def synchronize(self) -> None:
            done.append("synchronize")

    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: ("running", given))
    order = queue_for(torch.device("cuda:0"))
    assert isinstance(order, CudaQueue)
    assert order.number == 77
    running: object = order.running()
    assert running == ("running", stream)
    order.wait()
    assert done == [("event", True), ("record", 77), "synchronize"]
    assert isinstance(queue_for(torch.device("cpu")), HostQueue)
