"""Open the data of hostile cases in a process of their own each, under limits.

Reads one question a line from standard input, in JSON, and answers each with a line. Each question
is answered by a fork of this process, which has imported the libraries, with a limit of memory and
of processor time; the parent ends it at the deadline.
"""

import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from typing import Any, Final

LIMIT_BYTES: Final = 512 << 20
LIMIT_CPU_S: Final = 10
DEADLINE_S: Final = float(os.environ.get("HOSTILE_DEADLINE_S", 60))
"""Of a case that waits: on a busy machine ten seconds of work may take long."""
_SAMPLES: Final = 2000


def reader(path: Any, options: dict[str, Any]) -> str:
    """Open a data set, and read its first samples and its last."""
    import numpy as np

    from dlio.data.reader import open_reader
    from dlio.data.reader_contract import data_bytes

    if "cache" in options:
        os.environ["DLIO_CACHE"] = options.pop("cache")
    opened = open_reader(path, **options)
    count = len(opened)
    assert count > 0
    assert len(opened.labels) == len(opened.sizes) == count
    opened.classes[:1]
    assert len(opened.fingerprint) == 32
    data_bytes(opened)
    numbers = np.unique(np.r_[: min(count, _SAMPLES), max(0, count - 2) : count]).astype(np.int64)
    payloads = opened.read(numbers)
    for number, payload in zip(numbers.tolist(), payloads, strict=True):
        opened.name(number)
        values = opened.schema.split(payload)
        opened.schema.arrange(values)
        assert len(payload) == opened.sizes[number]
    for block in range(min(opened.layout.blocks, 4)):
        opened.read(opened.layout.samples_of(block)[:_SAMPLES])
    again = opened.read(numbers[:1])
    assert bytes(again[0]) == bytes(payloads[0])
    opened.close()
    return f"{count} samples"


def tier(path: str, options: dict[str, Any]) -> str:
    """Read all blocks of a tier."""
    from dlio.errors import CorruptBlock
    from dlio.storage.manifest import read_manifest
    from dlio.storage.tier import Tier
    from dlio.storage.tier_spec import TierSpec

    opened = Tier(TierSpec("disk", path, 1 << 30), *options["names"])
    damages = []
    for block in sorted(opened.blocks()):
        try:
            info = opened.check(block)
            opened.read_whole(block)
            for place in range(len(info)):
                opened.read(block, place)
        except (CorruptBlock, OSError) as error:
            damages.append(str(error))
    folder = os.open(opened.path, os.O_RDONLY | os.O_DIRECTORY)
    read_manifest(folder, opened.path)
    os.close(folder)
    opened.close()
    return f"{len(damages)} damaged"


def inventory(path: str, _: dict[str, Any]) -> str:
    """List the data sets of a tier's folder."""
    from dlio.storage.inventory import stored_data

    return f"{len(stored_data(path))} data sets"


def checkpoint(path: str, options: dict[str, Any]) -> str:
    """Find the newest intact checkpoint, and read all of it."""
    from dlio.comm.single import SingleCommunicator
    from dlio.train.checkpoint.checkpoint_store import Checkpoints

    with Checkpoints(path, SingleCommunicator()) as checkpoints:
        newest = checkpoints.newest()
        if newest is None:
            return "none"
        tensors = newest.read("")
        assert tensors["all/w"].shape == (64,)
        assert (tensors["all/w"] == float(options["marks"][os.path.basename(newest.path)])).all()
        return os.path.basename(newest.path)


_MODULES: Final = (
    *("h5py", "pyarrow.parquet", "zarr", "dlio.data.reader", "dlio.storage.inventory"),
    *("dlio.storage.tier", "dlio.train.checkpoint.checkpoint_store"),
    *("dlio_readers.folder", "dlio_readers.hdf5"),
    *("dlio_readers.mds", "dlio_readers.parquet", "dlio_readers.shard", "dlio_readers.tables"),
    *("dlio_readers.tar", "dlio_readers.zarr", "dlio_readers.zarrstore"),
)
"""Imported once, before cases fork."""


def memory(path: str, options: dict[str, Any]) -> str:
    """Take some bytes, so that a test sees that they are counted."""
    return f"{path}: {len(b'x' * options['size'])}"


KINDS: Final = {each.__name__: each for each in (reader, tier, inventory, checkpoint, memory)}


def _import_all() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    import numcodecs.blosc
    import pyarrow
    import torch

    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    numcodecs.blosc.use_threads = False


def _answer(ask: dict[str, Any]) -> dict[str, str]:
    from dlio.errors import DlioError

    try:
        return {"result": "right", "text": KINDS[ask["kind"]](ask["path"], ask["options"])}
    except DlioError as error:
        if _memory_ran_out(error):
            return {"result": "memory", "text": str(error)}
        return {"result": "error", "text": str(error)}
    except MemoryError as error:
        return {"result": "memory", "text": repr(error)}
    except BaseException:
        import traceback

        return {"result": "traceback", "text": traceback.format_exc()}


def _memory_ran_out(error: BaseException | None) -> bool:
    """True if an error stands for one of memory, which a machine without limits would have had."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or "malloc" in text or "unable to allocate" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_fork(ask: dict[str, Any], end: int) -> None:
    # The peak until now is its parent's, which had pages of libraries that a fork does not get.
    with open("/proc/self/clear_refs", "wb") as file:
        file.write(b"5")
    with open("/proc/self/status", encoding="ascii") as status:
        rows = dict(line.split(":", 1) for line in status)
    os.write(end, f"{int(rows['VmRSS'].split()[0])}\n".encode())
    base = int(rows["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (base + LIMIT_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a device would give without an end must not fill the disk, either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    said: list[bytes] = []

    def listen() -> None:
        while data := os.read(read, 1 << 16):
            said.append(data)

    threading.stack_size(512 << 10)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    answer = _answer(ask)
    sys.stderr.flush()
    os.close(2)
    listener.join(1)
    answer["said"] = b"".join(said).decode(errors="replace")
    os.write(end, (json.dumps(answer) + "\n").encode())
    os._exit(0)


def _asked(ask: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.setsid()
        try:
            _in_fork(ask, write)
        finally:
            os._exit(1)
    os.close(write)
    data = b""
    while time.monotonic() < began + DEADLINE_S and data.count(b"\n") < 2:
        ready, _, _ = select.select([read], [], [], began + DEADLINE_S - time.monotonic())
        more = os.read(read, 1 << 16) if ready else b""
        if not more:
            break
        data += more
    os.close(read)
    hung = time.monotonic() >= began + DEADLINE_S
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    base, _, said = data.partition(b"\n")
    if said.endswith(b"\n"):
        answer: dict[str, Any] = json.loads(said)
    elif hung:
        answer = {"result": "hang", "text": ""}
    else:
        answer = {"result": "killed", "text": f"status {status}"}
    seconds, peak = usage.ru_utime + usage.ru_stime, max(0, usage.ru_maxrss - int(base)) << 10
    return {**answer, "seconds": seconds, "peak": peak}


def main() -> None:
    """Answer questions until standard input ends."""
    threading.stack_size(512 << 10)
    _import_all()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_asked(json.loads(line))), flush=True)
    os._exit(0)  # The ordinary end, with all these libraries, takes a minute on a busy machine.


if __name__ == "__main__":
    main()
