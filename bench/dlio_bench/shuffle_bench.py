"""`dlio bench shuffle`: plans of a thousand ranks, real exchanges, partial tiers, mixing."""

import itertools
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final

from dlio.cli.option_records import OutputOptions
from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio_bench.bench_data import packed_noise
from dlio_bench.bench_ranks import FABRICS, run
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.figure_collection import collect, results_of
from dlio_bench.results.repeats import ratio, spread
from dlio_bench.results.terminal import show_figures, steps, working

_USUAL: Final = ("plan", "mixing", "capacity", "exchange", "decode")
_CASES: Final = (*_USUAL, "link", "training", "source-order")
_RANKS: Final = 4
_SAMPLE_BYTES: Final = 100_000


def plan(repeats: int, large_samples: int = 10**9) -> dict[str, object]:
    """128 nodes of 8 ranks, batches of 32, 1.28 million samples: shares of the bytes that move, and
    seconds that one rank takes to plan a whole epoch; `large_samples` in mode `global`: seconds
    and bytes of memory."""
    from dlio.loader.planned_traffic import job_of, traffic
    from dlio.plan.epoch import plan_epoch
    from dlio.plan.placement import HomeNode
    from dlio_bench.shuffle_cases import MODES

    def whole(job: Any, windows: Callable[[], Iterable[range]]) -> None:
        planner = plan_epoch(job.plan(1, 77))
        for window in windows():
            planner.window(window)

    nodes = tuple(HomeNode(f"node{number}", (1 << 60,)) for number in range(128))
    job = job_of(1_280_000, 110_000, nodes, 8, 32)
    results: dict[str, Any] = {"placement_s": _seconds(lambda: job.placement)}
    for mode in ("batch", "global"):
        measured = traffic(replace(job, mode=mode))
        results[mode] = {
            "moved_share": measured.moved / measured.payload,
            "messages": measured.messages,
        }
    for mode in steps(MODES):
        one = replace(job, mode=mode)
        # The placement is computed once for all epochs.
        one.__dict__["placement"] = job.placement
        seconds = [_seconds(whole, one, one.windows) for _ in range(repeats)]
        results.setdefault(mode, {})["seconds_a_rank"] = spread(seconds)
    large = job_of(large_samples, 110_000, nodes, 8, 32, "global")

    def whole_large() -> None:
        cuts = range(0, large.steps, 32)
        whole(large, lambda: (range(k, min(k + 32, large.steps)) for k in cuts))

    large.placement  # noqa: B018 - once for all epochs
    results["billion"] = {"seconds_a_rank": spread([_seconds(whole_large) for _ in range(repeats)])}
    tracemalloc.start()
    whole_large()
    results["billion"]["peak_MiB"] = tracemalloc.get_traced_memory()[1] / (1 << 20)
    tracemalloc.stop()
    return results


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    """Processor seconds of this process."""
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


def exchange(repeats: int, samples: int = 4000) -> dict[str, object]:
    """4 ranks on 2 and on 4 pretended nodes, mode `global`, samples of 100 kB that nobody decodes:
    bytes a second that peers get, over those of an MPI Alltoallv of as many bytes, and over those
    of one a window that is fed from the same tier and emptied into batches. The nodes are
    pretended: their messages go through shared memory, which no nodes have between them, or
    through TCP over this machine's loopback."""
    from dlio_bench.shuffle_rank import exchange_rates

    results: dict[str, Any] = {}
    with packed_noise(samples, _SAMPLE_BYTES) as packed:
        for nodes, fabric in steps(itertools.product((2, 4), FABRICS)):
            measured = _ranks(exchange_rates, packed, nodes, 32, repeats, fabric)
            rates = measured["rates"]
            results[f"{nodes}_nodes_{fabric}"] = {
                "moved_bytes": measured["moved"],
                "messages": measured["messages"],
                "late": measured["late"],
                **{f"{key}_MB_per_s": spread([r / 1e6 for r in rates[key]]) for key in rates},
                "shuffle_over_alltoallv": ratio(rates["shuffle"], rates["alltoallv"]),
                "shuffle_over_fed": ratio(rates["shuffle"], rates["fed_alltoallv"]),
            }
    return results


def decode(source: str, repeats: int) -> dict[str, object]:
    """4 ranks that decode `source`: images a second in mode `global` over those in `local`, which
    sends nothing."""
    from dlio_bench.shuffle_rank import decode_rates

    results: dict[str, object] = {}
    for nodes in steps((2, 4), "{} nodes".format):
        rates = _ranks(decode_rates, os.path.abspath(source), nodes, 16, repeats)["rates"]
        results[f"{nodes}_nodes"] = {
            "global_per_s": spread(rates["global"]),
            "local_per_s": spread(rates["local"]),
            "global_over_local": ratio(rates["global"], rates["local"]),
        }
    return results


def _ranks(
    function: Callable[..., object],
    source: str,
    nodes: int,
    batch_size: int,
    repeats: int,
    fabric: str = "memory",
) -> dict[str, Any]:
    task = {"source": source, "tiers": "ram:4GiB", "batch_size": batch_size}
    return run(function, {**task, "nodes": nodes, "repeats": repeats}, _RANKS, fabric)


@dataclass(frozen=True, slots=True)
class ShuffleBenchOptions:
    """The options of `dlio bench shuffle`."""

    source: Annotated[
        str | None,
        Option(
            "Class folders of images, for the cases capacity, decode and training.",
            positional=True,
            metavar="SRC",
        ),
    ] = None
    val: Annotated[
        str | None,
        Option(
            "Held-out data for the case training, for which SRC is best sorted by class.",
            metavar="PATH",
        ),
    ] = None
    case: Annotated[
        tuple[str, ...],
        Option(
            "Case to measure; link needs root. Repeatable.",
            choices=_CASES,
            default_text=f"{', '.join(_USUAL)}; without SRC, not capacity and decode",
        ),
    ] = ()
    repeats: Annotated[int, Option("Timed passes of each figure.", least=1)] = 5
    seeds: Annotated[int, Option("Seeds of the case training.", least=1)] = 5

    def __post_init__(self) -> None:
        check(self)
        if self.source is None and {"capacity", "decode", "training"} & set(self.case):
            raise UsageError("capacity, decode and training want a data set")
        if self.val is None and "training" in self.case:
            raise UsageError("--case training wants held-out data: --val")
        for path in filter(None, (self.source, self.val)):
            if not os.path.isdir(path):
                raise UsageError(f"{path}: no such folder: check the path")


def command(options: ShuffleBenchOptions, output: OutputOptions) -> None:
    """Measure the shuffle.

    Cases are the plans of a thousand ranks, exchanges among 4 ranks, reads with partial tiers, and
    how well each mode mixes.
    """
    from dlio_bench.shuffle_cases import capacity, link, source_order, statistics, training

    start = begin(output)
    source, repeats = str(options.source), options.repeats
    measures: dict[str, Callable[[], object]] = {
        "plan": lambda: plan(repeats),
        "mixing": statistics,
        "exchange": lambda: exchange(repeats),
        "source-order": source_order,
        "link": lambda: link(epochs=repeats),
        "capacity": lambda: capacity(source),
        "decode": lambda: decode(source, repeats),
        "training": lambda: training(source, str(options.val), options.seeds),
    }
    needs_source = () if options.source else ("capacity", "decode")
    wanted = options.case or tuple(name for name in _USUAL if name not in needs_source)
    report: dict[str, Any] = {}
    with working("shuffle"):
        for name in steps(wanted):
            report[name] = measures[name]()
            # Figures of a list are labelled by its rows' texts.
            case = report[name]
            show_figures(name, *collect(case if isinstance(case, Mapping) else {"rows": case}))
    paths = (tempfile.gettempdir(), *filter(None, (options.source,)))
    results = results_of(
        "shuffle", report, settings=asdict(options), seeds={"plan": 77}, paths=paths
    )
    finish(output, results, start)
