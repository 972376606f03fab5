"""`--case step`: time and bytes of a step, with and without compression, and of torch's DDP."""

from dataclasses import replace
from typing import Any, Final

from dlio_bench.bench_ranks import LINK, TIMEOUT_S, run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.exchange_cases.overlap_case import fabrics_of
from dlio_bench.results.terminal import steps

_EXCHANGES: Final = (
    "allreduce",
    "allreduce+bf16",
    "allreduce+fp16",
    "allreduce+int8",
    "allreduce+onebit",
    "allreduce+threshold",
    "allreduce+adaptive",
)
_HOOKS: Final = {"none": "DDP", "fp16": "DDP, fp16 hook", "powersgd": "DDP, PowerSGD of rank 4"}
_STEPS: Final = 2
_SMALL_BATCH: Final = 32
_SMALL_STEPS: Final = 10


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """On 2 ranks of one thread each, in the same processes, in turn: seconds of a step, over those
    of a step of no exchange at all, and bytes that float32 would send over those that were sent."""
    fabrics, lacking = fabrics_of(options)
    small = replace(options, network="small", batch_size=_SMALL_BATCH)
    rows = [
        row
        for each, count in ((small, _SMALL_STEPS), (options, _STEPS))
        for fabric in steps(fabrics)
        for row in _rows(each, count, fabric)
    ]
    return {
        "rows": rows,
        "said": [
            *([] if lacking is None else [f"No link: {lacking}"]),
            "The floor is a step of no exchange. DDP's bytes are gloo's ring's, computed; gloo "
            "takes TCP over the loopback also where MPI's messages go through memory.",
        ],
    }


def _rows(options: ExchangeBenchOptions, steps: int, fabric: str) -> list[dict[str, Any]]:
    from dlio_bench.results.repeats import ratio, spread

    task = {
        "network": options.network,
        "batch_size": options.batch_size,
        "steps": steps,
        "repeats": options.repeats,
        "exchanges": options.exchanges or _EXCHANGES,
        "hooks": list(_HOOKS),
    }
    # Gloo takes the interface that the host's name stands for; over a link there is but one.
    environment = {"GLOO_SOCKET_IFNAME": "lo"} if fabric == LINK else {}
    report: dict[str, Any] = run(
        "dlio_bench.exchange_cases.step_rank", task, 2, fabric, environment, 3 * TIMEOUT_S
    )
    bare, whole = report["seconds"]["none"], report["parameter_bytes"]
    rows = []
    for name, seconds in report["seconds"].items():
        sent = report["sent"][name]
        rows.append(
            {
                "network": options.network,
                "fabric": fabric,
                "exchange": _HOOKS.get(name.removeprefix("ddp "), name)
                if name.startswith("ddp ")
                else name,
                "step_s": spread(seconds),
                "over_none": ratio(seconds, bare),
                "sent_MB": sent / 1e6,
                # Of two ranks a ring sends as much as there is.
                "float32_over_sent": whole / sent if sent else None,
            }
        )
    return rows
