"""A mounted data set as `dlio top` shows it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.comm import Communicator
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.tier_spec import TierSpec
from dlio.util.live_figures import PublishedFigures, publish


class MountFigures:
    """Figures of one rank's mount, published until `close`.

    Args:
        specs: the tiers, in the order of those of the hierarchy.
        block_bytes: file bytes of each block in a tier; shape (blocks,).
    """

    def __init__(
        self,
        comm: Communicator,
        hierarchy: Hierarchy,
        specs: Sequence[TierSpec],
        block_bytes: npt.NDArray[np.int64],
    ) -> None:
        self._comm, self._hierarchy = comm, hierarchy
        self._specs, self._block_bytes = specs, block_bytes
        self._published: PublishedFigures | None = publish("data", self.now)

    def now(self) -> dict[str, object]:
        """Return the figures of this moment: `tiers` of the node; bytes and counts of the rank."""
        counters = self._hierarchy.counters
        return {
            "path": self._hierarchy.reader.path,
            "rank": self._comm.rank,
            "ranks": self._comm.size,
            "tiers": [
                {
                    "kind": spec.kind,
                    "root": spec.root,
                    "capacity": spec.capacity,
                    "used": int(self._block_bytes[list(tier.blocks())].sum()),
                    "wanted": int(self._block_bytes[self._hierarchy.pins.tier == number].sum()),
                }
                for number, (spec, tier) in enumerate(
                    zip(self._specs, self._hierarchy.tiers, strict=False)
                )
            ],
            "bytes": dict(counters.bytes),
            "samples": counters.samples,
            "waited_s": counters.waited_s,
        }

    def close(self) -> None:
        """Publish them no longer."""
        published, self._published = self._published, None
        if published is not None:
            published.close()
