"""The contenders that run with dlio's own environment: dlio, torch's loader, and bare loops.

`python -m dlio_bench.peers.dlio_contenders NAME` serves one of them.
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from dlio_bench.bench_data import ram_tier
from dlio_bench.peers.standalone.runners.protocol import Pass, Task, serve

_DECODED: Final = 256 * 512 * 3
"""Room for each decoded picture, on average, in bytes."""


def _packed(task: Task, **options: Any) -> str:
    from dlio_staging.pack_folder import pack

    pack(_folder(task), f"{task.scratch}/packed", **options)
    return f"{task.scratch}/packed"


def _small(task: Task) -> str:
    """The same pictures packed at a shorter edge of 256 pixels, quality 90."""
    return _packed(task, resize=256, quality=90)


def _folder(task: Task) -> str:
    return os.path.dirname(os.path.dirname(task.files[0]))


def _loader(task: Task, path: str, more_tiers: str = "", floats: bool = False) -> Pass:
    import dlio
    from dlio import transforms as T  # noqa: N812 - as everybody calls them

    size = sum(map(os.path.getsize, task.files))
    steps: list[Any] = [T.RandomResizedCrop(task.size), T.RandomHorizontalFlip(), T.ToTensor()]
    made: dict[str, Any] = {"transform": T.Compose(steps)} if floats else {"image_size": task.size}
    data = dlio.open(path, tiers=ram_tier(size) + more_tiers, **made)
    loader = dlio.DataLoader(
        data, task.batch_size, shuffle=True, num_workers=task.workers, persistent_workers=True
    )
    return lambda: iter(loader)


def _torch(task: Task, floats: bool) -> Pass:
    """torch's loader, which decodes with Pillow in its processes."""
    from dlio_bench.pillow import PillowImages

    return _of_torch(PillowImages(task.files, task.labels, task.size, floats), task)


def _torch_dlio_data(task: Task) -> Pass:
    """torch's loader, its processes, over a data set of dlio's."""
    import dlio

    return _of_torch(dlio.open(_folder(task), tiers="none", image_size=task.size), task)


def _of_torch(data: Any, task: Task) -> Pass:
    import torch

    loader = torch.utils.data.DataLoader(
        data,
        task.batch_size,
        shuffle=True,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )
    return lambda: iter(loader)


def _ceiling(task: Task) -> Pass:
    """The ceiling of dlio's own decoder: payloads in memory, threads, nothing else."""
    import numpy as np

    from dlio.image.crop import Crop
    from dlio.image.decoder import Decoder

    decoder = Decoder(Crop(task.size, True), 0)
    uniforms = decoder.draw(0, np.arange(len(task.files), dtype=np.int64))

    def one(index: int, payload: bytes, out: Any) -> None:
        decoder.decode(payload, "a picture", uniforms[index], out)

    return _bare(task, one)


def _full_decode(task: Task) -> Pass:
    """A bare loop that decodes whole pictures (libjpeg-turbo, fast DCT) and resizes their crops."""
    import numpy as np

    from dlio.image.crop import Crop
    from dlio.image.decoder import Decoder, opencv

    simplejpeg: Any = importlib.import_module("simplejpeg")
    cv2 = opencv()
    crop = Crop(task.size, True)
    uniforms = Decoder(crop, 0).draw(0, np.arange(len(task.files), dtype=np.int64))
    memory = threading.local()

    def one(index: int, payload: bytes, out: Any) -> None:
        if not hasattr(memory, "pixels"):
            memory.pixels = np.empty(100_000_000, np.uint8)
        pixels = simplejpeg.decode_jpeg(
            payload, "RGB", fastdct=True, fastupsample=True, buffer=memory.pixels
        )
        box = crop.box(pixels.shape[0], pixels.shape[1], uniforms[index].tolist())
        part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        shrinks = min(box.height, box.width) >= 2 * task.size
        how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        cv2.resize(part, (task.size, task.size), dst=out, interpolation=how)
        if box.flip:
            cv2.flip(out, 1, dst=out)

    return _bare(task, one)


def _bare(task: Task, one: Callable[[int, bytes, Any], None]) -> Pass:
    """Every payload once, in `workers` threads, into the same few slots."""
    import numpy as np

    from dlio.util.threads import Workers

    payloads = []
    for file in task.files:
        with open(file, "rb") as opened:
            payloads.append(opened.read())

    def run() -> Iterator[tuple[Any, Any]]:
        done: list[list[int]] = [[] for _ in range(task.workers)]

        def work(first: int) -> None:
            out = np.empty((task.size, task.size, 3), np.uint8)
            for index in range(first, len(payloads), task.workers):
                one(index, payloads[index], out)
                done[first].append(task.labels[index])

        with Workers("dlio-bench", work, task.workers) as workers:
            workers.wait()
        yield None, [label for part in done for label in part]

    return run


MAKERS: Final[dict[str, Callable[[Task], Pass]]] = {
    "ceiling": _ceiling,
    "dlio": lambda task: _loader(task, _folder(task)),
    "dlio_256": lambda task: _loader(task, _small(task)),
    "dlio_floats": lambda task: _loader(task, _folder(task), floats=True),
    "dlio_raw": lambda task: _loader(
        task, _small(task), f",ram:{len(task.files) * _DECODED + (64 << 20)}B:decoded"
    ),
    "dlio_rows": lambda task: _loader(task, _packed(task)),
    "full_decode": _full_decode,
    "torch": partial(_torch, floats=False),
    "torch_dlio_data": _torch_dlio_data,
    "torch_floats": partial(_torch, floats=True),
}
"""Functions that prepare a contender's data and return its pass, by name."""


if __name__ == "__main__":
    serve(MAKERS[sys.argv[1]], ())
