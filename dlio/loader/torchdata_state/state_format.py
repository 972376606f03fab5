"""The states that torchdata's StatefulDataLoader writes: their keys, and who takes part."""

from typing import Any, Final

from dlio.errors import UsageError
from dlio.loader.contract import State, StatefulObject
from dlio.util.printable import log_warning

INDEX_SAMPLER_STATE: Final = "_index_sampler_state"
SAMPLER_ITER_STATE: Final = "_sampler_iter_state"
SAMPLER_YIELDED: Final = "_sampler_iter_yielded"
LEN_CALLED: Final = "_IterableDataset_len_called"
SHARED_SEED: Final = "_shared_seed"
FINISHED: Final = "_iterator_finished"
NUM_YIELDED: Final = "_num_yielded"
NUM_WORKERS: Final = "_num_workers"
SNAPSHOT: Final = "_snapshot"
MAIN_SNAPSHOT: Final = "_main_snapshot"
WORKER_SNAPSHOTS: Final = "_worker_snapshots"
SNAPSHOT_STEP: Final = "_snapshot_step"
STEPS_SINCE: Final = "_steps_since_snapshot"
LAST_WORKER: Final = "_last_yielded_worker_id"
BASE_SEED: Final = "_base_seed"
WORKER_ID: Final = "worker_id"
FETCHER_STATE: Final = "fetcher_state"
FETCHER_ENDED: Final = "fetcher_ended"
DATASET_STATE: Final = "dataset_state"
DATASET_ITER_STATE: Final = "dataset_iter_state"


class MismatchedState(UsageError, AssertionError):
    """A loader state that was saved with another number of workers.

    Also an AssertionError, which torchdata raises for it.
    """


def state_of(thing: object) -> Any:
    """Return the state of a thing that has one; None of others."""
    return thing.state_dict() if isinstance(thing, StatefulObject) else None


def restore(thing: object, state: State | None) -> None:
    """Give a thing that has a state the one that it had."""
    if state is not None and isinstance(thing, StatefulObject):
        thing.load_state_dict(state)


def warn_of_reading_again(batches: int) -> None:
    """Log that a data set without any state is read again to resume it."""
    log_warning(
        "neither the data set nor its iterator has state_dict and load_state_dict: %d batches are "
        "read again and dropped; define them for a resumption without reading",
        batches,
    )


def worker_key(number: int) -> str:
    """Return the name of a worker in a state."""
    return f"worker_{number}"
