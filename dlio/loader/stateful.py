"""torchdata's StatefulDataLoader: only the import changes."""

from typing_extensions import TypeVar

from dlio.loader.contract import Sample
from dlio.loader.dataloader import DataLoader

_T_co = TypeVar("_T_co", covariant=True, default=Sample)


class StatefulDataLoader(DataLoader[_T_co]):
    """`dlio.DataLoader` with the states of torchdata's StatefulDataLoader, in its format.

    A state holds those of the data set, its iterator, the sampler and each worker, if they have
    `state_dict` and `load_state_dict`. States that torchdata's class has saved can be loaded, and
    the other way round. Data sets that dlio reads itself, and loaders with `seed=`, keep dlio's own
    state, which is valid for any number of ranks and workers.

    Args:
        snapshot_every_n_steps: batches from one collection of the workers' states to the next; a
            resumed pass reads again what came after the last one. 1 by default, 0 for never.
    """

    _snapshot_every = 1
