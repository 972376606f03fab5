"""WebDataset, MosaicML Streaming and LitData: torch's worker processes, decoding with Pillow."""

import functools
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from .crops import cropped
from .files import read, write_tar
from .protocol import Pass, Task

_OPERATORS: Final = 60
"""Most operators of torchvision to stand in for."""


def webdataset(task: Task) -> Pass:
    """Return a pass over tar files, one or more for each worker."""
    import webdataset as wds

    shards = max(4, task.workers)
    for shard in range(shards):
        chosen = range(shard, len(task.files), shards)
        write_tar(
            f"{task.scratch}/{shard:03d}.tar",
            (
                [(f"{k:08d}.jpg", read(task.files[k])), (f"{k:08d}.cls", b"%d" % task.labels[k])]
                for k in chosen
            ),
        )

    def sample(parts: dict[str, Any]) -> Any:
        return _chw(cropped(io.BytesIO(parts["jpg"]), task.size)), int(parts["cls"])

    urls = f"{task.scratch}/{{000..{shards - 1:03d}}}.tar"
    data = wds.WebDataset(urls, shardshuffle=shards, empty_check=False).shuffle(1000).map(sample)
    return _of_torch(data, task)


def mosaic(task: Task) -> Pass:
    """Return a pass over MosaicML Streaming's shards."""
    let_torchvision_load()
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=task.scratch, columns={"image": "bytes", "label": "int"}) as out:
        for file, label in zip(task.files, task.labels, strict=True):
            out.write({"image": read(file), "label": label})

    class Pictures(StreamingDataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return _chw(cropped(io.BytesIO(item["image"]), task.size)), item["label"]

    data = Pictures(local=task.scratch, shuffle=True, batch_size=task.batch_size)
    return _of_torch(data, task)


def mosaic_rows(task: Task) -> Pass:
    """Return a pass over rows in MosaicML Streaming's shards."""
    let_torchvision_load()
    from streaming import MDSWriter, StreamingDataset

    rows = np.load(task.files[0], mmap_mode="r")
    columns = {"features": f"ndarray:{rows.dtype}:{rows.shape[1]}", "label": "int"}
    with MDSWriter(out=task.scratch, columns=columns) as out:
        for row, label in zip(rows, task.labels, strict=True):
            out.write({"features": np.array(row), "label": label})
    data = StreamingDataset(local=task.scratch, shuffle=True, batch_size=task.batch_size)
    batches: Callable[[], Iterator[Any]] = _of_torch(data, task)
    return lambda: ((batch["features"], batch["label"]) for batch in batches())


def litdata(task: Task) -> Pass:
    """Return a pass over LitData's chunks."""
    let_torchvision_load()
    import litdata as ld

    ld.optimize(
        fn=_as_item,
        inputs=list(zip(task.files, task.labels, strict=True)),
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
    return lambda: iter(loader)


def _of_torch(data: Any, task: Task) -> Pass:
    import torch

    loader = torch.utils.data.DataLoader(
        data, task.batch_size, num_workers=task.workers, persistent_workers=task.workers > 0
    )
    return lambda: iter(loader)


def _as_item(pair: tuple[str, int]) -> dict[str, Any]:
    return {"image": read(pair[0]), "label": pair[1]}


def _of_item(size: int, item: dict[str, Any]) -> Any:
    return _chw(cropped(io.BytesIO(item["image"]), size)), item["label"]


def _chw(pixels: Any) -> Any:
    import torch

    return torch.from_numpy(pixels).permute(2, 0, 1)


def let_torchvision_load() -> None:
    """With a torch for CPUs, its wheel from PyPI lacks its operators and stops at the first that
    it looks for; nothing here uses one, so they are given names."""
    import torch

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
