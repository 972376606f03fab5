"""Other libraries' loaders over the same pictures, for `dlio bench loader`.

Each is given its own format, written once, with the files' bytes as they are (FFCV's writer always
encodes anew, at quality 90). All end in uint8 batches of shape (n, 3, size, size), by a random
resized crop and a flip. They want an environment of their own, for their requirements contradict
each other's and ours:

    python -m venv peers && peers/bin/pip install torch==2.13.0 '.[mpi,bench]'

SPDL looks for FFmpeg's libraries (Debian: libavdevice59 libavfilter8); FFCV is built where OpenCV's
and libjpeg-turbo's headers are (libopencv-dev libturbojpeg0-dev pkg-config g++, then
`pip install numba cython && pip install --no-build-isolation ffcv`).
"""

import functools
import importlib
import io
import os
import random
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch

from dlio_bench.pillow import PillowImages, cropped
from dlio_bench.task import Pass, Task

__all__ = [
    "ffcv",
    "ffcv_256",
    "grain",
    "litdata",
    "mosaic",
    "spdl",
    "torch_dlio_data",
    "torch_floats",
    "torch_pillow",
    "webdataset",
]

_OPERATORS: Final = 60
"""Most operators of torchvision to stand in for."""


def torch_pillow(task: Task, floats: bool = False) -> Pass:
    """Return a pass of torch's loader, which decodes with Pillow in its processes."""
    data = PillowImages(task.files, task.labels, task.size, floats)
    return _counted(
        torch.utils.data.DataLoader(
            data,
            task.batch_size,
            shuffle=True,
            num_workers=task.workers,
            persistent_workers=task.workers > 0,
        )
    )


def torch_floats(task: Task) -> Pass:
    """Return a pass of torch's loader that also normalises samples to float32."""
    return torch_pillow(task, floats=True)


def torch_dlio_data(task: Task) -> Pass:
    """torch's loader, its processes, over a data set of dlio's."""
    import dlio

    folder = os.path.dirname(os.path.dirname(task.files[0]))
    data = dlio.open(folder, tiers="none", image_size=task.size)
    return _counted(
        torch.utils.data.DataLoader(
            data,
            task.batch_size,
            shuffle=True,
            num_workers=task.workers,
            persistent_workers=task.workers > 0,
        )
    )


def webdataset(task: Task) -> Pass:
    """Return a pass of WebDataset over tar files."""
    import tarfile

    import webdataset as wds

    shards = max(4, task.workers)
    for shard in range(shards):
        with tarfile.open(f"{task.scratch}/{shard:03d}.tar", "w") as tar:
            for k in range(shard, len(task.files), shards):
                for name, data in (("jpg", _read(task.files[k])), ("cls", b"%d" % task.labels[k])):
                    info = tarfile.TarInfo(f"{k:08d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))

    def sample(parts: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return cropped(io.BytesIO(parts["jpg"]), task.size), int(parts["cls"])

    urls = f"{task.scratch}/{{000..{shards - 1:03d}}}.tar"
    data = wds.WebDataset(urls, shardshuffle=shards, empty_check=False).shuffle(1000).map(sample)
    return _counted(
        torch.utils.data.DataLoader(
            data,
            task.batch_size,
            num_workers=task.workers,
            persistent_workers=task.workers > 0,
        )
    )


def mosaic(task: Task) -> Pass:
    """Return a pass of MosaicML Streaming over its shards."""
    _let_torchvision_load()
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=task.scratch, columns={"image": "bytes", "label": "int"}) as out:
        for file, label in zip(task.files, task.labels, strict=True):
            out.write({"image": _read(file), "label": label})

    class Pictures(StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return cropped(io.BytesIO(item["image"]), task.size), item["label"]

    data = Pictures(local=task.scratch, shuffle=True, batch_size=task.batch_size)
    return _counted(
        torch.utils.data.DataLoader(
            data,
            task.batch_size,
            num_workers=task.workers,
            persistent_workers=task.workers > 0,
        )
    )


def litdata(task: Task) -> Pass:
    """Return a pass of LitData over its chunks."""
    import litdata as ld

    pairs = list(zip(task.files, task.labels, strict=True))
    ld.optimize(
        fn=_as_item,
        inputs=pairs,
        output_dir=task.scratch,
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )

    data = ld.StreamingDataset(
        task.scratch, shuffle=True, transform=functools.partial(_of_item, task.size)
    )
    loader = ld.StreamingDataLoader(
        data, batch_size=task.batch_size, num_workers=task.workers, persistent_workers=True
    )
    return _counted(loader)


def _as_item(pair: tuple[str, int]) -> dict[str, Any]:
    return {"image": _read(pair[0]), "label": pair[1]}


def _of_item(size: int, item: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return cropped(io.BytesIO(item["image"]), size), item["label"]


def spdl(task: Task) -> Pass:
    """Return a pass of SPDL: a pipeline of threads, decoding with FFmpeg."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def decode(index: int) -> Any:
        packets = spdl.io.demux_image(_read(task.files[index]))
        top, left, height, width = PillowImages.crop(packets.height, packets.width)
        steps = [
            f"crop={width}:{height}:{left}:{top}",
            f"scale={task.size}:{task.size}:flags=bilinear",
            *(["hflip"] if random.random() < 0.5 else []),
            "format=pix_fmts=rgb24",
        ]
        return spdl.io.decode_packets(packets, filter_desc=",".join(steps))

    def batch(frames: list[Any]) -> Any:
        return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2)

    def run() -> Iterator[int]:
        order = list(range(len(task.files)))
        random.shuffle(order)
        builder = PipelineBuilder().add_source(order)
        builder = builder.pipe(decode, concurrency=task.workers).aggregate(task.batch_size)
        pipeline = builder.pipe(batch).add_sink(3).build(num_threads=task.workers)
        with pipeline.auto_stop():
            for images in pipeline:
                yield len(images)

    return run


def grain(task: Task) -> Pass:
    """Return a pass of Grain over the files."""
    import grain.python as gp

    class Source:
        def __len__(self) -> int:
            return len(task.files)

        def __getitem__(self, index: Any) -> Any:
            return _read(task.files[index]), task.labels[index]

    class Crop(gp.MapTransform):  # type: ignore[misc, unused-ignore]
        def map(self, element: Any) -> Any:
            return cropped(io.BytesIO(element[0]), task.size).numpy(), element[1]

    def run() -> Iterator[int]:
        sampler = gp.IndexSampler(
            num_records=len(task.files),
            shuffle=True,
            seed=random.randint(0, 1 << 30),
            num_epochs=1,
            shard_options=gp.NoSharding(),
        )
        loader = gp.DataLoader(
            data_source=Source(),
            sampler=sampler,
            operations=[Crop(), gp.Batch(task.batch_size)],
            worker_count=task.workers,
        )
        for images, _ in loader:
            yield len(images)

    return run


def ffcv(task: Task, resize: int | None = None) -> Pass:
    """Return a pass of FFCV over its file of images, encoded anew.

    Args:
        resize: length of the shorter edge to which larger images are reduced; None leaves them.
    """
    _let_torchvision_load()
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Pictures:
        def __len__(self) -> int:
            return len(task.files)

        def __getitem__(self, index: int) -> Any:
            with Image.open(task.files[index]) as image:
                picture = image.convert("RGB")
            if resize is not None:
                scale = resize / min(picture.size)
                if scale < 1:
                    size = (round(picture.width * scale), round(picture.height * scale))
                    picture = picture.resize(size, Image.Resampling.BOX)
            return picture, task.labels[index]

    path = f"{task.scratch}/pictures.beton"
    field = RGBImageField(write_mode="jpg", jpeg_quality=90)
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
    return _counted(loader)


def ffcv_256(task: Task) -> Pass:
    """Return a pass of FFCV over images reduced to a shorter edge of 256 pixels."""
    return ffcv(task, 256)


def _counted(loader: Any) -> Pass:
    def run() -> Iterator[int]:
        for batch in loader:
            yield len(batch[0])

    return run


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _let_torchvision_load() -> None:
    """With a torch for CPUs, its wheel from PyPI lacks its operators and stops at the first that
    it looks for; nothing here uses one, so they are given names."""
    for _ in range(_OPERATORS):
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library: Any = torch.library
            kept = library.Library("torchvision", "FRAGMENT")
            kept.define(f"{missing[1]}(Tensor x) -> Tensor")
            _kept.append(kept)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return


_kept: list[Any] = []
