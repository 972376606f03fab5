"""The contenders of `dlio bench loader`, each in a process of its own, which they keep.

The benchmark starts one for each, has it prepare its data, and then asks for passes in turn;
so none shares an interpreter, threads or memory with another, and each process's memory can be
looked at. `python -m dlio_bench.contenders` is such a process; it takes requests on standard
input, and answers on standard output, a JSON object a line.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, Self

from dlio.errors import UsageError
from dlio.util.threads import Workers
from dlio_bench.task import Pass, Task

__all__ = [
    "CONTENDERS",
    "Contender",
    "decode",
    "dlio_256",
    "dlio_folder",
    "dlio_rows",
    "full_decode",
    "missing",
]

_START_TIMEOUT_S: Final = 900.0


def dlio_folder(task: Task) -> Pass:
    """dlio from its RAM tier, over the files as they are."""
    return _dlio(task, os.path.dirname(os.path.dirname(task.files[0])))


def dlio_rows(task: Task) -> Pass:
    """The same pictures packed losslessly, with restart rows."""
    from dlio_staging.pack import pack

    folder = os.path.dirname(os.path.dirname(task.files[0]))
    pack(folder, f"{task.scratch}/packed")
    return _dlio(task, f"{task.scratch}/packed")


def dlio_256(task: Task) -> Pass:
    """The same pictures packed at a short side of 256 pixels, quality 90."""
    from dlio_staging.pack import pack

    folder = os.path.dirname(os.path.dirname(task.files[0]))
    pack(folder, f"{task.scratch}/packed", resize=256, quality=90)
    return _dlio(task, f"{task.scratch}/packed")


def _dlio(task: Task, path: str) -> Pass:
    import dlio

    room = sum(os.path.getsize(file) for file in task.files)
    tiers = f"ram:{int(1.2 * room) + (64 << 20)}B"
    data = dlio.open(path, tiers=tiers, image_size=task.size)
    loader = dlio.DataLoader(
        data, task.batch_size, shuffle=True, num_workers=task.workers, persistent_workers=True
    )

    def run() -> Iterator[int]:
        for images, _ in loader:
            yield len(images)

    return run


def decode(task: Task) -> Pass:
    """The ceiling of dlio's own decoder: payloads in memory, threads, nothing else."""
    import numpy as np

    from dlio.image.crop import Crop
    from dlio.image.decode import Decoder

    decoder = Decoder(Crop(task.size, True), 0)
    uniforms = decoder.draw(0, np.arange(len(task.files), dtype=np.int64))

    def one(index: int, payload: bytes, out: Any) -> None:
        decoder.decode(payload, "a picture", uniforms[index], out)

    return _bare(task, one)


def full_decode(task: Task) -> Pass:
    """A bare loop that decodes whole pictures (libjpeg-turbo, fast DCT) and resizes their crops."""
    import numpy as np

    from dlio.image.crop import Crop
    from dlio.image.decode import Decoder, opencv

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

    payloads = []
    for file in task.files:
        with open(file, "rb") as opened:
            payloads.append(opened.read())

    def run() -> Iterator[int]:
        counts = [0] * task.workers

        def work(first: int) -> None:
            out = np.empty((task.size, task.size, 3), np.uint8)
            for index in range(first, len(payloads), task.workers):
                one(index, payloads[index], out)
                counts[first] += 1

        with Workers("dlio-bench", work, task.workers) as workers:
            workers.wait()
        yield sum(counts)

    return run


CONTENDERS: Final[dict[str, tuple[str, str | None]]] = {
    "torch": ("torch DataLoader, Pillow, uint8 (processes)", None),
    "torch_floats": ("torch DataLoader, Pillow, ToTensor (processes)", None),
    "torch_dlio_data": ("torch DataLoader over dlio's data set (processes)", None),
    "webdataset": ("WebDataset, Pillow", "webdataset"),
    "mosaic": ("MosaicML Streaming, Pillow", "streaming"),
    "litdata": ("LitData, Pillow", "litdata"),
    "grain": ("Grain, Pillow", "grain"),
    "spdl": ("SPDL, FFmpeg (threads)", "spdl"),
    "ffcv": ("FFCV, jpg, original size (threads)", "ffcv"),
    "ffcv_256": ("FFCV, jpg, 256 pixels, quality 90 (threads)", "ffcv"),
    "full_decode": ("bare loop: decode whole, resize (threads)", None),
    "ceiling": ("bare loop: dlio's decoder alone (threads)", None),
    "dlio": ("dlio.DataLoader, RAM tier (threads)", None),
    "dlio_rows": ("dlio.DataLoader, packed with restart rows", None),
    "dlio_256": ("dlio.DataLoader, packed at 256 pixels, quality 90", None),
}
"""Name: a description, and the package that it needs."""


def missing(name: str) -> str | None:
    """Why a contender cannot take part; None when it can."""
    package = CONTENDERS[name][1]
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


class Contender:
    """One contender's process. Raises UsageError when it does not get ready."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        os.makedirs(task.scratch, exist_ok=True)
        self._said = open(f"{task.scratch}.log", "w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dlio_bench.contenders"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"},
        )
        self.ask({"name": name, "task": asdict(task)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in _tree(self._process.pid)[::-1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def one_pass(self) -> dict[str, float]:
        """`samples`, `seconds`, and `first_batch_s` of a pass."""
        self._signal(signal.SIGCONT)
        return self.ask({"pass": True})

    def pause(self) -> None:
        """Stop it: some contenders poll while they wait, which would slow the others' turns."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in _tree(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def footprint(self) -> dict[str, float]:
        """`pss_MiB`, `processes` and `threads` of the process and all below it."""
        pids = _tree(self._process.pid)
        return {
            "pss_MiB": sum(_pss(pid) for pid in pids) / 1024,
            "processes": len(pids),
            "threads": sum(_threads(pid) for pid in pids),
        }

    def ask(self, question: Mapping[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            while line := self._process.stdout.readline():
                if line.startswith('{"dlio":'):
                    answer: dict[str, float] = json.loads(line)["dlio"]
                    return answer
        except OSError:
            pass
        finally:
            watch.cancel()
        self._said.seek(0)
        last = self._said.read().strip().splitlines()[-1:] or ["it ended without a word"]
        raise UsageError(f"{self.name} cannot take part: {last[0]}")


def _tree(pid: int) -> list[int]:
    """A process and its descendants in the same session; others have left it on purpose."""
    processes, session = [pid], os.getsid(pid)
    for parent in processes:
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{parent}/children") as file:
            below = [int(text) for text in file.read().split()]
            processes += [child for child in below if os.getsid(child) == session]
    return processes


def _pss(pid: int) -> int:
    """KiB of memory, that which is shared divided among its sharers."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return 0


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _serve() -> None:
    from dlio_bench import peers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries must not mix with answers.
    run: Pass | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any] = {}
        if "name" in question:
            names = {"dlio": dlio_folder, "ceiling": decode, "torch": peers.torch_pillow}
            own = names.get(question["name"], globals().get(question["name"]))
            make = own or getattr(peers, question["name"])
            run = make(Task(**question["task"]))
        else:
            assert run is not None
            started = time.perf_counter()
            samples, first = 0, None
            for count in run():
                first = first if first is not None else time.perf_counter() - started
                samples += count
            seconds = time.perf_counter() - started
            answer = {"samples": samples, "seconds": seconds, "first_batch_s": first}
        answers.write(json.dumps({"dlio": answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
