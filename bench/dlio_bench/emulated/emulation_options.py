"""`--emulate` of the benchmarks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

from dlio.comm.comm_protocol import Communicator
from dlio.errors import UsageError
from dlio.util.options import Option, check
from dlio_bench.emulated.emulated_mount import emulated, why_not
from dlio_bench.emulated.profile import Profile, parse_profile


@dataclass(frozen=True, slots=True)
class Emulation:
    """Storage that a benchmark's files are put behind."""

    emulate: Annotated[
        str,
        Option(
            "Storage to emulate with FUSE on this machine: none, lustre-busy, s3, nfs, or parts "
            "joined by +, such as latency(20ms,open=5ms)+bandwidth(150MiB).",
            metavar="PROFILE",
        ),
    ] = "none"

    def __post_init__(self) -> None:
        check(self)
        parse_profile(self.emulate)

    @property
    def profile(self) -> Profile:
        """The parsed profile."""
        return parse_profile(self.emulate)

    @contextmanager
    def mounted(self, path: str, comm: Communicator, *, writable: bool = True) -> Iterator[str]:
        """The path at which all ranks of a machine find a folder behind the storage. Collective.

        Args:
            path: the folder, on rank 0, which mounts the storage for all of them.
        """
        with ExitStack() as stack:
            mounted = ""
            if comm.rank == 0:
                mounted = stack.enter_context(emulated(path, self.profile, writable=writable))
            yield comm.tell(mounted)
            comm.barrier()

    def check_possible(self, nodes: int = 1) -> None:
        """Raise UsageError where this machine cannot emulate storage, or other nodes take part."""
        if not self.profile.emulates:
            return
        if nodes > 1:
            raise UsageError(
                f"--emulate {self.emulate}: storage is emulated for the ranks of one machine, and "
                f"the job has {nodes} nodes: start it on one, or leave the option out to measure "
                "the storage that the nodes share"
            )
        reason = why_not()
        if reason is not None:
            raise UsageError(f"--emulate {self.emulate}: {reason}")
