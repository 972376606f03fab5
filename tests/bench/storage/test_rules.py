"""MLPerf Storage's rules are held against the facts of a run, one by one."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dlio_bench.storage_cases.dlio_keys import read_job
from dlio_bench.storage_cases.rules import TrainingFacts, check_training
from dlio_bench.storage_cases.storage_command import rules_table

GIB = 1 << 30
WORKLOAD = read_job("unet3d_h100", ["dataset.num_files_train=7000"]).workload
GOOD = TrainingFacts(
    workload=WORKLOAD,
    ranks=2,
    au=(0.95, 0.94, 0.96, 0.95, 0.95),
    memory_bytes=128 * GIB,
    overridden=("dataset.num_files_train",),
    ranks_by_host=(1, 1),
    runs=5,
    warm_up_runs=1,
    cache_share=0.01,
    results_on_other_file_system=True,
)


def outcomes(facts: TrainingFacts, version: str = "v2.0") -> dict[str, str]:
    return {each.rule: each.outcome for each in check_training(facts, version)}


def test_a_run_by_the_rules_passes_all() -> None:
    assert set(outcomes(GOOD).values()) == {"passed"}


@pytest.mark.parametrize(
    ("facts", "rule", "outcome"),
    [
        (replace(GOOD, au=(0.9, 0.89, 0.9, 0.9, 0.9)), "accelerator utilisation", "failed"),
        (replace(GOOD, au=(0.91, 0.89, 0.9, 0.9, 0.9)), "accelerator utilisation", "passed"),
        (replace(GOOD, memory_bytes=256 * GIB), "data of 5 times", "failed"),
        (replace(GOOD, memory_bytes=None), "data of 5 times", "unknown"),
        (replace(GOOD, ranks=3), "steps in an epoch", "failed"),
        (replace(GOOD, overridden=("reader.batch_size",)), "parameters of the closed", "failed"),
        (replace(GOOD, overridden=("dataset.format",)), "parameters of the closed", "failed"),
        (replace(GOOD, au=GOOD.au[:4]), "all epochs run", "failed"),
        (replace(GOOD, cache_share=0.5), "reads not from the page cache", "failed"),
        (replace(GOOD, cache_share=None), "reads not from the page cache", "unknown"),
        (replace(GOOD, in_memory=True), "stable storage", "failed"),
        (replace(GOOD, emulated=True), "storage as it is", "failed"),
        (replace(GOOD, ranks_by_host=(2, 1)), "accelerators on each host", "failed"),
        (replace(GOOD, runs=4), "five runs", "failed"),
        (replace(GOOD, warm_up_runs=0), "five runs", "failed"),
        (
            replace(GOOD, workload=replace(WORKLOAD, name="mine")),
            "accelerator utilisation",
            "not applicable",
        ),
        (replace(GOOD, workload=replace(WORKLOAD, name="mine")), "workload of this", "failed"),
    ],
)
def test_each_rule_can_fail_alone(facts: TrainingFacts, rule: str, outcome: str) -> None:
    by_rule = outcomes(facts)
    assert [each for name, each in by_rule.items() if name.startswith(rule)] == [outcome]


def test_versions_differ() -> None:
    assert outcomes(GOOD, "v3.0")["accelerator of this version"] == "failed"
    b200 = replace(GOOD, workload=replace(WORKLOAD, name="unet3d_b200"))
    assert set(outcomes(b200, "v3.0").values()) == {"passed"}
    same = replace(b200, results_on_other_file_system=False)
    assert outcomes(same, "v3.0")["results off the storage"] == "failed"


def test_the_output_never_calls_itself_a_result_of_mlperf() -> None:
    checks = check_training(GOOD)
    console = Console(file=io.StringIO(), width=140)
    failing = check_training(replace(GOOD, au=(0.5,) * 5))
    console.print(rules_table({"torch": failing, "dlio[fast]": checks}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "dlio[fast]" in text
    (row,) = (line for line in text.splitlines() if "50.0%" in line)
    assert "failed: 50.0%" in row
    assert "passed: 95.0%" in row
    assert "Not an MLPerf result" in text
