"""A measurement held against the rules of MLPerf Storage."""

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from dlio_bench.storage_cases.rules import Check, TrainingFacts, check_training
from dlio_bench.storage_cases.storage_job import StorageMeasurements
from dlio_bench.storage_cases.storage_options import StorageCase
from dlio_bench.storage_cases.summary import LoaderEpochFigures


def checks_of(
    case: StorageCase,
    overridden: Sequence[str],
    emulates: bool,
    measured: StorageMeasurements,
    epochs: Sequence[LoaderEpochFigures],
) -> dict[str, list[Check]]:
    """Return the checks of each loader; none if no rules are asked for.

    Args:
        overridden: keys that differ from the workload's file.
        emulates: the storage is made slower on purpose.
    """
    if case.rules == "none":
        return {}
    shares = Counter(measured.nodes.node_of.tolist())
    result = {}
    for loader in dict.fromkeys(each.loader for each in epochs):
        mine = [each for each in epochs if each.loader == loader]
        numbers = sorted({each.epoch for each in mine})
        cached = [each.cache_share for each in mine if each.cache_share is not None]
        facts = TrainingFacts(
            workload=measured.workload,
            ranks=len(measured.runs[0].ranks),
            au=[mean(each.au / 100 for each in mine if each.epoch == k) for k in numbers],
            memory_bytes=measured.memory_bytes,
            overridden=overridden,
            ranks_by_host=[shares[node] for node in sorted(shares)],
            runs=case.repeats,
            cache_share=max(cached) if cached else None,
            in_memory=measured.meter.file_system.in_memory,
            emulated=emulates,
            loader=loader,
        )
        result[loader] = check_training(facts, case.rules)
    return result
