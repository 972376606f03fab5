"""TurboLoader: crops decoded from a tar by its C++ threads, and its packed format TBL-RAW.

Its threads make float32 in [0, 1], shape (n, 3, size, size), and no other type. The contenders
`turboloader` and `tbl_raw` give that as it comes; those with `_uint8` round it, as a training
script would that wants what the other contenders give.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .files import read, write_tar
from .protocol import Pass, Task

_STORED = 256
"""Side of the pictures in a TBL-RAW file, in pixels."""


def turboloader(task: Task) -> Pass:
    """Return a pass over a tar of the files, with its fused crop decoding."""
    return _epochs(_loader(_tar(task), task, num_workers=task.workers), task)


def turboloader_uint8(task: Task) -> Pass:
    """Return the same pass with batches rounded to uint8."""
    return _rounded(turboloader(task))


def tbl_raw(task: Task) -> Pass:
    """Return a pass over pictures that were decoded once, to 256 x 256 pixels."""
    import turboloader as t

    packed = f"{task.scratch}/pictures.tbl"
    t.tbl.preprocess_to_tbl(_tar(task), packed, image_size=_STORED, num_workers=task.workers)
    return _epochs(_loader(packed, task), task)


def tbl_raw_uint8(task: Task) -> Pass:
    """Return the same pass with batches rounded to uint8."""
    return _rounded(tbl_raw(task))


def _tar(task: Task) -> str:
    path = f"{task.scratch}/pictures.tar"
    write_tar(path, ([(f"{k:08d}.jpg", read(file))] for k, file in enumerate(task.files)))
    return path


def _loader(source: str, task: Task, **options: int) -> Any:
    import turboloader as t

    return t.DataLoader(
        source,
        batch_size=task.batch_size,
        image_size=task.size,
        output_format="pytorch",
        shuffle=True,
        train_aug=True,
        **options,
    )


def _epochs(loader: Any, task: Task) -> Pass:
    labels = np.asarray(task.labels, np.int64)
    epochs = itertools.count()

    def run() -> Iterator[tuple[Any, Any]]:
        loader.set_epoch(next(epochs))
        for images, meta in loader:
            yield images, labels[np.asarray(meta["indices"])]

    return run


def _rounded(floats: Pass) -> Pass:
    def run() -> Iterator[tuple[Any, Any]]:
        for images, labels in floats():
            np.multiply(images, 255, out=images)
            np.rint(images, out=images)
            yield images.astype(np.uint8), labels

    return run
