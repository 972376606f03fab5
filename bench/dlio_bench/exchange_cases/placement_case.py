"""`--case placement`: one seed on different numbers of ranks, nodes, tiers and shuffles."""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dlio.train.callbacks import Callback, Run
from dlio.train.report import EpochReport
from dlio.util.units import counted
from dlio_bench.bench_data import payload_bytes
from dlio_bench.exchange_cases.accuracy_case import final_accuracy
from dlio_bench.exchange_cases.exchange_options import ExchangeBenchOptions
from dlio_bench.results.repeats import spread
from dlio_bench.results.terminal import steps
from dlio_bench.trainings import kept_folder, trained

_GLOBAL_BATCH: Final = 64
_MODES: Final = ("average", "sync", "ghost(16)")
_MODEL: Final = "resnet(width=16)"
_SIZE: Final = 32
_EARLY: Final = (1, 5)
"""Steps after which weights are compared."""
_HALF: Final = 2
"""Part of a node's share that its RAM holds in front of a disk: one in so many bytes."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where the samples of one training lie and are computed."""

    name: str
    ranks: int
    nodes: int
    tiers: str
    """`none`, `ram`, or `ram+disk` with half of the data in each."""
    shuffle: str = "batch"


PLACEMENTS: Final = (
    RankPlacement("1 rank, no tiers", 1, 1, "none"),
    RankPlacement("2 ranks, RAM", 2, 1, "ram"),
    RankPlacement("4 ranks, 2 nodes, RAM and disk, --shuffle global", 4, 2, "ram+disk", "global"),
    RankPlacement("4 ranks, 2 nodes, RAM", 4, 2, "ram"),
)
"""The last one deals samples to the nodes that hold them."""


@dataclass(frozen=True, slots=True)
class _TrainingResult:
    accuracy: float
    seconds: float
    early: Mapping[int, npt.NDArray[np.float32]]
    """Weights after some steps, flat."""
    digest: str
    """Of the weights at the end."""


def measure(options: ExchangeBenchOptions) -> dict[str, object]:
    """Runs of `dlio train` of each seed, mode of batch normalisation and placement, with a global
    batch of 64: held-out accuracy, its spread, and the distance of the weights to those of the
    first placement after 1 step and 5."""
    modes = options.batch_norms or _MODES
    runs: dict[str, list[list[_TrainingResult]]] = {mode: [] for mode in modes}
    every = [(seed, mode, p) for seed in range(options.seeds) for mode in modes for p in PLACEMENTS]
    with kept_folder(options.keep) as folder:
        for seed, mode, placement in steps(every, lambda each: f"{each[1]}, {each[2].name}"):
            if placement is PLACEMENTS[0]:
                runs[mode].append([])
            runs[mode][-1].append(_train(options, folder, seed, mode, placement))
    rows = [row for mode, seeds in runs.items() for row in _rows(mode, seeds)]
    said = [
        f"Batches of {_GLOBAL_BATCH} samples over all ranks, {counted(options.epochs, 'epoch')}, "
        f"{counted(options.seeds, 'seed')}, {_MODEL} at {_SIZE} pixels. Distances are root mean "
        "squares "
        "over the weights, relative to the weights, from the first placement's; the largest over "
        "seeds. Placements whose final weights are the same bit for bit have the same letter. "
        "Accuracies are means over seeds.",
        "Spread: largest less smallest accuracy of one seed over all placements, in points.",
    ]
    return {
        "rows": rows,
        "spreads": [
            {
                "batch_norm": mode,
                "spread_points": spread([100 * _range(each) for each in seeds]),
                "spread_points_global": spread([100 * _range(each[:-1]) for each in seeds]),
            }
            for mode, seeds in runs.items()
        ],
        "said": said,
    }


def _train(
    options: ExchangeBenchOptions, folder: str, seed: int, mode: str, placement: RankPlacement
) -> _TrainingResult:
    name = f"{mode}-{PLACEMENTS.index(placement)}-{seed}"
    probe = os.path.join(folder, f"{name}.npz")
    factory = f"{Probe.__module__}:{Probe.__name__}"
    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        report = trained(
            name,
            folder,
            placement.ranks,
            {
                "source": options.source,
                "val": options.val,
                "epochs": options.epochs,
                "seed": seed,
                "model": _MODEL,
                "image_size": _SIZE,
                "crop_scale": 0.5,
                "batch_size": _GLOBAL_BATCH // placement.ranks,
                "batch_norm": mode,
                "shuffle": placement.shuffle,
                "pretend_nodes": placement.nodes,
                "workers": 1,
                "callback": [f"{factory}(path={probe!r})"],
            },
            unchecked={"tiers": _tiers(str(options.source), placement, scratch)},
        )
    with np.load(probe) as saved:
        early = {step: saved[f"step{step}"] for step in _EARLY if f"step{step}" in saved}
        digest = str(saved["digest"])
    seconds = sum(epoch["seconds"] for epoch in report["epochs"])
    return _TrainingResult(final_accuracy(report), seconds, early, digest)


def _tiers(source: str, placement: RankPlacement, scratch: str) -> str:
    if placement.tiers != "ram+disk":
        return "ram:1GiB" if placement.tiers == "ram" else placement.tiers
    size = payload_bytes(source)
    ram = max(size // (_HALF * placement.nodes), 1 << 20)
    return f"ram:{ram}B,{scratch}:{size + (1 << 24)}B"


def _rows(mode: str, seeds: Sequence[Sequence[_TrainingResult]]) -> list[dict[str, Any]]:
    letters = [_letters([run.digest for run in runs]) for runs in seeds]
    return [
        {
            "batch_norm": mode,
            "placement": placement.name,
            "held_out_percent": 100 * statistics.mean(runs[k].accuracy for runs in seeds),
            **{
                # A short run of little data does not come to step 5.
                f"distance_after_{step}": max(_distance(runs[k], runs[0], step) for runs in seeds)
                if step in seeds[0][k].early
                else None
                for step in _EARLY
            },
            "final_weights": " ".join(dict.fromkeys(each[k] for each in letters)),
            "seconds": statistics.mean(runs[k].seconds for runs in seeds),
        }
        for k, placement in enumerate(PLACEMENTS)
    ]


def _distance(one: _TrainingResult, other: _TrainingResult, step: int) -> float:
    mine, theirs = one.early[step].astype(np.float64), other.early[step].astype(np.float64)
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def _letters(digests: Sequence[str]) -> list[str]:
    """Return a letter for each digest, the same one for equal digests."""
    distinct = list(dict.fromkeys(digests))
    return ["ABCDEFGH"[distinct.index(each)] for each in digests]


def _range(runs: Sequence[_TrainingResult]) -> float:
    return float(np.ptp([run.accuracy for run in runs]))


class Probe(Callback):
    """A callback that writes the weights after steps 1 and 5, and a digest of those after each
    epoch, on rank 0: to an .npz file with the arrays `step1`, `step5` and `digest`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._arrays: dict[str, Any] = {}

    def after_step(self, run: Run) -> None:
        if run.updates in _EARLY:
            self._arrays[f"step{run.updates}"] = _flat(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        if run.comm.rank == 0:
            digest = xxhash.xxh3_128_hexdigest(_flat(run).tobytes())
            np.savez(self._path, digest=np.array(digest), **self._arrays)


def _flat(run: Run) -> npt.NDArray[np.float32]:
    """Return all weights and running statistics."""
    values = [value.detach().cpu().reshape(-1) for value in run.model.state_dict().values()]
    return np.concatenate([value.float().numpy() for value in values])
