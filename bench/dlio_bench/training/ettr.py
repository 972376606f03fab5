"""`--case ettr`: the share of time that counts while ranks are killed."""

import os
import tempfile
from collections.abc import Mapping
from typing import Final

from dlio_bench.bench_data import draw_pictures
from dlio_bench.chaos.chaos_job import ChaosCase
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.storm import measure as measure_storm
from dlio_bench.results.report_values import Figure, Results
from dlio_bench.results.terminal import show
from dlio_bench.training.training_options import TrainingBenchOptions

_RANKS: Final = 4
_IMAGES: Final = 480
_WAYS: Final = ("shrink", "restart")


def measure(options: TrainingBenchOptions, results: Results) -> None:
    """Kill ranks of jobs that go on with the others, and of jobs that restart from a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as folder:
        case = ChaosCase(
            storm_options(options), _source(options, folder), os.path.join(folder, "jobs")
        )
        storm = measure_storm(case)
    show("ettr", {key: storm[key] for key in ("rows", "said")})
    results.figures += ettr_figures(storm)
    results.details = {**results.details, "ettr": storm}


def storm_options(options: TrainingBenchOptions) -> ChaosOptions:
    """Return the options of the kills, as for `dlio bench chaos --case storm`."""
    return ChaosOptions(
        ranks=min(_RANKS, options.rank_counts[-1]),
        kills=options.kills,
        every=options.every,
        seed=options.seed,
        restart=True,
    )


def ettr_figures(storm: Mapping[str, object]) -> list[Figure]:
    """Return the effective training time ratio of each way to survive."""
    figures = []
    for way in _WAYS:
        of_way = storm.get(way)
        share = of_way.get("ettr") if isinstance(of_way, Mapping) else None
        if isinstance(share, float):
            labels = {"way": way}
            figures.append(
                Figure("effective training time ratio", "%", (100 * share,), labels, "higher")
            )
    return figures


def _source(options: TrainingBenchOptions, folder: str) -> str:
    os.makedirs(os.path.join(folder, "jobs"))
    if options.data is not None:
        return os.path.abspath(options.data)
    return draw_pictures(folder, _IMAGES)[0]
