"""All checks, on every node of a job."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypedDict

from dlio.cli.doctor.findings import Finding, State, worst
from dlio.cli.doctor.limit_checks import check_limits, check_memory, check_shared_memory
from dlio.cli.doctor.path_checks import check_source, check_tier
from dlio.cli.doctor.probe import probe_mpi, this_process
from dlio.cli.doctor.rank_checks import (
    RankHardware,
    allocation,
    check_clocks,
    check_ranks,
    clock_offsets,
    rank_facts,
)
from dlio.cli.doctor.software import (
    check_launchers,
    check_mpi,
    check_python,
    check_torch,
    check_variables,
    version_of,
)
from dlio.comm import Communicator
from dlio.comm.launch_environment import under_mpi
from dlio.errors import DlioError
from dlio.storage.tier_spec import choose_tiers
from dlio.util.arguments import one_of
from dlio.util.options import Option, check
from dlio.util.settings import settings


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The things to check."""

    source: Annotated[
        str | None,
        Option(
            "Data set to look at, too: where it lies, and how long a request takes.",
            positional=True,
            metavar="SRC",
        ),
    ] = None
    tiers: Annotated[
        str | None,
        Option(
            "Tiers of each node, fastest first, such as ram:2GiB,/local/scratch:20GiB, or none.",
            metavar="TIERS",
            default_text="DLIO_TIERS, or RAM",
        ),
    ] = None
    device: Annotated[
        str,
        Option("Device that is to train: auto, cpu, cuda or cuda:N.", metavar="DEVICE"),
    ] = "auto"
    quick: Annotated[bool, Option("Do not measure the speed of tiers.")] = False

    def __post_init__(self) -> None:
        check(self)
        one_of("--device", self.device.partition(":")[0], ("auto", "cpu", "cuda"))


class Examination(TypedDict):
    """The result, as `dlio doctor --json` prints it."""

    worst: State
    """The worst state of all findings."""
    ranks: int
    nodes: list[str]
    findings: list[dict[str, Any]]
    """Findings of all nodes, equal ones once; `where` names the nodes, empty for all."""


def examine(
    options: DoctorOptions,
    comm: Communicator,
    lost: Sequence[Finding] = (),
    mpirun: str | None = None,
) -> Examination:
    """Check the nodes of all ranks. Collective; the result is the same on all ranks.

    Cores and GPUs of `lost` ranks, which do not find each other, are left out. `mpirun` is the path
    of the launcher that `-n` uses, None if there is none.
    """
    node = settings().node or socket.gethostname()
    everyone = comm.allgather(node)
    facts = [
        RankHardware(**{**each, "cores": tuple(each["cores"])})
        for each in comm.allgather(asdict(rank_facts(comm.rank, node, options.device)))
    ]
    offsets, uncertain = clock_offsets(comm)
    own: list[Finding] = []
    if everyone.index(node) == comm.rank:  # The first rank of each node looks at it.
        own = list(_of_node(options, comm, everyone.count(node), mpirun))
    by_rank = comm.allgather([asdict(each) for each in own])
    by_node = {
        everyone[rank]: [Finding(**{**each, "where": ()}) for each in listed]
        for rank, listed in enumerate(by_rank)
        if listed
    }
    together = [*allocation(os.environ), *(lost or check_ranks(facts))]
    if comm.size > 1:
        together.append(check_clocks(offsets, uncertain, everyone))
    findings = [*merged(by_node), *together]
    return {
        "worst": worst(findings),
        "ranks": comm.size,
        "nodes": list(dict.fromkeys(everyone)),
        "findings": [asdict(each) for each in findings],
    }


def _of_node(
    options: DoctorOptions, comm: Communicator, ranks: int, mpirun: str | None
) -> Iterator[Finding]:
    yield from check_python()
    yield from check_torch(options.device)
    # The one that a user types, which need not be the one that -n finds.
    mpirun = shutil.which("mpirun") or mpirun
    facts = this_process() if comm.size > 1 and under_mpi() else probe_mpi()
    yield from check_mpi(facts, mpirun, "" if mpirun is None else version_of(mpirun))
    yield from check_launchers()
    yield from check_variables(os.environ)
    yield from check_limits()
    yield from check_memory()
    try:
        tiers = choose_tiers(options.tiers, 0)
    except DlioError as problem:
        remedy = "see `dlio train --help`"
        yield Finding("tiers", str(options.tiers), str(problem), "error", remedy)
        tiers = []
    in_memory = sum(spec.capacity for spec in tiers if spec.kind == "ram")
    yield from check_shared_memory(in_memory, ranks)
    for spec in tiers:
        yield from check_tier(spec, measure=not options.quick)
    if options.source is not None:
        yield from check_source(options.source)


def merged(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """Return the findings of all nodes, in order, those of one kind once.

    Facts without a fault are shown for the first node, with a word on others whose figures differ.
    """
    kinds: dict[tuple[str, ...], list[tuple[str, Finding]]] = {}
    for node, findings in by_node.items():
        for each in findings:
            key = (each.topic, each.subject, each.state, each.remedy)
            kinds.setdefault(key, []).append((node, each))
    result = []
    for listed in kinds.values():
        (_, first), nodes = listed[0], tuple(node for node, _ in listed)
        texts = {each.text for _, each in listed}
        text = first.text if len(texts) == 1 else f"{first.text} (similar on the others)"
        where = () if len(nodes) == len(by_node) else nodes
        result.append(Finding(first.topic, first.subject, text, first.state, first.remedy, where))
    order = ("software", "limits", "tiers", "source")
    return sorted(result, key=lambda each: order.index(each.topic))
