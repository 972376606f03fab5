"""`--case balance`: epochs of ranks of unequal speed, with even shares, with `--balance`, and as
they would be at best."""

import os
import tempfile
from typing import Any, Final

from dlio_bench.bench_ranks import run
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions

_RANKS: Final = (2, 3)
_FACTOR: Final = 3.0
_EPOCHS: Final = 4
_SAMPLE_S: Final = 0.004


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Trains with and without `--balance`, the last rank three times as slow as the others. The
    ideal is all samples over the sum of the ranks' own rates, as the run with even shares has
    measured them; ratios are to that of the same repeat."""
    from dlio.cli.demo_pictures import draw_dataset

    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        pictures = os.path.join(scratch, "pictures")
        draw_dataset(pictures, images=options.images, validation=3, classes=3)
        source = os.path.join(pictures, "train")
        rows = [_row(source, ranks, options) for ranks in _RANKS]
    return {
        "rows": rows,
        "said": [
            f"The last rank takes {_FACTOR:g} times {1000 * _SAMPLE_S:g} ms a sample; epochs' "
            "seconds over the ideal's, of which 1 is the best. Shares are of the last epoch."
        ],
    }


def _row(source: str, ranks: int, options: ExchangeBenchOptions) -> dict[str, Any]:
    from dlio_bench.results.repeats import ratio, spread

    ideal, even_s, first_s, last_s, shares = [], [], [], [], []
    for _ in range(options.repeats):
        task = {
            "epochs": _EPOCHS,
            "sample_s": _SAMPLE_S,
            "factor": _FACTOR,
            "runs": [{"source": source, "balance": chosen} for chosen in (False, True)],
        }
        report: dict[str, Any] = run("dlio_bench.exchange_cases.balance_rank", task, ranks)
        even, balanced = report["runs"]
        ideal.append(options.images / sum(even[-1]["rates"]))
        even_s.append(even[-1]["seconds"])
        first_s.append(balanced[0]["seconds"])
        last_s.append(balanced[-1]["seconds"])
        shares.append(balanced[-1]["shares"])
    return {
        "ranks": ranks,
        "ideal_s": spread(ideal),
        "even_over_ideal": ratio(even_s, ideal),
        "first_epoch_over_ideal": ratio(first_s, ideal),
        "balanced_over_ideal": ratio(last_s, ideal),
        "shares": "; ".join(dict.fromkeys(" ".join(map(str, each)) for each in shares)),
    }
