"""Epochs of real ranks in network namespaces with shaped links, compared with the forecast."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dlio.errors import UsageError
from dlio_bench.bench_data import packed_noise
from dlio_bench.bench_ranks import rank_argv
from dlio_bench.results.repeats import ratio, spread

_SAMPLE_BYTES: Final = 100_000
_TIMEOUT_S: Final = 600.0
_GBIT: Final = 1e9 / 8


class NoNamespaces(UsageError):
    """Network namespaces cannot be made here."""


@contextlib.contextmanager
def shaped(count: int, rate: float = _GBIT) -> Iterator[list[tuple[str, str, str]]]:
    """`count` network namespaces on one switch, with links of `rate` bytes/s each way: (namespace,
    interface, address) each. They are gone afterwards.

    Raises NoNamespaces where that needs more rights or tools than there are.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise NoNamespaces("network namespaces need root, ip and tc (Debian: iproute2)")
    tag = f"dl{os.getpid() % 100000}"
    bridge = f"{tag}b"
    made: list[list[str]] = []

    def call(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip()}")

    def tbf(*where: str) -> None:
        bits = f"{int(rate * 8)}bit"
        call(*where, "root", "tbf", "rate", bits, "burst", "512kbit", "latency", "200ms")

    try:
        call("ip", "link", "add", bridge, "type", "bridge")
        made.append(["ip", "link", "del", bridge])
        call("ip", "link", "set", bridge, "up")
        places = []
        for k in range(count):
            space, inside, outside = f"{tag}n{k}", f"{tag}i{k}", f"{tag}o{k}"
            address = f"10.213.7.{k + 1}"
            call("ip", "netns", "add", space)
            made.append(["ip", "netns", "del", space])
            call("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            made.append(["ip", "link", "del", outside])
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
    finally:
        for words in reversed(made):
            subprocess.run(words, capture_output=True, timeout=20, check=False)


def link(
    counts: Sequence[int] = (2, 4),
    modes: Sequence[str] = ("batch", "global", "ring", "partial(0.1)", "local"),
    samples: int = 8000,
    batch_size: int = 64,
    model_s: float = 0.03,
    epochs: int = 3,
    rate: float = _GBIT,
) -> dict[str, object]:
    """For each number of nodes and mode: seconds and stall of epochs after the first, measured
    and forecast, and whether bytes and messages are those forecast."""
    from dlio.data.reader import open_reader
    from dlio.loader.planned_traffic import job_over, traffic
    from dlio.plan.placement import HomeNode

    results: dict[str, Any] = {}
    with (
        packed_noise(samples, _SAMPLE_BYTES) as packed,
        contextlib.closing(open_reader(packed)) as reader,
    ):
        task = {
            "source": packed,
            "tiers": "ram:1GiB",
            "modes": list(modes),
            "batch_size": batch_size,
            "model_s": model_s,
            "epochs": epochs,
        }
        with shaped(2, rate) as places:
            # Two ranks a node, which share its link.
            alone = _run([place for place in places for _ in range(2)], {**task, "modes": []})
            results["4 ranks on 2 nodes, exchange alone"] = _exchange(alone)
        for count in counts:
            with shaped(count, rate) as places:
                report = _run(places, task)
            results[f"{count} nodes"] = {
                key: report[key] for key in ("link_rate", "one_peer_rate", "step_s", "made_per_s")
            }
            results[f"{count} nodes, exchange alone"] = _exchange(report)
            named = tuple(HomeNode(name, (1 << 30,)) for name in report["nodes"])
            for mode in modes:
                job = job_over(reader, named, 1, batch_size, mode)
                measured = report["modes"][mode]
                rate_ = report["one_peer_rate" if mode == "ring" else "link_rate"]
                forecast = _forecast(job, report, model_s, rate_, measured)
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


def _forecast(
    job: Any, report: dict[str, Any], model_s: float, link_rate: float, measured: Any
) -> dict[str, Any]:
    """Return the seconds that `dlio plan` forecasts for the measured epochs; nothing where the
    feature is not installed."""
    try:
        from dlio.features.forecast.epoch_simulation import Machine, run
    except ModuleNotFoundError:
        return {}
    # As measured before the epochs, over the same links.
    machine = Machine(
        link_rate=link_rate,
        link_latency_s=(report["step_s"] - model_s) / 2,
        tier_rates=(4e9,),
        decode_rate=report["made_per_s"],
        model_s=report["step_s"],
        ahead=2,
    )
    lines = [run(job, machine, epoch=each["epoch"]) for each in measured]
    pairs = zip(measured, lines, strict=True)
    return {
        "forecast_s": [line.seconds for line in lines],
        "forecast_stall_s": [line.seconds - job.steps * model_s for line in lines],
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
