"""Tiers that hold a part of the data, compared with an LRU of that size and the page cache."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, TypedDict

import numpy as np

from dlio_bench.storage_cases.page_cache import drop

SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
_CGROUP: Final = "/sys/fs/cgroup/memory"
_SLACK: Final = 1 << 20
"""Memory that the kernel also charges to the group."""
_READ: Final = """
import json, os, sys
group, files, orders, room = json.load(sys.stdin)
with open(f"{group}/tasks", "w") as tasks:
    tasks.write(str(os.getpid()))
buffer = bytearray(1 << 20)
with open(f"{group}/memory.usage_in_bytes") as used, \
        open(f"{group}/memory.limit_in_bytes", "w") as limit:
    limit.write(str(int(used.read()) + room))
def read_bytes():
    with open("/proc/self/io") as told:
        return int(next(line for line in told if line.startswith("read_bytes")).split()[1])
found = []
for order in orders:
    before = read_bytes()
    for number in order:
        descriptor = os.open(files[number], os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        while os.readv(descriptor, [buffer]):
            pass
        os.close(descriptor)
    found.append(read_bytes() - before)
print(json.dumps(found))
"""


class CapacityRow(TypedDict):
    """Bytes that a second epoch reads from the source, as shares of the data set."""

    share: float
    """Size of the tiers, as a share of the stored data set."""
    held: float
    """Share of the data set that the tiers hold."""
    dlio: float
    bound: float
    """Largest share that dlio may read."""
    evenness_sigma: float
    lru: float
    page_cache: float | None
    """None where it cannot be measured."""


def capacity(source: str, shares: tuple[float, ...] = SHARES) -> list[CapacityRow]:
    """Bytes that the second epoch reads from the source, as shares of the data set, where tiers
    hold a share of it: dlio's, an LRU of samples that is simulated, the page cache in a control
    group of that size (None where there is none); and how evenly dlio's hits fall."""
    import dlio
    from dlio.data.reader import open_reader
    from dlio.plan.order import Order
    from dlio.storage.mount import block_bytes_of

    reader = open_reader(source)
    sizes = np.asarray(reader.sizes, np.int64)
    names = [os.path.join(reader.path, reader.name(k)) for k in range(len(reader))]
    single = reader.format == "folder"
    stored = int(block_bytes_of(reader).sum())
    reader.close()
    whole = int(sizes.sum())
    results: list[CapacityRow] = []
    for share in shares:
        room = int(share * stored)
        with (
            dlio.open(source, tiers=f"ram:{room}B", image_size=None) as data,
            dlio.DataLoader(
                data, 64, shuffle=True, num_workers=2, collate_fn=len, mode="global"
            ) as loader,
        ):
            for _ in itertools.chain(loader, loader):
                pass
            bytes_by_place = loader.stats()["bytes"]
            assert data.mounted is not None
            home = data.mounted.placement.home
            everything = np.arange(len(data), dtype=np.int64)
            orders = [Order(len(data), data.seed, epoch).samples(everything) for epoch in (0, 1)]
            hits = home[data.reader.layout.block_of(orders[1])] >= 0
        kept = float(sizes[orders[1]][hits].sum()) / whole
        results.append(
            {
                "share": share,
                "held": kept,
                "dlio": bytes_by_place["source"] / whole,
                "bound": 1.02 * (1 - kept),
                "evenness_sigma": _evenness(hits),
                "lru": _lru(sizes, orders, share * whole) / whole,
                "page_cache": _page_cache(names, orders, share * whole, whole) if single else None,
            }
        )
    return results


def _evenness(hits: Any) -> float:
    """The largest deviation of a twentieth's hits from their mean, in standard deviations."""
    share = float(hits.mean())
    parts = np.array_split(hits, 20)
    return max(
        abs(float(part.sum()) - share * len(part))
        / math.sqrt(max(1e-9, len(part) * share * (1 - share)))
        for part in parts
    )


def _lru(sizes: Any, orders: list[Any], room: float) -> int:
    """Bytes that the last epoch misses."""
    kept: OrderedDict[int, int] = OrderedDict()
    used = missed = 0
    for order in orders:
        missed = 0
        for sample in order.tolist():
            if sample in kept:
                kept.move_to_end(sample)
                continue
            size = int(sizes[sample])
            missed += size
            kept[sample] = size
            used += size
            while used > room:
                used -= kept.popitem(last=False)[1]
    return missed


def _page_cache(files: list[str], orders: list[Any], room: float, whole: int) -> float | None:
    """Share of the bytes that a process reads from disk in the second epoch, where it and the
    page cache have that much memory; None where that cannot be arranged."""
    with _group() as group:
        if group is None:
            return None
        drop(files, everything=False)
        done = subprocess.run(
            [sys.executable, "-S", "-c", _READ],
            input=json.dumps(
                [group, files, [order.tolist() for order in orders], int(room) + _SLACK]
            ),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if done.returncode:
        return None
    first, second = json.loads(done.stdout)
    return second / whole if first else None


@contextlib.contextmanager
def _group() -> Iterator[str | None]:
    """A control group (v1) for memory; None where there is none, or no right to it."""
    path = os.path.join(_CGROUP, f"dlio-bench-{os.getpid()}")
    try:
        os.mkdir(path)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(path)
