"""FFCV: threads over its own file, of JPEGs that its writer encodes, or of decoded pictures."""

from collections.abc import Iterator
from typing import Any, Final

from .crops import shrunk
from .protocol import Pass, Task
from .torchlike import let_torchvision_load

_SIDE: Final = 256
"""Shorter edge of reduced pictures, in pixels."""


def ffcv(task: Task) -> Pass:
    """Return a pass over JPEGs of the original size, quality 90."""
    return _loader(task, "jpg", None)


def ffcv_256(task: Task) -> Pass:
    """Return a pass over JPEGs with a shorter edge of 256 pixels, quality 90."""
    return _loader(task, "jpg", _SIDE)


def ffcv_raw(task: Task) -> Pass:
    """Return a pass over decoded pictures with a shorter edge of 256 pixels."""
    return _loader(task, "raw", _SIDE)


def _loader(task: Task, mode: str, side: int | None) -> Pass:
    let_torchvision_load()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    class Pictures:
        def __len__(self) -> int:
            return len(task.files)

        def __getitem__(self, index: int) -> Any:
            return shrunk(task.files[index], side), task.labels[index]

    path = f"{task.scratch}/pictures.beton"
    field = RGBImageField(write_mode=mode, jpeg_quality=90)
    writer = DatasetWriter(path, {"image": field, "label": IntField()}, num_workers=1)
    writer.from_indexed_dataset(Pictures())
    loader = Loader(
        path,
        batch_size=task.batch_size,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((task.size, task.size)),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )

    def run() -> Iterator[tuple[Any, Any]]:
        for images, labels in loader:
            yield images, labels.reshape(-1)

    return run
