"""`dlio stage`: fill the node-local disk tiers ahead of a job."""

import time
from dataclasses import dataclass
from typing import Annotated

import typer

from dlio.errors import TierError, UsageError
from dlio.units import format_bytes

_NEWS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Staged:
    """What staging did, over all ranks."""

    samples: int
    data_bytes: int
    """Payload bytes of the data set."""
    read_bytes: int
    """Payload bytes read from the source just now."""
    kept_share: float
    """Share of the blocks that the tiers hold."""
    nodes: int
    seconds: float


def stage(path: str, tiers: str | None = None, *, pretend_nodes: int | None = None) -> Staged:
    """Fill the disk tiers of the nodes that this process's ranks run on. Collective.

    A later job on the same nodes, with the same tiers, starts with the blocks in place.

    Raises UsageError without a disk tier, and TierError when blocks could not be brought: what
    was brought stays.
    """
    from dlio.comm import world
    from dlio.mount import mount
    from dlio.reader import open_reader
    from dlio.storage.fill import Filler
    from dlio.storage.spec import choose_tiers

    reader = open_reader(path)
    specs = choose_tiers(tiers, int(reader.sizes.sum()))
    disks = [spec for spec in specs if spec.kind == "disk"]
    if not disks:
        raise UsageError(
            "nothing to stage into: name a disk tier, as in --tiers /local/scratch:20GiB (a RAM "
            "tier lives no longer than its job, which fills it by itself)"
        )
    comm = world()
    started = time.perf_counter()
    with mount(reader, disks, comm, pretend_nodes) as mounted:
        hierarchy = mounted.hierarchy
        pinned = (hierarchy.pins.tier >= 0).nonzero()[0].tolist()
        with Filler(hierarchy, lambda: iter(pinned)) as filler:
            while not filler.join(_NEWS_EVERY_S):
                if comm.rank == 0:
                    here = hierarchy.missing()
                    typer.echo(f"{len(pinned) - here} of {len(pinned)} blocks are here", err=True)
        missing = hierarchy.missing()
        if missing:
            reasons = "; ".join(hierarchy.notes()[:3])
            raise TierError(f"{missing} of {len(pinned)} blocks could not be staged: {reasons}")
        read = comm.allgather(hierarchy.counters.bytes["source"])
        kept = float((mounted.placement.home >= 0).mean())
        nodes = len(mounted.nodes.names)
    reader.close()
    return Staged(
        samples=len(reader),
        data_bytes=int(reader.sizes.sum()),
        read_bytes=sum(read),
        kept_share=kept,
        nodes=nodes,
        seconds=time.perf_counter() - started,
    )


def command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The data set to stage.")],
    tiers: Annotated[
        str | None,
        typer.Option(help="Where to, fastest first: /local/scratch:20GiB. Or DLIO_TIERS."),
    ] = None,
    pretend_nodes: Annotated[
        int | None, typer.Option(help="Behave as if the ranks were on that many nodes.")
    ] = None,
) -> None:
    """Fill this node's disk tiers with a data set, ahead of a job. Run again, it goes on."""
    from dlio.comm import world

    done = stage(source, tiers, pretend_nodes=pretend_nodes)
    if world().rank == 0:
        rate = done.read_bytes / max(done.seconds, 1e-9)
        typer.echo(
            f"{source}: {done.samples} samples, {format_bytes(done.data_bytes)}; "
            f"{done.kept_share:.0%} of the blocks are in tiers on {done.nodes} node(s); "
            f"{format_bytes(done.read_bytes)} read in {done.seconds:.1f} s "
            f"({format_bytes(rate)}/s)"
        )
