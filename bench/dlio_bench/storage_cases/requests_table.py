"""Requests to storage as fio's users read them: a rate (IOPS), a bandwidth, and percentiles."""

import csv
import io
from collections.abc import Sequence
from typing import Final

from dlio.util.whole_files import write_whole
from dlio_bench.results.terminal import table
from dlio_bench.storage_cases.summary import LoaderEpochFigures

FIO_PERCENTILES: Final = (
    *(1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0),
    *(99.0, 99.5, 99.9, 99.95, 99.99),
)
"""Those that fio prints by default."""
_SHOWN: Final = (1.0, 50.0, 90.0, 99.0, 99.9, 99.99)


def show_requests(epochs: Sequence[LoaderEpochFigures]) -> None:
    """Print a row for each loader and epoch of the first repeat; latencies in milliseconds."""
    heads = (
        "loader",
        "epoch",
        "of",
        "count",
        "IOPS",
        *(f"p{each:g}, ms" for each in _SHOWN),
        "max",
    )
    rows = [
        (
            each.loader,
            str(each.epoch),
            each.request_kind,
            f"{len(each.requests):,}",
            f"{each.iops:,.0f}",
            *(f"{1e3 * each.requests.percentile(share):.3g}" for share in _SHOWN),
            f"{1e3 * each.requests.most_s:.3g}",
        )
        for each in epochs
        if each.repeat == 0 and len(each.requests)
    ]
    if rows:
        table("requests of the first repeat", heads, rows)


def csv_text(epochs: Sequence[LoaderEpochFigures]) -> str:
    """Return a line for each loader, repeat and epoch, latencies in microseconds, after a heading.

    `bw_bytes` are bytes per second that processes asked for; `of` is `request`, or `sample` for a
    loader whose requests cannot be seen.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    heads = "loader", "repeat", "epoch", "of", "count", "runtime_s", "iops", "bw_bytes"
    percentiles = (f"lat_p{share:g}_us" for share in FIO_PERCENTILES)
    lines.writerow([*heads, *percentiles, "lat_max_us"])
    for each in epochs:
        lines.writerow(
            [each.loader, each.repeat, each.epoch, each.request_kind, len(each.requests)]
            + [f"{each.seconds:.6f}", f"{each.iops:.3f}"]
            + [f"{each.served.asked_bytes / each.seconds:.0f}"]
            + [f"{1e6 * each.requests.percentile(share):.3f}" for share in FIO_PERCENTILES]
            + [f"{1e6 * each.requests.most_s:.3f}"]
        )
    return text.getvalue()


def write_csv(path: str, epochs: Sequence[LoaderEpochFigures]) -> None:
    """Write the table as a file."""
    text = csv_text(epochs).encode()
    write_whole(path, lambda file: file.write(text))
