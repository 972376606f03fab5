"""Optional abilities of readers, which most readers lack."""

from typing import Any

from dlio.comm import Communicator
from dlio.data.flow import Flow
from dlio.data.reader import Reader


def estimates_sizes(reader: Reader) -> bool:
    """True if the reader's `sizes` are estimates, the same on all ranks: a sample's true size is
    known when it has been read. Readers say so by an attribute `sizes_are_estimates`."""
    return bool(getattr(reader, "sizes_are_estimates", False))


def flow_of(reader: Reader) -> Flow | None:
    """Return the limit of requests in flight of a reader whose samples are requests of their own,
    each with a latency; None for other readers. It is the reader's attribute `flow`."""
    flow: Flow | None = getattr(reader, "flow", None)
    return flow


def reads_together(reader: Reader) -> bool:
    """True if several samples take one request, of a reader with `flow`; attribute `together`."""
    return bool(getattr(reader, "together", False))


def reads_alone(reader: Reader) -> bool:
    """True if a sample can be read for its own bytes, without its neighbours: a file, or a record
    in a container. Readers of containers say so by an attribute `alone`."""
    return reader.objects or bool(getattr(reader, "alone", False))


def joins_neighbours(reader: Reader) -> bool:
    """True if samples that follow one another take one request: records in a container."""
    return reads_alone(reader) and not reader.objects


def agree(reader: Reader, comm: Communicator) -> None:
    """Have one rank inspect a data set for all, where the reader can do so (`agree`). Collective.

    Raises the same error on all ranks as the inspection does.
    """
    method: Any = getattr(reader, "agree", None)
    if method is not None and comm.size > 1:
        method(comm)
