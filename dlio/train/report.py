"""Reports of a training run: JSON for programs, a table and sentences for people."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypedDict

from dlio.comm.launch_environment import shows_terminal
from dlio.comm.survival.recovery import MeasuredLoss
from dlio.errors import printable
from dlio.loader.stats import PassStats
from dlio.storage.counters import PLACES
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import find_features
from dlio.train.tasks.metrics import label, show_metric
from dlio.util.cores import available_cores
from dlio.util.json_output import json_text
from dlio.util.options import as_mapping
from dlio.util.units import counted, format_bytes


class RankEpoch(TypedDict, total=False):
    """Measurements of one rank in one epoch."""

    share: int
    """Samples of a whole step that the rank takes."""
    computed_per_s: float | None
    """Samples per second that it computes; None before it has computed any."""
    sums: list[float]
    """Sum of losses, correct answers, samples."""
    seconds: float
    loader: PassStats
    exchange_wait_s: float
    exchange_bytes: float
    step_ms: list[float]
    """Median and 95th percentile, in milliseconds."""
    left_out: int
    skip_share: float
    features: dict[str, Any]
    """Measurements of the features that are on, by their prefixes."""


_WIDTH: Final = 80
"""Columns of the table, also where a terminal has fewer: figures are not to be cut."""


@dataclass(frozen=True, slots=True)
class RestoredRank:
    """A rank whose weights differed from those of most ranks (--check-weights)."""

    rank: int
    """Its number when the job began."""
    node: str
    alike_at: int
    """Optimizer steps after which all ranks had the same weights."""
    seen_at: int
    """Optimizer steps after which they had not."""
    giver: int
    """Number of the rank, when the job began, whose state it has got."""

    def sentence(self) -> str:
        """Return the repair in words, such as `rank 2 (node n3) has other weights ...`."""
        return (
            f"rank {self.rank} (node {self.node}) has other weights than the others since a step "
            f"after {self.alike_at} (seen at step {self.seen_at}): restored from rank {self.giver}"
        )


class CheckpointReport(TypedDict):
    """The checkpoints of one run, from rank 0."""

    written: list[str]
    """Names of the checkpoints."""
    failures: list[str]
    """Errors, in words."""
    lacks_last: bool
    """True if the last one is a failure: the end of the run is in none."""
    wait_s: float
    """Seconds that training waited."""


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One epoch, over all ranks."""

    epoch: int
    """Number of the epoch, from 0."""
    seconds: float
    """Time of the slowest rank, without evaluation."""
    samples: int
    samples_per_s: float
    stall_fraction: float
    """Fraction of its time that a rank waited for data, mean over ranks."""
    loss: float | None
    """Mean training loss; None without samples."""
    accuracy: float | None
    """Accuracy on the training samples, while training."""
    val_accuracy: float | None
    """Accuracy of the ranks' mean model on the held-out samples."""
    bytes: dict[str, int]
    """Payload bytes by the place they were read from: source, peer, ram, disk."""
    first_batch_s: float | None
    """Time until the slowest rank had its first batch."""
    consensus_distance: float
    """Root mean square distance of the ranks' weights from their mean."""
    exchange_wait_s: float
    """Time spent waiting for other ranks' gradients or weights, mean over ranks."""
    exchange_bytes: int
    """Bytes of gradients or weights sent by all ranks; an allreduce counts as a ring."""
    peak_lr: float
    """Peak of the learning rate over the run."""
    messages: int
    """Messages with samples between ranks."""
    late: int
    """Samples that a peer sent too late, and that were read from the source."""
    healed: int
    """Damaged copies in tiers that were replaced from the source."""
    tier_errors: int
    """Errors of tiers' disks, after which samples came from elsewhere."""
    decoded: int
    """Samples read from a decoded tier."""
    decode_saved_s: float
    """Decoding time that the decoded tier saved, over all ranks' threads."""
    step_ms: dict[str, float]
    """Milliseconds between optimizer steps: `median` and `p95`, of the rank where they are
    longest."""
    left_out: int
    """Optimizer steps left out (--nan skip), of the rank with most."""
    skipped: list[str]
    """Samples that could not be read or decoded, with --on-error skip."""
    notes: list[str]
    """Remarks of the loader, such as a tier that was full."""
    shares: list[int]
    """Samples of a whole step that each rank took."""
    rank_samples_per_s: list[float | None]
    """Samples per second that each rank computes, without waiting times; None if it had no samples,
    and on a GPU without --balance."""
    skip_share: float = 0.0
    """Fraction of the data set that this epoch left out."""
    task: str = "classify"
    """Kind of the task: classify, regress, autoencode, segment or table."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """All metrics of the ranks' mean model on the held-out samples, such as `loss`, `top5`, `auc`
    with the bound `auc_error`, `rmse`, `iou`; empty without --val."""
    watch: str = "accuracy"
    """Name of the metric that --early-stopping watches, and that tables show."""
    features: dict[str, Any] = field(default_factory=dict)
    """Fields of features, such as `pruning`, by name; in JSON they stand among the others."""

    @property
    def watched(self) -> float | None:
        """Value of the watched metric; None without held-out data."""
        return self.metrics.get(self.watch, self.val_accuracy if self.watch == "accuracy" else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, those of features among them."""
        values = asdict(self)
        features = values.pop("features")
        return {**values, **features}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochReport":
        """Return the report of a result of `to_dict`."""
        own = {each.name for each in fields(cls)}
        features = {name: value for name, value in values.items() if name not in own}
        return cls(**{name: values[name] for name in values if name in own}, features=features)

    @classmethod
    def of_ranks(
        cls,
        epoch: int,
        ranks: Sequence[RankEpoch],
        val_accuracy: float | None,
        consensus_distance: float,
        peak_lr: float,
        samples: int = 0,
    ) -> "EpochReport":
        """Combine the measurements of all ranks, in rank order, with fields that differ from these.

        The epoch has so many samples, if measurements of some were lost with ranks.
        """
        loss, correct, count = (sum(rank["sums"][k] for rank in ranks) for k in range(3))
        # Sums count what a rank computed again after a loss, too.
        trained = samples or int(count)
        seconds = max(rank["seconds"] for rank in ranks)
        # A rank that has joined behind the last batch of the epoch has made no pass of it.
        loaders: list[Any] = [rank["loader"] for rank in ranks if "bytes" in rank["loader"]]
        first = [each["first_batch_s"] for each in loaders if each["first_batch_s"] is not None]
        summed = ("messages", "late", "healed", "tier_errors", "decoded", "decode_saved_s")
        return cls(
            epoch=epoch,
            seconds=seconds,
            samples=trained,
            samples_per_s=trained / seconds,
            stall_fraction=_mean([rank["loader"]["stall_s"] / rank["seconds"] for rank in ranks]),
            loss=loss / count if count else None,
            accuracy=correct / count if count else None,
            val_accuracy=val_accuracy,
            consensus_distance=consensus_distance,
            peak_lr=peak_lr,
            bytes={place: sum(each["bytes"][place] for each in loaders) for place in PLACES},
            first_batch_s=max(first, default=None),
            exchange_wait_s=_mean([rank["exchange_wait_s"] for rank in ranks]),
            exchange_bytes=int(sum(rank["exchange_bytes"] for rank in ranks)),
            **{name: sum(each[name] for each in loaders) for name in summed},
            step_ms={
                name: max(rank["step_ms"][k] for rank in ranks)
                for k, name in enumerate(("median", "p95"))
            },
            left_out=max(rank["left_out"] for rank in ranks),
            skipped=sorted({name for each in loaders for name in each["skipped"]}),
            notes=list(dict.fromkeys(note for each in loaders for note in each["notes"])),
            shares=[rank["share"] for rank in ranks],
            rank_samples_per_s=[rank["computed_per_s"] for rank in ranks],
            skip_share=ranks[0].get("skip_share", 0.0),
        )


@dataclass(slots=True)
class RunReport:
    """A whole run."""

    dataset: dict[str, int]
    """Number of `samples` and payload `bytes`."""
    ranks: int
    nodes: int
    tiers: list[str]
    config: TrainConfig
    epochs: list[EpochReport] = field(default_factory=list)
    """All epochs; for a resumed run, including those before it was resumed."""
    resumed: str | None = None
    """Path of the checkpoint that the run was resumed from."""
    stopped: str | None = None
    """Reason why the run ended early."""
    checkpoints: CheckpointReport | None = None
    """Results of --checkpoint."""
    losses: list[MeasuredLoss] = field(default_factory=list)
    """Losses of ranks that the others went on without (--fault-tolerance)."""
    changes: list[MeasuredLoss] = field(default_factory=list)
    """Ranks that joined, and that left on purpose."""
    restored: list[RestoredRank] = field(default_factory=list)
    """Ranks whose weights were restored (--check-weights)."""
    notes: list[str] = field(default_factory=list)
    """Remarks of the task on the data, such as columns with missing values."""

    def to_json(self) -> str:
        """Return the report as indented JSON, with versions and machine."""
        from importlib.metadata import version

        return json_text(
            {
                **{each.name: getattr(self, each.name) for each in fields(self)},
                "config": as_mapping(self.config),
                "epochs": [epoch.to_dict() for epoch in self.epochs],
                **{
                    name: [asdict(each) for each in getattr(self, name)]
                    for name in ("losses", "changes", "restored")
                },
                "versions": {
                    "dlio": version("dlio"),
                    "torch": version("torch"),
                    "python": platform.python_version(),
                },
                "machine": {
                    "host": platform.node(),
                    "system": platform.platform(),
                    "cores": available_cores(),
                },
            },
            indent=2,
        )

    def print(self) -> None:
        """Print a table of the epochs, and `sentences`, on standard output."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        console = Console(force_terminal=shows_terminal(), soft_wrap=True, markup=False)
        console.width = max(console.width, _WIDTH)
        data_bytes = self.dataset["bytes"]
        samples = counted(self.dataset["samples"], "sample")
        watch = self.epochs[0].watch if self.epochs else "accuracy"
        spares = self.config.survival.spares
        reserve = f", {spares} of them in reserve," if spares else ""
        table = Table(
            title=f"{printable(self.config.data.source)}: {samples}, {format_bytes(data_bytes)}; "
            f"{counted(self.ranks, 'rank')}{reserve} on {counted(self.nodes, 'node')}, "
            f"{self.config.ranks.exchange}, shuffle {self.config.batches.shuffle}",
            title_justify="left",
            caption=f"train: accuracy, held out: {label(watch)}. source, peer, ram, disk: share\n"
            "of the data read from there (a block that fills a tier counts as source first,\n"
            "then as that tier)",
            box=SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
            caption_justify="left",
        )
        for heading in ("epoch", "loss", "train", "held out", "samples/s", "stall"):
            table.add_column(heading, justify="right", no_wrap=True)
        for place in PLACES:
            table.add_column(place, justify="right", no_wrap=True)
        for epoch in self.epochs:
            table.add_row(
                str(epoch.epoch + 1),
                "-" if epoch.loss is None else f"{epoch.loss:.3f}",
                _percent(epoch.accuracy),
                show_metric(epoch.watch, epoch.watched),
                f"{epoch.samples_per_s:,.0f}",
                _percent(epoch.stall_fraction),
                *(_share(epoch.bytes[place], data_bytes) for place in PLACES),
            )
        console.print(table)
        for sentence in self.sentences():
            console.print(printable(sentence), highlight=False)

    def sentences(self) -> list[str]:
        """Summarise the figures in words, one sentence each."""
        if not self.epochs:
            return []
        first, last, data_bytes = self.epochs[0], self.epochs[-1], self.dataset["bytes"]
        times, which = first.bytes["source"] / data_bytes, f"epoch {first.epoch + 1}"
        kept = first.bytes["disk"] > 0 and times < 0.95
        said = [f"The source was read {times:.2f} times in {which}"]
        if not times:
            said, kept = [f"The source was not read in {which}"], not first.bytes["peer"]
        later = [epoch.bytes["source"] / data_bytes for epoch in self.epochs[1:]]
        if later and not max(later):
            said[0] += f"{' and not at all' if times else ' or'} afterwards: the tiers hold it all."
        elif later:
            why = "tiers are empty at --resume" if self.resumed else "the tiers cannot hold it all"
            said[0] += f" and {_mean(later):.2f} times in each later one: {why}."
        else:
            said[0] += "."
        if kept:
            said.append("A tier still held blocks of another run, or was staged.")
        if self.nodes > 1:
            moved = last.bytes["peer"] / data_bytes
            said.append(
                f"Between nodes {moved:.1%} of the bytes moved in the last epoch"
                + (
                    f"; a shuffle that ignores where samples live moves {1 - 1 / self.nodes:.0%}."
                    if self.config.batches.shuffle == "batch"
                    else "."
                )
            )
        if len(set(last.shares)) > 1:
            counts = ", ".join(map(str, last.shares[:8])) + (", ..." if self.ranks > 8 else "")
            said.append(f"Samples of a step by rank, in the last epoch: {counts}.")
        if last.watched is not None:
            said.append(f"Held-out {label(last.watch)} is {_metrics(last)}.")
        for feature in find_features():
            said += feature.sentences(self.epochs)
        if self.stopped is not None:
            said.append(f"Stopped after {counted(len(self.epochs), 'epoch')}: {self.stopped}.")
        left_out = sum(epoch.left_out for epoch in self.epochs)
        if left_out:
            said.append(
                f"{counted(left_out, 'step')} left out, as a loss or gradient was not finite."
            )
        if self.losses:
            said.append(_losses(self.losses))
        for kind, words in (("joined", "joined"), ("left", "left on purpose")):
            ranks = [rank for each in self.changes if each.kind == kind for rank in each.ranks]
            if ranks:
                said.append(
                    f"{counted(len(ranks), 'rank')} {words} ({', '.join(map(str, ranks))})."
                )
        if self.checkpoints is not None:
            said.append(
                f"Wrote {counted(len(self.checkpoints['written']), 'checkpoint')}; training waited "
                f"{self.checkpoints['wait_s']:.2f} s for them."
            )
            said += [f"{failure}." for failure in self.checkpoints["failures"]]
        skipped = sorted({name for epoch in self.epochs for name in epoch.skipped})
        if skipped:
            names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
            said.append(f"Skipped {counted(len(skipped), 'sample')}: {names}.")
        healed = sum(epoch.healed for epoch in self.epochs)
        if healed:
            said.append(f"Damaged copies in tiers that were replaced from the source: {healed}.")
        errors = sum(epoch.tier_errors for epoch in self.epochs)
        if errors:
            said.append(f"Tiers failed {counted(errors, 'time')}, and samples came from elsewhere.")
        said += self.notes[:8]
        said += list(dict.fromkeys(note for epoch in self.epochs for note in epoch.notes))[:5]
        return said


def _losses(losses: Sequence[MeasuredLoss]) -> str:
    lost = sorted(rank for loss in losses for rank in loss.ranks)
    longest = max(loss.seconds for loss in losses)
    starts = sum(loss.kind == "restart" for loss in losses)
    who = f"{counted(len(lost), 'rank')} lost ({', '.join(map(str, lost))})"
    if starts:
        who += f" and all started again {counted(starts, 'time')}"
    again = sum(loss.samples_again for loss in losses)
    return (
        f"{who}; {losses[-1].left} went on, after {longest:.2f} s at most. "
        f"{counted(again, 'sample')} came again at the end of their epoch."
    )


def _metrics(epoch: EpochReport) -> str:
    """Value of the watched metric, followed by the others in brackets if there are some."""
    others = [
        f"{label(name)} {show_metric(name, value)}"
        for name, value in epoch.metrics.items()
        if name not in (epoch.watch, "auc_error")
        and not (epoch.task == "classify" and name == "loss")
    ]
    more = f" ({', '.join(others)})" if others else ""
    return show_metric(epoch.watch, epoch.watched) + more


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _share(count: int, of: int) -> str:
    return f"{count / of:.0%}" if count else "-"
