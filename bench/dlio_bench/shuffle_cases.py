"""Cases of `dlio bench shuffle`: how random samples are, partial tiers, and shaped links."""

import contextlib
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio_bench.bench_data import packed_noise
from dlio_bench.bench_ranks import rank_argv
from dlio_bench.results.repeats import ratio, spread
from dlio_bench.storage_cases.page_cache import drop
from dlio_bench.trainings import trained

MODES: Final = ("batch", "global", "ring", "partial(0.1)", "local")
_NODES, _SAMPLES, _BINS = 8, 80_000, 16
_EPOCHS: Final = 8
_PARTS: Final = 8
"""Parts of the data, as they are stored, on which a batch should draw evenly."""
_SAMPLE_BYTES: Final = 4096
_GLOBAL_BATCH: Final = 1024


def statistics() -> dict[str, dict[str, float]]:
    """For each mode, of a rank's stream and of the global batches, over some epochs:

    - `chi2_sigma`: chi-square of position in the epoch against sample number, over all ranks, in
      standard deviations of a uniformly random draw;
    - `serial_sigma`: serial correlation of one rank's sample numbers, likewise;
    - `repeated`: share of a rank's samples that it had in the epoch before, too (1 / nodes by
      chance);
    - `unevenness_sigma`: of how many of a global batch's samples are of each eighth of the data.
    """
    from dlio.loader.planned_traffic import job_of
    from dlio.plan.epoch import plan_epoch
    from dlio.plan.placement import HomeNode

    nodes = tuple(HomeNode(f"node{number}", (1 << 50,)) for number in range(_NODES))
    by_mode = {}
    for mode in MODES:
        job = job_of(_SAMPLES, 100_000, nodes, 1, 32, mode, seed=1)
        table = np.zeros((_BINS, _BINS))
        serial, repeated, uneven = [], [], []
        before: set[int] = set()
        for epoch in range(_EPOCHS):
            windows = [
                plan_epoch(job.plan(epoch, rank)).window(range(job.steps)) for rank in range(_NODES)
            ]
            for window in windows:
                place = np.arange(len(window.samples)) * _BINS // len(window.samples)
                np.add.at(table, (place, window.samples * _BINS // _SAMPLES), 1)
            stream = np.argsort(np.argsort(windows[0].samples)).astype(float)
            correlation = np.corrcoef(stream[:-1], stream[1:])[0, 1]
            serial.append(correlation * math.sqrt(len(stream)))
            mine = set(windows[0].samples.tolist())
            if before:
                repeated.append(len(mine & before) / len(mine))
            before = mine
            cuts = range(0, job.steps - 1, max(1, job.steps // 16))
            batches = (
                np.concatenate([w.samples[w.starts[k] : w.starts[k + 1]] for w in windows])
                for k in cuts
            )
            uneven += _unevenness(batches, _SAMPLES)
        expected = table.sum() / table.size
        chi2 = float(((table - expected) ** 2 / expected).sum())
        # Each epoch's margins are fixed: each sample once, each place once.
        degrees = (_BINS - 1) ** 2
        by_mode[mode] = {
            "chi2_sigma": (chi2 - degrees) / math.sqrt(2 * degrees),
            "serial_sigma": float(np.sum(serial) / math.sqrt(len(serial))),
            "repeated": float(np.mean(repeated)),
            "unevenness_sigma": float(np.mean(uneven)),
        }
    return by_mode


def _unevenness(batches: Iterable[npt.NDArray[np.int64]], samples: int) -> list[float]:
    """For each batch, the root mean square deviation of the counts of the data's eighths, over that
    of a uniformly random draw."""
    deviations = []
    for batch in batches:
        counts = np.bincount(batch * _PARTS // samples, minlength=_PARTS)
        expected = len(batch) / _PARTS
        chance = expected * (1 - 1 / _PARTS)
        deviations.append(math.sqrt(((counts - expected) ** 2).mean() / chance))
    return deviations


def training(
    source: str, held_out: str, seeds: int, epochs: int = 3, ranks: int = 2
) -> dict[str, list[float]]:
    """Held-out accuracy of a small network trained in each mode, by seed; `source` is meant to be
    sorted by class."""
    accuracies: dict[str, list[float]] = {mode: [] for mode in MODES}
    options = {"source": source, "val": held_out, "pretend_nodes": ranks, "epochs": epochs}
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder:
        for seed, mode in itertools.product(range(seeds), MODES):
            one = {**options, "shuffle": mode, "seed": seed}
            report = trained(f"{mode}-{seed}", folder, ranks, one)
            accuracies[mode].append(report["epochs"][-1]["val_accuracy"])
    return accuracies


# Gain of `--source-order block` where samples are small and no tier holds them


_ORDERS: Final = ("sample", "block(4)", "block(16)", "block(64)")
_SMALL_SAMPLES: Final = 60_000
_TIMED_SAMPLES: Final = 12_000
"""Of each pass, at most."""
_LATENCY_S: Final = 0.002


def source_order() -> dict[str, object]:
    """Samples a second of small ones, in shards behind slowfs, that no tier holds; requests a
    sample; and, of the order alone, how unevenly a global batch of
    1,024 draws on eighths of the data as they are stored, in units of a random draw (1.0 is a
    uniformly random draw)."""
    import dlio
    from dlio_bench.emulated.emulated_mount import slow_mount, stats

    results: dict[str, Any] = {}
    with packed_noise(_SMALL_SAMPLES, _SAMPLE_BYTES) as packed:
        for order in _ORDERS:
            with (
                slow_mount(packed, latency_s=_LATENCY_S) as slow,
                dlio.open(slow, tiers="none") as source,
                dlio.DataLoader(
                    source, 64, shuffle=True, source_order=order, num_workers=4
                ) as loader,
            ):
                before = stats(slow)["reads"]
                began, seen = time.perf_counter(), 0
                for _ in loader:
                    seen += len(loader.last_samples)
                    if seen >= _TIMED_SAMPLES:
                        break
                seconds = time.perf_counter() - began
                results[order] = {
                    "samples_per_s": seen / seconds,
                    "reads_a_sample": (stats(slow)["reads"] - before) / seen,
                    "unevenness": _unevenness_of(source.reader.layout, order),
                }
    return results


def _unevenness_of(layout: Any, source_order: str) -> float:
    from dlio.plan.block_order import BlockOrder, window_of
    from dlio.plan.order import Order

    count, window = int(layout.starts[-1]), window_of(source_order)
    order = Order(count, 1) if window is None else BlockOrder(count, 1, 0, True, layout, window)
    stored = layout.order.positions(order.samples(np.arange(count, dtype=np.int64)))
    batches = stored[: count // _GLOBAL_BATCH * _GLOBAL_BATCH].reshape(-1, _GLOBAL_BATCH)
    return float(np.sqrt(np.mean(np.square(_unevenness(batches, count)))))


# Tiers that hold a part of the data, compared with an LRU of that size and the page cache


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
        drop(files)
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


# Epochs of real ranks in network namespaces with shaped links, compared with the forecast


_LINKED_BYTES: Final = 100_000
_TIMEOUT_S: Final = 600.0
_MODEL_S: Final = 0.03
"""Sleep of the model for each batch."""


class NoNamespaces(UsageError):
    """Network namespaces cannot be made here."""


@contextlib.contextmanager
def shaped(count: int) -> Iterator[list[tuple[str, str, str]]]:
    """`count` network namespaces on one switch, with links of a gigabit/s each way: (namespace,
    interface, address) each. They are gone afterwards.

    Raises NoNamespaces where that needs more rights or tools than there are.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise NoNamespaces("network namespaces need root, ip and tc (Debian: iproute2)")
    tag = f"dl{os.getpid() % 100000}"
    bridge = f"{tag}b"

    def call(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip()}")

    def tbf(*where: str) -> None:
        call(*where, "root", "tbf", "rate", "1gbit", "burst", "512kbit", "latency", "200ms")

    with contextlib.ExitStack() as stack:

        def make(kind: str, name: str, *words: str) -> None:
            call("ip", kind, "add", name, *words)
            gone = ["ip", kind, "del", name]
            stack.callback(subprocess.run, gone, capture_output=True, timeout=20, check=False)

        make("link", bridge, "type", "bridge")
        call("ip", "link", "set", bridge, "up")
        places = []
        for k in range(count):
            space, inside, outside = f"{tag}n{k}", f"{tag}i{k}", f"{tag}o{k}"
            address = f"10.213.7.{k + 1}"
            make("netns", space)
            make("link", outside, "type", "veth", "peer", "name", inside)
            call("ip", "link", "set", inside, "netns", space)
            call("ip", "link", "set", outside, "master", bridge, "up")
            within = ("ip", "netns", "exec", space)
            call(*within, "ip", "addr", "add", f"{address}/24", "dev", inside)
            call(*within, "ip", "link", "set", inside, "up")
            call(*within, "ip", "link", "set", "lo", "up")
            tbf(*within, "tc", "qdisc", "add", "dev", inside)
            tbf("tc", "qdisc", "add", "dev", outside)
            places.append((space, inside, address))
        yield places


def link(
    counts: Sequence[int] = (2, 4),
    modes: Sequence[str] = MODES,
    samples: int = 8000,
    batch_size: int = 64,
    epochs: int = 3,
) -> dict[str, object]:
    """For each number of nodes and mode: seconds and stall of epochs after the first, measured
    and forecast, and whether bytes and messages are those forecast."""
    from dlio.data.reader import open_reader
    from dlio.loader.planned_traffic import job_over, traffic
    from dlio.plan.placement import HomeNode

    results: dict[str, Any] = {}
    with (
        packed_noise(samples, _LINKED_BYTES) as packed,
        contextlib.closing(open_reader(packed)) as reader,
    ):
        task = {
            "source": packed,
            "tiers": "ram:1GiB",
            "modes": list(modes),
            "batch_size": batch_size,
            "model_s": _MODEL_S,
            "epochs": epochs,
        }
        with shaped(2) as places:
            # Two ranks a node, which share its link.
            alone = _run([place for place in places for _ in range(2)], {**task, "modes": []})
            results["4 ranks on 2 nodes, exchange alone"] = _exchange(alone)
        for count in counts:
            with shaped(count) as places:
                report = _run(places, task)
            results[f"{count} nodes"] = {
                key: report[key] for key in ("link_rate", "one_peer_rate", "step_s", "made_per_s")
            }
            results[f"{count} nodes, exchange alone"] = _exchange(report)
            named = tuple(HomeNode(name, (1 << 30,)) for name in report["nodes"])
            for mode in modes:
                job = job_over(reader, named, 1, batch_size, mode)
                measured = report["modes"][mode]
                rate = report["one_peer_rate" if mode == "ring" else "link_rate"]
                forecast = _forecast(job, report, rate, measured)
                counted = [traffic(job, each["epoch"]) for each in measured]
                results[f"{count} nodes, {mode}"] = {
                    **{key: [each[key] for each in measured] for key in ("seconds", "stall_s")},
                    "moved_MB": [each["moved"] / 1e6 for each in measured],
                    "counts_equal": all(
                        (each["moved"], each["messages"]) == (c.moved, c.messages)
                        for each, c in zip(measured, counted, strict=True)
                    ),
                    "late": sum(each["late"] for each in measured),
                    **forecast,
                }
    return results


def _forecast(job: Any, report: dict[str, Any], link_rate: float, measured: Any) -> dict[str, Any]:
    """Return the seconds that `dlio plan` forecasts for the measured epochs; nothing where the
    feature is not installed."""
    try:
        from dlio.features.forecast.epoch_simulation import Machine, run
    except ModuleNotFoundError:
        return {}
    # As measured before the epochs, over the same links.
    machine = Machine(
        link_rate=link_rate,
        link_latency_s=(report["step_s"] - _MODEL_S) / 2,
        tier_rates=(4e9,),
        decode_rate=report["made_per_s"],
        model_s=report["step_s"],
        ahead=2,
    )
    lines = [run(job, machine, epoch=each["epoch"]) for each in measured]
    pairs = zip(measured, lines, strict=True)
    return {
        "forecast_s": [line.seconds for line in lines],
        "forecast_stall_s": [line.seconds - job.steps * _MODEL_S for line in lines],
        "ratio": spread([each["seconds"] / line.seconds for each, line in pairs]),
    }


def _exchange(report: dict[str, Any]) -> dict[str, Any]:
    """Epochs in mode `global` without computing, compared with all-to-alls of as many bytes."""
    rates = report["exchange"]
    return {
        "shuffle_MB_per_s": spread([each / 1e6 for each in rates["shuffle"]]),
        "alltoallv_MB_per_s": spread([each / 1e6 for each in rates["alltoallv"]]),
        "shuffle_over_alltoallv": ratio(rates["shuffle"], rates["alltoallv"]),
    }


def _run(places: list[tuple[str, str, str]], task: dict[str, Any]) -> dict[str, Any]:
    from dlio_bench.linked_nodes import epochs_over_links

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    distinct = list(dict.fromkeys(places))
    with contextlib.ExitStack() as stack:
        for rank, (space, interface, _) in enumerate(places):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(places[:rank].count(places[rank])),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": places[0][2],
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
                "DLIO_NODE": f"node{distinct.index(places[rank])}",
                "OMP_NUM_THREADS": "1",
            }
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            within = ("ip", "netns", "exec", space)
            process = subprocess.Popen(
                [*within, *rank_argv(epochs_over_links, task)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            stack.callback(process.kill)
            processes.append((process, said))
        output = ""
        for rank, (process, said) in enumerate(processes):
            out, _ = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode:
                said.seek(0)
                raise UsageError(f"rank {rank} over a shaped link failed: {said.read()[-800:]}")
            output = output or out
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report
