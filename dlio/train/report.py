"""What a run tells at its end: JSON for programs, a page for people."""

import json
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

from dlio.comm.environment import shows_terminal
from dlio.storage.counters import PLACES
from dlio.train.config import TrainConfig
from dlio.util.cores import available_cores
from dlio.util.units import format_bytes


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One epoch, over all ranks."""

    epoch: int
    seconds: float
    """Of the slowest rank, evaluation aside."""
    samples: int
    samples_per_s: float
    stall_fraction: float
    """Share of its time that a rank waited for data, mean over ranks."""
    loss: float | None
    accuracy: float | None
    """On the training samples, while training."""
    val_accuracy: float | None
    """Of the ranks' mean model on the held-out samples."""
    bytes: dict[str, int]
    """Payload bytes by the place they were read from: source, peer, ram, disk."""
    first_batch_s: float | None
    """Until the slowest rank had its first batch."""
    consensus_distance: float
    """Root mean square distance of the ranks' weights from their mean."""
    exchange_wait_s: float
    """Waiting for other ranks' gradients or weights, mean over ranks."""
    exchange_bytes: int
    """Of gradients or weights, sent by all ranks; of an allreduce as a ring sends them."""
    peak_lr: float
    messages: int
    """Messages with samples, between ranks."""
    late: int
    healed: int
    decoded: int
    """Samples that came decoded from a decoded tier."""
    decode_saved_s: float
    """Seconds of decoding that this saved, over all ranks' threads."""
    step_ms: dict[str, float]
    """Milliseconds from one step of the optimizer to the next: `median` and `p95`, of the rank
    where they are longest."""
    left_out: int
    """Steps that the optimizer was not let do (--nan skip), of the rank with most."""
    skipped: list[str]
    """Samples that could not be read or decoded, with --on-error skip."""
    notes: list[str]
    shares: list[int]
    """Samples of a whole step that each rank took."""
    rank_samples_per_s: list[float | None]
    """That each rank computes, waiting for data and for other ranks left out; None where it had no
    samples, and on a GPU without --balance."""
    pruning: dict[str, Any] | None = None
    """With --prune: `parameters` and `parameters_at_first`, those of `layers`, `flops_per_sample`
    of a forward pass and `flops_at_first`, the epoch's `rounds`, how many had something `undone`,
    what `statistics` take (`steps` looked at, `share` of the time since the start, `rounds_share`
    of rounds), why there are no more rounds (`stopped`), and what is `left_alone`. Of rank 0."""
    skip_share: float = 0.0
    """Share of the data set's samples that --skip-samples left out of this epoch."""

    @classmethod
    def of_ranks(
        cls,
        epoch: int,
        ranks: list[dict[str, Any]],
        val_accuracy: float | None,
        consensus: float,
        peak_lr: float,
        pruning: dict[str, Any] | None = None,
    ) -> "EpochReport":
        loss, correct, count = (sum(rank["sums"][k] for rank in ranks) for k in range(3))
        seconds = max(rank["seconds"] for rank in ranks)
        first = [rank["first_batch_s"] for rank in ranks if rank["first_batch_s"] is not None]
        return cls(
            epoch=epoch,
            seconds=seconds,
            samples=int(count),
            samples_per_s=count / seconds,
            stall_fraction=_mean([rank["stall_s"] / rank["seconds"] for rank in ranks]),
            loss=loss / count if count else None,
            accuracy=correct / count if count else None,
            val_accuracy=val_accuracy,
            bytes={place: sum(rank["bytes"][place] for rank in ranks) for place in PLACES},
            first_batch_s=max(first, default=None),
            consensus_distance=consensus,
            exchange_wait_s=_mean([rank["exchange_wait_s"] for rank in ranks]),
            exchange_bytes=int(sum(rank["exchange_bytes"] for rank in ranks)),
            peak_lr=peak_lr,
            messages=sum(rank["messages"] for rank in ranks),
            late=sum(rank["late"] for rank in ranks),
            healed=sum(rank["healed"] for rank in ranks),
            decoded=sum(rank["decoded"] for rank in ranks),
            decode_saved_s=sum(rank["decode_saved_s"] for rank in ranks),
            step_ms={
                "median": max(rank["step_ms"][0] for rank in ranks),
                "p95": max(rank["step_ms"][1] for rank in ranks),
            },
            left_out=max(rank["left_out"] for rank in ranks),
            skipped=sorted({name for rank in ranks for name in rank["skipped"]}),
            notes=list(dict.fromkeys(note for rank in ranks for note in rank["notes"])),
            shares=[rank["share"] for rank in ranks],
            rank_samples_per_s=[rank["computed_per_s"] for rank in ranks],
            pruning=pruning,
            skip_share=ranks[0].get("skip_share", 0.0),
        )


@dataclass(slots=True)
class RunReport:
    """A whole run."""

    dataset: dict[str, int]
    """`samples` and payload `bytes`."""
    ranks: int
    nodes: int
    tiers: list[str]
    config: TrainConfig
    epochs: list[EpochReport] = field(default_factory=list)
    """Of a run that was resumed, those before it, too."""
    resumed: str | None = None
    """The checkpoint that the run went on from."""
    stopped: str | None = None
    """Why it ended early, when it did."""
    checkpoints: dict[str, Any] | None = None
    """Names `written`, `failures`, and `wait_s`, the seconds that rank 0's training waited."""

    def to_json(self) -> str:
        from importlib.metadata import version

        return json.dumps(
            {
                **asdict(self),
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
        """A table of the epochs and what it means, on standard output."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        console = Console(force_terminal=shows_terminal(), soft_wrap=True)
        data_bytes = self.dataset["bytes"]
        table = Table(
            title=f"{self.config.source}: {self.dataset['samples']:,} samples, "
            f"{format_bytes(data_bytes)}; {self.ranks} rank(s) on {self.nodes} node(s), "
            f"{self.config.exchange}, shuffle {self.config.shuffle}",
            title_justify="left",
            caption="train, held out: accuracy. source, peer, ram, disk: share of the data read\n"
            "from there (what fills a tier is read from the source, and then from the tier)",
            box=SIMPLE_HEAD,
            padding=0,  # Ten columns fit in the 80 characters of a pipe.
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
                _percent(epoch.val_accuracy),
                f"{epoch.samples_per_s:,.0f}",
                _percent(epoch.stall_fraction),
                *(_share(epoch.bytes[place], data_bytes) for place in PLACES),
            )
        console.print(table)
        for sentence in self.sentences():
            console.print(sentence, highlight=False)

    def sentences(self) -> list[str]:
        """What the figures say, in words."""
        if not self.epochs:
            return []
        first, last, data_bytes = self.epochs[0], self.epochs[-1], self.dataset["bytes"]
        kept = first.bytes["disk"] > 0 and first.bytes["source"] < 0.95 * data_bytes
        said = [f"The source was read {first.bytes['source'] / data_bytes:.2f} times in epoch 1"]
        later = [epoch.bytes["source"] for epoch in self.epochs[1:]]
        if later and not max(later):
            said[0] += " and not at all afterwards: the tiers hold it all."
        elif later:
            share = sum(later) / len(later) / data_bytes
            said[0] += f" and {share:.2f} times in each later one: what the tiers cannot hold."
        else:
            said[0] += "."
        if kept:
            said.append("A disk tier still held blocks of an earlier run, or was staged.")
        if self.nodes > 1:
            moved = last.bytes["peer"] / data_bytes
            said.append(
                f"Between nodes {moved:.1%} of the bytes moved in the last epoch"
                + (
                    f"; a shuffle that ignores where samples live moves {1 - 1 / self.nodes:.0%}."
                    if self.config.shuffle == "batch"
                    else "."
                )
            )
        if len(set(last.shares)) > 1:
            counts = ", ".join(map(str, last.shares[:8])) + (", ..." if self.ranks > 8 else "")
            said.append(f"Ranks took {counts} samples of a step in the last epoch.")
        shares = [epoch.skip_share for epoch in self.epochs]
        if max(shares):
            said.append(
                f"{sum(shares) / len(shares):.0%} of the samples were skipped, for their losses "
                f"had stayed low: up to {max(shares):.0%} of an epoch's."
            )
        if last.val_accuracy is not None:
            said.append(f"Held-out accuracy is {last.val_accuracy:.1%}.")
        if last.pruning is not None:
            said.append(_pruned([epoch.pruning for epoch in self.epochs if epoch.pruning]))
        if self.stopped is not None:
            said.append(f"Stopped after {len(self.epochs)} epoch(s): {self.stopped}.")
        left_out = sum(epoch.left_out for epoch in self.epochs)
        if left_out:
            said.append(f"{left_out} step(s) whose loss or gradient was no number were left out.")
        if self.checkpoints is not None:
            said.append(
                f"{len(self.checkpoints['written'])} checkpoint(s) were written; training waited "
                f"{self.checkpoints['wait_s']:.2f} s for them."
            )
            said += [f"{failure}." for failure in self.checkpoints["failures"]]
        skipped = sorted({name for epoch in self.epochs for name in epoch.skipped})
        if skipped:
            names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
            said.append(f"{len(skipped)} sample(s) were skipped: {names}.")
        healed = sum(epoch.healed for epoch in self.epochs)
        if healed:
            said.append(f"{healed} damaged copies in tiers were replaced by the source's.")
        said += list(dict.fromkeys(note for epoch in self.epochs for note in epoch.notes))[:5]
        return said


def _pruned(epochs: list[dict[str, Any]]) -> str:
    last = epochs[-1]
    rounds = [each for epoch in epochs for each in epoch["rounds"]]
    kinds: dict[str, int] = {}
    for each in rounds:
        for kind, count in each["removed"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    gone = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "none"
    undone = sum(epoch["undone"] for epoch in epochs)
    return (
        f"{last['parameters']:,} of {last['parameters_at_first']:,} parameters are left, after "
        f"{len(rounds)} round(s), {undone} of them undone in part or whole; neurons removed: "
        f"{gone}. Statistics took {last['statistics']['share']:.2%} of the time."
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _share(count: int, of: int) -> str:
    return f"{count / of:.0%}" if count else "-"
