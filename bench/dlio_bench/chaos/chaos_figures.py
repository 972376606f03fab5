"""Records of the jobs of a storm, and its figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dlio_bench.chaos.accounts import UnevenEpoch, effective_time, quantiles, uneven_totals
from dlio_bench.chaos.scheduled_faults import InjectedFault
from dlio_bench.chaos.stamps import LossStamp, RankStamps, next_of_all, steps_of
from dlio_bench.chaos.torchft_job import next_quorum_step

_SHOWN: Final = {
    "faults": "faults made",
    "ranks_hurt": "ranks hurt",
    "unnoticed": "faults that nobody felt, at an end",
    "others_lost": "ranks lost that were not hurt",
    "jobs": "jobs",
    "runs": "processes started for them",
    "hangs": "hangs",
    "failed_jobs": "jobs that failed",
    "unchecked_jobs": "jobs without a trace",
    "samples_lost": "samples lost",
    "samples_dropped": "of them, in batches that were computed",
    "samples_beyond": "samples of epochs after the last",
    "samples_doubled": "samples doubled",
    "ledger_problems": "wrong lines of traces",
    "replays": "jobs replayed without faults",
    "replays_equal": "replays with the same weights, bit for bit",
    "recovery_s": "recovery, s",
    "renew_s": "of it, to renew, s",
    "settle_s": "of it, to settle, s",
    "other_weights": "ranks with other weights than the others",
    "refills": "times that all ranks began again",
    "joins": "ranks that joined",
    "joining_s": "others held by them, s",
    "next_step_s": "fault to the next step of all, s",
    "caught_up_s": "fault to the next new step, s",
    "ettr": "effective training time ratio",
    "samples_per_s": "samples/s",
    "steps": "steps",
    "steps_redone": "steps redone",
    "left_processes": "processes left",
    "left_files": "temporary files left",
}


@dataclass(slots=True)
class RunRecord:
    """One run of `dlio train`."""

    code: int | None
    hung: bool
    ranks: list[RankStamps]
    made: list[InjectedFault]
    ended: float
    """Time when it ended."""
    errors: str
    left_processes: int
    left_files: list[str]
    refills: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of the times in which all ranks began again (`--refill`)."""


@dataclass(slots=True)
class JobRecord:
    """One job: a run, or several of which each resumes the one before."""

    runs: list[RunRecord] = field(default_factory=list)
    uneven: list[UnevenEpoch] | None = None
    """Epochs with lost or doubled samples; None if there is not a trace of the whole job."""
    dropped: int | None = None
    """Of the lost samples of a job of torchft, those of batches that were computed."""
    beyond: int | None = None
    """Samples that a job of torchft trained on in epochs after its last one."""
    epochs: int = 0
    """Finished epochs."""
    other_weights: int = 0
    """Ranks whose weights were found to differ from the others'."""
    replay: str = ""
    """`equal`, if a replay without faults has the same final weights, `other` if it has not, or the
    reason why it failed; empty if it was not tried."""

    @property
    def hangs(self) -> int:
        """Number of runs that hung."""
        return sum(run.hung for run in self.runs)

    @property
    def failed(self) -> bool:
        """True if it did not come to its end, for another reason than a hang."""
        return not self.runs or (not self.runs[-1].hung and self.runs[-1].code != 0)


def figures_of(mode: str, jobs: Sequence[JobRecord], samples: int) -> dict[str, object]:
    """Return the figures of a storm in a mode: `shrink`, `torchft`, or `restart` for jobs that are
    started again. An epoch has so many samples."""
    runs = [run for job in jobs for run in job.runs]
    felt: list[tuple[InjectedFault, float | None]] = []
    caught_up: list[float] = []
    effective, unnoticed = [], 0
    for job in jobs:
        disturbed = []
        for number, run in enumerate(job.runs):
            for each in run.made:
                if mode == "shrink":
                    until = next_step(run.ranks, each)
                elif mode == "torchft":
                    until = next_quorum_step(run.ranks, each)
                else:
                    later = (steps_of(other.ranks) for other in job.runs[number + 1 :])
                    until = next((steps[0].at for steps in later if steps), None)
                    if (new := _new_step(job.runs, number)) is not None:
                        caught_up.append(new - each.at)
                felt.append((each, until))
                unnoticed += until is None and not job.failed and not job.hangs
                disturbed.append((each.at, run.ended if until is None else until))
            disturbed += [*run.refills, *joining_times(run.ranks)]
        effective.append(effective_time([steps_of(run.ranks) for run in job.runs], disturbed))
    losses = [loss for run in runs for loss in _changes(run.ranks, "lost")]
    joins = [join for run in runs for join in _changes(run.ranks, "joined")]
    next_step_s: dict[str, list[float]] = {each.fault.kind: [] for each, _ in felt}
    for each, until in felt:
        if until is not None:
            next_step_s[each.fault.kind].append(until - each.at)
    counted_s = sum(each.counted_s for each in effective)
    wall_s = sum(each.wall_s for each in effective)
    whole_s = sum(each.wall_s for job, each in zip(jobs, effective, strict=True) if job.epochs)
    replayed = [job.replay for job in jobs if job.replay]
    dropped, beyond = ([getattr(job, key) or 0 for job in jobs] for key in ("dropped", "beyond"))
    return {
        "faults": dict(Counter(each.fault.kind for each, _ in felt)),
        "ranks_hurt": sum(len(each.ranks) for each, _ in felt),
        "unnoticed": unnoticed,
        "others_lost": sum(map(_others_lost, runs)) if mode == "shrink" else None,
        "jobs": len(jobs),
        "runs": len(runs),
        "hangs": sum(job.hangs for job in jobs),
        "failed_jobs": sum(job.failed for job in jobs),
        "failures": [job.runs[-1].errors for job in jobs if job.failed and job.runs],
        "unchecked_jobs": sum(
            job.uneven is None and job.epochs > 0 and len(job.runs) == 1 for job in jobs
        ),
        "epochs_checked": sum(job.epochs for job in jobs if job.uneven is not None),
        **uneven_totals([job.uneven for job in jobs]),
        "samples_dropped": sum(dropped) or None,
        "samples_beyond": sum(beyond) or None,
        "replays": len(replayed) or None,
        "replays_equal": replayed.count("equal") if replayed else None,
        "unequal_replays": [each for each in replayed if each != "equal"],
        "uneven_epochs": [
            {"job": number, **each}
            for number, job in enumerate(jobs, 1)
            for each in job.uneven or ()
        ],
        "joins": sum(len(join["ranks"]) for join in joins) or None,
        "refills": sum(len(run.refills) for run in runs) or None,
        "other_weights": sum(job.other_weights for job in jobs),
        "samples_again": sum(loss["samples_again"] for loss in losses),
        "recovery_s": quantiles([loss["seconds"] for loss in losses]),
        "renew_s": quantiles([loss["renew_s"] for loss in losses]),
        "settle_s": quantiles([loss["settle_s"] for loss in losses]),
        "joining_s": quantiles([join["seconds"] for join in joins]),
        "next_step_s": quantiles([each for times in next_step_s.values() for each in times]),
        "next_step_s_by_fault": {
            kind: quantiles(times) for kind, times in sorted(next_step_s.items())
        },
        "caught_up_s": quantiles(caught_up),
        "ettr": counted_s / wall_s if wall_s else None,
        "counted_s": counted_s,
        "wall_s": wall_s,
        "samples_per_s": (samples * sum(job.epochs for job in jobs) / whole_s if whole_s else None),
        "steps": sum(each.steps for each in effective),
        "steps_redone": sum(each.redone for each in effective),
        "left_processes": sum(run.left_processes for run in runs),
        "left_files": sorted({name for run in runs for name in run.left_files}),
    }


def joining_times(ranks: Sequence[RankStamps]) -> list[tuple[float, float]]:
    """Return begin and end of the times in which others were held by ranks that joined."""
    return [(each["t"] - each["seconds"], each["t"]) for each in _changes(ranks, "joined")]


def _others_lost(run: RunRecord) -> int:
    """Return the number of ranks that were lost without a fault: Open MPI has crashed them."""
    hurt = {rank for each in run.made for rank in each.ranks}
    lost = {rank for loss in _changes(run.ranks, "lost") for rank in loss["ranks"]}
    return len(lost - hurt)


def next_step(ranks: Sequence[RankStamps], made: InjectedFault) -> float | None:
    """Return when all that were left had finished their first step without the ranks of a fault.

    None if they made none: the fault was not felt before the end.
    """
    generations = [
        min(
            (
                loss["generation"]
                for each in ranks
                for loss in each.losses
                if lost in loss["ranks"] and loss["change"] != "joined" and loss["t"] >= made.at
            ),
            default=None,
        )
        for lost in made.ranks
    ]
    known = [each for each in generations if each is not None]
    if len(known) < len(generations):
        return None
    return next_of_all(ranks, made.at, max(known))


def rows_of(result: Mapping[str, Mapping[str, object]]) -> list[dict[str, str]]:
    """Return the rows of a table: one a figure, one column a way of surviving."""
    return shown_rows(_SHOWN, result)


def shown_rows(
    shown: Mapping[str, str], columns: Mapping[str, Mapping[str, object]]
) -> list[dict[str, str]]:
    """Return the rows of a table: one for each figure that some column has, with its words."""
    return [
        {"figure": words, **{head: figure_text(own[key]) for head, own in columns.items()}}
        for key, words in shown.items()
        if any(own[key] not in (None, {"count": 0}) for own in columns.values())
    ]


def _changes(ranks: Sequence[RankStamps], kind: str) -> list[LossStamp]:
    """Return each change of a kind, as the rank saw it that took longest."""
    longest: dict[tuple[int, tuple[int, ...]], LossStamp] = {}
    for each in ranks:
        for loss in (loss for loss in each.losses if loss["change"] == kind):
            # Generations are counted anew when all ranks begin again.
            which = (loss["generation"], tuple(loss["ranks"]))
            other = longest.setdefault(which, loss)
            if loss["seconds"] > other["seconds"]:
                longest[which] = loss
    return list(longest.values())


def _new_step(runs: Sequence[RunRecord], number: int) -> float | None:
    """Return when a later run finished the first step that no run had finished before."""
    before = [step.number for run in runs[: number + 1] for step in steps_of(run.ranks)]
    for run in runs[number + 1 :]:
        for step in steps_of(run.ranks):
            if step.number > max(before, default=0):
                return step.at
    return None


def figure_text(value: object) -> str:
    """Return a figure in words; quantiles as median, p90, p99 and max."""
    if isinstance(value, dict) and "count" in value:
        if not value["count"]:
            return "-"
        shown = (f"{value[name]:.3g}" for name in ("median", "p90", "p99", "max"))
        return f"{', '.join(shown)} (of {value['count']})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "-"
