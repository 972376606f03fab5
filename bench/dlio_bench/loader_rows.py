"""The case rows of `dlio bench loader`: small samples of fixed size, gathered into batches."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import h5py
import numpy as np
import numpy.typing as npt

from dlio_bench.peers.environments import missing
from dlio_bench.peers.process import ContenderProcess, race, start_contender
from dlio_bench.peers.standalone.runners.protocol import Task, weight
from dlio_bench.race_report import (
    race_figures,
    race_ratios,
    show_absent,
    show_race,
    show_ratios,
)
from dlio_bench.results.machine import describe_machine
from dlio_bench.results.terminal import advance, expect
from dlio_staging.pack_folder import pack

SMALL_BATCH: Final = 256
"""Samples of a batch in the cases of small samples, where none are asked for."""
_OTHERS: Final = 2
"""Most worker processes of other loaders."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Rows of a case: so many columns of a type, with a label each; or windows of tokens."""

    columns: int
    dtype: str
    below: int
    """Values are whole numbers from 0 to below this one."""
    windows: bool = False
    """True for windows of a long array, without labels."""


SHAPES: Final = {
    "rows of 64 bytes": RowShape(16, "float32", 1 << 16),
    "rows of 1 kB": RowShape(256, "float32", 1 << 16),
    "rows of 3 kB": RowShape(3072, "uint8", 1 << 8),
    "windows of 1,024 tokens": RowShape(1024, "uint16", 50_257, windows=True),
}
"""Shapes of rows, by their names."""


@dataclass(frozen=True, slots=True)
class RowEntry:
    """A contender of the case rows."""

    program: str
    """Function of `peers.row_contenders`, or of the environment's runner."""
    title: str
    workers: int
    environment: str = ""
    """One of the peers' environments; "" for dlio's own."""


_PLACES: Final = {
    "dlio": "RAM tier",
    "file": "file, page cache",
    "packed": "packed, page cache",
}
"""Where dlio reads rows, by the name of its contender."""


def row_entries(threads: Iterable[int]) -> dict[str, RowEntry]:
    """Return the contenders by name, with dlio's for each number of threads."""
    entries = {}
    for name, place in _PLACES.items():
        for count in threads:
            title = f"dlio, {place}, threads: {count}"
            entries[f"{name}_{count}"] = RowEntry(name, title, count)
    others = (
        ("torch_getitems", "torch, __getitems__", ""),
        ("torch_h5py", "torch, h5py a sample", ""),
        ("torch_collate", "torch, default_collate", ""),
        ("hugging_face", "Hugging Face, format torch", ""),
        ("grain_rows", "Grain", "grain"),
        ("mosaic_rows", "MosaicML Streaming", "mosaic"),
    )
    for name, what, environment in others:
        for count in (0, _OTHERS):
            title = f"{what}, processes: {count}"
            entries[f"{name}_{count}"] = RowEntry(name, title, count, environment)
    entries["numpy"] = RowEntry("numpy", "limit: NumPy's gather", 1)
    entries["numpy_checked"] = RowEntry(
        "numpy_checked", "limit: NumPy's gather, xxh3 of each row", 1
    )
    return entries


def rows(
    repeats: int,
    batch_size: int,
    most: int,
    samples: int,
    patience_s: float,
    shapes: Mapping[str, RowShape] = SHAPES,
    chosen: Iterable[str] | None = None,
) -> dict[str, object]:
    """Passes over rows, shuffled, per contender, in turn within each repeat; each contender has a
    process of its own. Those of `chosen` take part, all by default; dlio with 1, 2 and `most`
    threads.

    The rows were written to HDF5, NumPy and packed files before. The labels of every pass, and the
    values of each that is not timed, are compared with the data's: who gives others is left out,
    with the reason, and those that are not installed are too. Ratios compare with the way of
    torch's loader that has the highest median.
    """
    threads = tuple(dict.fromkeys((1, 2, most)))
    entries = row_entries(threads)
    names = list(entries if chosen is None else chosen)
    absent = {
        name: why
        for name in names
        if (kept := entries[name].environment) and (why := missing(kept)) is not None
    }
    names = [name for name in names if name not in absent]
    report: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "repeats": repeats}
    machine = describe_machine(("dlio", "torch", "numpy", "h5py", "xxhash", "datasets"))
    assert isinstance(machine["versions"], dict)
    expect(len(shapes) * len(names) * (1 + repeats))
    for title, shape in shapes.items():
        with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
            array, labels = _drawn(shape, samples)
            files = _written(scratch, shape, array, labels)
            starts: dict[str, Callable[[], ContenderProcess]] = {}
            for name in names:
                each = entries[name]
                task = Task(files, labels, 0, batch_size, each.workers, f"{scratch}/{name}")
                starts[name] = partial(
                    start_contender,
                    each.program,
                    task,
                    patience_s,
                    each.environment,
                    "dlio_bench.peers.row_contenders",
                )
            expected = weight(array, labels)
            outcome = race(starts, labels, repeats, advance, expected)
        machine["versions"].update(outcome.versions)
        figures = race_figures(outcome)
        pairs = _pairs(figures, threads)
        report[title] = {
            "row_bytes": array.nbytes // samples,
            "absent": {**absent, **outcome.absent},
            **figures,
            "pairs": pairs,
            **race_ratios(figures, pairs),
        }
    report["machine"] = machine
    return report


def show_rows(report: Mapping[str, object]) -> None:
    """Print the tables of a report of `rows`."""
    for title, figures in report.items():
        if not isinstance(figures, dict) or "pairs" not in figures:
            continue
        names = figures["samples_per_s"]
        counts = [int(name.rpartition("_")[2]) for name in names if name.startswith("dlio_")]
        entries = row_entries(counts or (1,))
        text = (
            f"{title}: {report['samples']:,}, batches of {report['batch_size']}, shuffled, median "
            f"of {report['repeats']} (min to max)"
        )
        show_race(text, figures, {name: each.title for name, each in entries.items()})
        show_absent(figures)
        show_ratios(figures, figures["pairs"])


def _drawn(shape: RowShape, samples: int) -> tuple[npt.NDArray[Any], list[int]]:
    """Values of shape (samples, columns), and the labels."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, shape.below, (samples, shape.columns), np.int64)
    labels = drawn[:, 0] if shape.windows else random.permutation(samples)
    return drawn.astype(shape.dtype), labels.tolist()


def _written(
    scratch: str, shape: RowShape, array: npt.NDArray[Any], labels: list[int]
) -> list[str]:
    """Files of a task, as `peers.row_contenders` has them."""
    plain, hdf5, packed, tokens = (
        os.path.join(scratch, name) for name in ("rows.npy", "rows.h5", "packed", "tokens.npy")
    )
    np.save(plain, array)
    with h5py.File(hdf5, "w") as file:
        file["features"] = array
        if not shape.windows:
            file["label"] = np.asarray(labels, np.int64)
    if not shape.windows:
        pack(f"{hdf5}::features,label", packed, compress="none")
        return [plain, hdf5, packed]
    pack(plain, packed, compress="none")
    np.save(tokens, array.reshape(-1))
    return [plain, hdf5, packed, tokens]


def _pairs(figures: Mapping[str, Any], threads: Iterable[int]) -> dict[str, tuple[str, str]]:
    """Ratios to report: of dlio's to the best way of torch's loader, to the limit, and others."""
    rates = figures["samples_per_s"]
    best: dict[str, str] = {}
    for group in ("torch", "hugging_face", "grain", "mosaic"):
        ways = [name for name in rates if name.startswith(group)]
        if ways:
            best[group] = max(ways, key=lambda name: float(rates[name]["median"]))
    pairs = {}
    for name in (f"{place}_{count}" for place in _PLACES for count in threads):
        if "torch" in best:
            pairs[f"{name}_over_{best['torch']} (torch's best)"] = (name, best["torch"])
        pairs[f"{name}_over_numpy_checked"] = (name, "numpy_checked")
    pairs["dlio_2_over_numpy"] = ("dlio_2", "numpy")
    for group in ("hugging_face", "grain", "mosaic"):
        if group in best:
            pairs[f"dlio_2_over_{best[group]}"] = ("dlio_2", best[group])
    return pairs
