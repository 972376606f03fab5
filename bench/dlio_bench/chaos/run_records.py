"""Records of the jobs of the case storm."""

from dataclasses import dataclass, field

from dlio_bench.chaos.accounts import UnevenEpoch
from dlio_bench.chaos.scheduled_faults import InjectedFault
from dlio_bench.chaos.stamps import RankStamps


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
