"""All names of torch that are not public and that the loader uses.

`dlio.DataLoader` promises to be torch's: the same error texts, seeds and `get_worker_info()`, and
states that torchdata's StatefulDataLoader can load. torch offers no public way to that. Other
modules of the loader import private names from here, and nowhere else, so that a new version of
torch is checked against one page.

Looked at: torch 2.13, which the tests run with; 2.9 is the oldest that dlio allows. Where these
differ, a comment says so.

`ExceptionWrapper`: errors of threads have the type and text that those of worker processes have.

`worker_module`: `get_worker_info()` is made true in threads by replacing its body
(`dataset_threads`); its `WorkerInfo`, `_worker_info` and, from 2.13 on, `_RNG` are used.

`pin_memory`: pins batches of any structure, as torch's loader does.

`collate_fn_map`: pictures' targets are registered with torch's `default_collate`.

`BaseDataLoaderIter`: base of the pass without workers that has a state. Persistent workers are used
again by its `_reset`; `DataLoader._get_iterator` makes one.

`MultiProcessingDataLoaderIter`: worker processes get tasks and answer with states: `_reset`,
`_next_data`, `_try_put_index`, `_process_data` and `_base_seed` are overridden.

`DatasetKind`: makes torch's fetchers, whose iterators have states.

`InfiniteConstantSampler`: torch's sampler of iterable data sets, which has no state to skip to.

`sharding_worker_init`, `distributed_settings`, `share_seed`: data pipes are sharded among workers
and ranks, and shuffled alike on all of them.

`profiler_enabled`: ranges of a profiler are opened while one runs, as each costs as much as a third
of a small batch.

`tree_leaves`, `tree_map`: walk batches of the structures that torch knows.

Attributes of `DataLoader` that are set or read under their private names: `_iterator` (persistent
workers) and `_IterableDataset_len_called` (a warning of torch's).
"""

from typing import Any

from torch import _utils as _torch_utils
from torch._C import _autograd
from torch.utils import _pytree
from torch.utils.data import dataloader as _dataloader
from torch.utils.data._utils import collate as _collate
from torch.utils.data._utils import pin_memory as _pin_memory
from torch.utils.data._utils import worker as _worker

BaseDataLoaderIter = _dataloader._BaseDataLoaderIter
DatasetKind = _dataloader._DatasetKind
ExceptionWrapper = _torch_utils.ExceptionWrapper
InfiniteConstantSampler = _dataloader._InfiniteConstantSampler
MultiProcessingDataLoaderIter = _dataloader._MultiProcessingDataLoaderIter
profiler_enabled = _autograd._profiler_enabled
collate_fn_map = _collate.default_collate_fn_map
sharding_worker_init = _dataloader._sharding_worker_init_fn
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
worker_module = _worker

# torch gives these no types.
distributed_settings: Any = _dataloader._get_distributed_settings
pin_memory: Any = _pin_memory.pin_memory
share_seed: Any = _dataloader._share_dist_seed
