"""All names of torch that are not public and that the loader uses.

`dlio.DataLoader` promises to be torch's: the same error texts, seeds and `get_worker_info()`, and
states that torchdata's StatefulDataLoader can load. torch offers no public way to that. Other
modules of the loader import private names from here, and nowhere else, so that a new version of
torch is checked against one page.

Looked at: torch 2.13, which the tests run with; 2.9 is the oldest that dlio allows. Where these
differ, a comment says so.

| name here | torch's | needed since |
|---|---|---|
| `ExceptionWrapper` | `torch._utils.ExceptionWrapper` | errors of threads have the type and text that those of worker processes have |
| `worker_module` | `torch.utils.data._utils.worker` | `get_worker_info()` is made true in threads: its body is replaced (`worker_info`); `_worker_info`, `WorkerInfo` and, from 2.13 on, `_RNG` |
| `pin_memory` | `torch.utils.data._utils.pin_memory.pin_memory` | batches of any structure are pinned as torch pins them |
| `collate_fn_map` | `torch.utils.data._utils.collate.default_collate_fn_map` | labels of pictures are registered with torch's `default_collate` |
| `BaseDataLoaderIter` | `torch.utils.data.dataloader._BaseDataLoaderIter` | the pass without workers has a state; also `_reset` of persistent workers, and `DataLoader._get_iterator` |
| `MultiProcessingDataLoaderIter` | `..._MultiProcessingDataLoaderIter` | worker processes get tasks and answer with states: `_try_put_index`, `_process_data`, `_reset`, `_next_data` and `_base_seed` are overridden |
| `DatasetKind` | `..._DatasetKind` | its fetchers, for states of iterables |
| `InfiniteConstantSampler` | `..._InfiniteConstantSampler` | an iterable's sampler has no state to skip to |
| `sharding_worker_init` | `..._sharding_worker_init_fn` | data pipes are sharded among workers |
| `distributed_settings`, `share_seed` | `..._get_distributed_settings`, `..._share_dist_seed` | data pipes are sharded, and shuffled alike, on all ranks |
| `tree_leaves`, `tree_map` | `torch.utils._pytree` | batches are walked by the structures that torch knows |

Attributes of `DataLoader` that are set or read under their private names: `_iterator` (persistent
workers) and `_IterableDataset_len_called` (a warning of torch's).
"""

from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data._utils import worker as worker_module
from torch.utils.data._utils.collate import default_collate_fn_map as collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
from torch.utils.data.dataloader import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _get_distributed_settings, _share_dist_seed
from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
)
from torch.utils.data.dataloader import _sharding_worker_init_fn as sharding_worker_init

__all__ = [
    "BaseDataLoaderIter",
    "DatasetKind",
    "ExceptionWrapper",
    "InfiniteConstantSampler",
    "MultiProcessingDataLoaderIter",
    "collate_fn_map",
    "distributed_settings",
    "pin_memory",
    "sharding_worker_init",
    "share_seed",
    "tree_leaves",
    "tree_map",
    "worker_module",
]

# torch gives these no types.
pin_memory: Any = _pin_memory
distributed_settings: Any = _get_distributed_settings
share_seed: Any = _share_dist_seed
