"""Training steps of a ResNet-50: fed by dlio, and on one batch that stays on the device."""

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dlio
import dlio.transforms as T  # noqa: N812 - as everybody calls them
from dlio.train.compute_device import channels_last
from dlio.train.networks.resnet import resnet50
from dlio.train.precision import Precision
from dlio_bench.bench_data import payload_bytes, ram_tier
from dlio_bench.gpu.decode_case import loader_of
from dlio_bench.gpu.gpu_measurements import GpuMeasurements, GpuRunSettings, rates_in_turn

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def step(place: GpuRunSettings, measured: GpuMeasurements) -> None:
    """Samples/s of training steps (bfloat16, channels last, SGD with momentum), in turn: images
    decoded by the loader's threads, by its processes, on the device where nvImageCodec is
    installed, from the tier of decoded images where there is a GPU; and the same normalised batch
    again and again."""
    from dlio.image.device_decode.nvimagecodec import REMEDY, is_installed

    size = payload_bytes(place.source)
    blocks = ram_tier(size)
    ways = {"threads": blocks, "processes": blocks}
    if is_installed():
        ways["device"] = blocks
    else:
        measured.skipped["step: device"] = f"nvImageCodec is not installed: {REMEDY}"
    if place.device.type == "cuda":
        ways["tier"] = f"gpu:4GiB:decoded,{blocks}"
    else:
        measured.skipped["step: tier"] = "needs a CUDA device"
    training = _ResNetTraining(place)
    transform = T.Compose([T.ToDtype(torch.float32, scale=True), T.Normalize(_MEAN, _STD)])
    for name, tiers in ways.items():
        with (
            dlio.open(
                place.source, tiers=tiers, image_size=place.image_size, transform=transform
            ) as data,
            loader_of(data, place, name, steady=True) as loader,
        ):
            if not len(loader):
                measured.skipped[f"step: {name}"] = f"{len(data)} images are less than a batch"
                continue
            fed = _endless(loader)
            for _ in range(len(loader) + 2):  # Fills the tiers; the device compiles and chooses.
                training(*next(fed))
            sources = {"fed": fed, "resident": itertools.repeat(next(fed))}
            contenders = {key: _steps(each, training, place) for key, each in sources.items()}
            rates = rates_in_turn(contenders, place.repeats)
            fed.close()
        measured.rates(f"ResNet-50 step, {name}", rates)
        measured.ratio(f"ResNet-50 step, {name}: fed / resident", rates["fed"], rates["resident"])


def _endless(loader: Any) -> Generator[Any, None, None]:
    for _ in itertools.count():
        yield from loader


def _steps(
    batches: Iterator[Any], training: "_ResNetTraining", place: GpuRunSettings
) -> Callable[[], int]:
    def run() -> int:
        for _ in range(place.steps):
            training(*next(batches))
        place.wait()
        return place.steps * place.batch_size

    return run


class _ResNetTraining:
    """A ResNet-50 and its optimizer."""

    def __init__(self, place: GpuRunSettings) -> None:
        torch.manual_seed(0)
        self._model: nn.Module = channels_last(resnet50(1000)).to(place.device).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._precision = Precision("bf16", place.device)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision.casting():
            loss = cross_entropy(self._model(images), labels)
        torch.autograd.backward(loss)
        self._optimizer.step()
