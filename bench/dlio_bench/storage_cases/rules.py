"""The rules of MLPerf Storage that a run can be held against, each passed or failed. Pure.

The result is never one of MLPerf: that takes MLCommons' own tool, its review, and more than these
rules. Sources: github.com/mlcommons/storage, Submission_guidelines.md (v1.0, v2.0) and Rules.md
(v3.0), whose sections are named below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dlio.util.units import format_bytes
from dlio_bench.storage_cases.workload import Workload

DISCLAIMER: Final = (
    "Not an MLPerf result: rules of MLPerf Storage, checked on a run of dlio. Results that may "
    "carry MLPerf's name come from MLCommons' own tool and review."
)
Outcome = Literal["passed", "failed", "unknown", "not applicable"]


@dataclass(frozen=True, slots=True)
class _Version:
    """A round of MLPerf Storage."""

    least_au: Mapping[str, float]
    """Least accelerator utilisation of each workload."""
    accelerators: tuple[str, ...]


_V1: Final = {"unet3d": 0.9, "resnet50": 0.9, "cosmoflow": 0.7}
VERSIONS: Final[Mapping[str, _Version]] = {
    "v0.5": _Version({"unet3d": 0.9, "bert": 0.9}, ("v100",)),
    "v1.0": _Version(_V1, ("a100", "h100")),
    "v2.0": _Version(_V1, ("a100", "h100")),
    "v3.0": _Version(
        {"unet3d": 0.9, "retinanet": 0.85, "dlrm": 0.7, "flux": 0.9}, ("b200", "mi355")
    ),
}
"""Rounds by version."""
MEMORY_RATIO: Final = 5
RULE_STEPS: Final = 500
_RUNS: Final = 5
_CACHE_SHARE: Final = 0.1
_CLOSED: Final = (
    *("dataset.num_files_train", "dataset.num_subfolders_train", "dataset.data_folder"),
    *("reader.read_threads", "reader.computation_threads", "reader.transfer_size"),
    *("reader.prefetch_size", "reader.odirect", "checkpoint.checkpoint_folder"),
    *("storage.storage_root", "storage.storage_type"),
)
"""Keys that may differ from the workload in the closed division."""


@dataclass(frozen=True, slots=True)
class Check:
    """A rule, held against a run."""

    rule: str
    outcome: Outcome
    measured: str
    wanted: str
    source: str
    """Document and section that have the rule: Guidelines (Submission_guidelines.md) or Rules
    (Rules.md) of github.com/mlcommons/storage."""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """Facts about a training run; None is unknown."""

    workload: Workload
    ranks: int
    """Emulated accelerators."""
    au: Sequence[float | None]
    """Mean utilisation over the ranks in each epoch, 0 to 1; None for too few steps."""
    memory_bytes: int | None
    """Memory of all hosts together."""
    overridden: Sequence[str] = ()
    """Keys that differ from the workload's file, such as `reader.batch_size`."""
    ranks_by_host: Sequence[int] = ()
    runs: int = 1
    """Runs on the same data, one after another."""
    warm_up_runs: int = 0
    cache_share: float | None = None
    """Share of the bytes that the page cache gave."""
    in_memory: bool = False
    """True if the data lies on a file system in memory."""
    emulated: bool = False
    """True if the storage is made slower on purpose."""
    results_on_other_file_system: bool | None = None
    """True if results are written to another file system than the data's."""


def check_training(facts: TrainingFacts, version: str = "v2.0") -> list[Check]:
    """Hold a training run against the rules of a version; see VERSIONS.

    A rule of which the facts are not known is `unknown`, which is not passed.
    """
    rules = VERSIONS[version]
    workload = facts.workload
    family, _, accelerator = workload.name.partition("_")

    def check(
        rule: str,
        passed: bool | None,
        measured: str,
        wanted: str,
        section: str,
        applies: bool = True,
    ) -> Check:
        outcome: Outcome = "unknown" if passed is None else "passed" if passed else "failed"
        guidelines, _, own = section.partition(" / ")
        source = f"Rules {own or guidelines}" if version == "v3.0" else f"Guidelines {guidelines}"
        return Check(rule, outcome if applies else "not applicable", measured, wanted, source)

    least = rules.least_au.get(family)
    known = [each for each in facts.au if each is not None]
    mean = sum(known) / len(known) if known else 0.0
    steps = workload.samples // (facts.ranks * workload.batch_size)
    size = workload.samples * workload.sample_bytes
    strange = [key for key in facts.overridden if key not in _CLOSED]
    hosts = set(facts.ranks_by_host)
    memory = facts.memory_bytes
    checks = [
        check(
            "workload of this version", least is not None, family, ", ".join(rules.least_au), "2.1"
        ),
        check(
            "accelerator of this version",
            accelerator in rules.accelerators,
            accelerator or "none named",
            ", ".join(rules.accelerators),
            "2.1",
        ),
        check(
            "accelerator utilisation, mean of the epochs",
            None if least is None or not known else mean >= least,
            f"{mean:.1%}" if known or not facts.au else "too few steps",
            f"at least {least:.0%}" if least is not None else "not defined",
            "4 / 3.3.2",
            applies=least is not None,
        ),
        check(
            "data of 5 times the hosts' memory",
            None if memory is None else size >= MEMORY_RATIO * memory,
            format_bytes(size),
            "unknown memory" if memory is None else f"{format_bytes(MEMORY_RATIO * memory)}",
            "7 / 3.1",
        ),
        check("steps in an epoch", steps >= RULE_STEPS, f"{steps:,}", "at least 500", "7"),
        check(
            "parameters of the closed division",
            not strange,
            f"changed: {', '.join(strange)}" if strange else "unchanged",
            "only those that the division allows to change",
            "10 / 3.6",
        ),
        check(
            "all epochs run",
            len(facts.au) >= workload.epochs,
            f"{len(facts.au)}",
            f"{workload.epochs}",
            "2.1",
        ),
        check(
            "reads not from the page cache",
            None if facts.cache_share is None else facts.cache_share <= _CACHE_SHARE,
            "unknown" if facts.cache_share is None else f"{facts.cache_share:.0%} from it",
            f"at most {_CACHE_SHARE:.0%} (a limit of dlio's)",
            "6.6 / 3.1",
        ),
        check(
            "stable storage",
            not facts.in_memory,
            "memory" if facts.in_memory else "a file system that is not memory",
            "data on stable storage",
            "6.5 / 2",
        ),
        check(
            "storage as it is",
            not facts.emulated,
            "emulated" if facts.emulated else "not emulated",
            "the system under test",
            "6.1 / 2",
        ),
        check(
            "accelerators on each host",
            None if not hosts else len(hosts) == 1,
            ", ".join(map(str, facts.ranks_by_host)) or "unknown",
            "as many on every host",
            "9 / 3.3.6",
        ),
        check(
            "five runs after a warm-up",
            facts.runs >= _RUNS and facts.warm_up_runs >= 1,
            f"{facts.runs} after {facts.warm_up_runs}",
            "5 after 1",
            "6.6 / 2",
        ),
    ]
    other = facts.results_on_other_file_system
    if version == "v3.0":
        where = {None: "unknown", True: "another file system", False: "the data's file system"}
        checks.append(
            check("results off the storage", other, where[other], "another file system", "3.4.2")
        )
    return checks
