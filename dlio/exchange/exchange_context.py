"""The circumstances that an exchange is created for."""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.comm.survival.recovery import Recovery
from dlio.exchange.compress.message_layout import ChunkScratch
from dlio.exchange.exchange_spec import ExchangeSpec
from dlio.exchange.step_values import StepValues


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeContext:
    """The circumstances of one exchange."""

    spec: ExchangeSpec
    comm: Communicator
    """Ranks that exchange; the exchange uses it alone and closes it."""
    node_of: npt.NDArray[np.int32]
    """Node number of each rank; shape (ranks,)."""
    seed: int = 0
    """Seeds the choice of partners."""
    scratch: ChunkScratch = field(default_factory=ChunkScratch)
    """Working memory that all buckets of the exchange share."""
    recovery: Recovery | None = None
    """Called when a rank is lost; None if the job ends then."""
    members: tuple[int, ...] = ()
    """Number of each rank of `node_of` when the job began, if ranks may be lost."""
    takes_assigned: bool = False
    """Gradients that were not made by a backward of the parameters are averaged, too."""
    values: StepValues | None = None
    """Numbers that travel with sums of gradients."""
    group: int = 0
    """Number of the part of all ranks that exchange: a rank takes part in one."""
    is_part: bool = False
    """True if others than these ranks exchange, too, by another exchange around this one."""

    def nodes(self) -> npt.NDArray[np.int32]:
        """Return the node number of each survivor."""
        if self.recovery is None:
            return self.node_of
        survivors: npt.NDArray[np.int32] = self.node_of[
            np.isin(self.members, self.recovery.membership.members)
        ]
        return survivors

    def over(self, spec: ExchangeSpec, comm: Communicator, group: int) -> "ExchangeContext":
        """The context of a part of this exchange, whose ranks are all on one node."""
        node_of = np.zeros(comm.size, np.int32)
        return replace(
            self, spec=spec, comm=comm, node_of=node_of, values=None, group=group, is_part=True
        )
