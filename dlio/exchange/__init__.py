"""Exchanges of gradients or weights between ranks, selected by one word.

| module | contents |
|---|---|
| `exchange_base` | the contract, by the places in a training step where an exchange acts |
| `..exchange_spec` | the names that users write: `gossip`, `local-sgd(8)+adaptive` |
| `exchange_context`, `exchange_factory` | the setting of an exchange; its start and calls |
| `distribute` | `dlio.distribute`, on which the trainer, `dlio run` and Lightning are based |
| `synchronous_sgd`, `phases`, `buckets`, `paths`, `sums`, `routes` | averages of gradients |
| `buffer_placement`, `nccl` | where buckets lie, and how they travel |
| `gossip`, `node_gossip`, `join_hooks` | GossipGraD between ranks, and between nodes |
| `asgd`, `local_sgd` | asynchronous weights; local SGD and DiLoCo |
| `compress` | compressors with error feedback |
| `state_cuts` | residuals and momenta of parameters that were cut |
"""

from typing import TYPE_CHECKING

from dlio.util.lazy import lazy_names

if TYPE_CHECKING:
    from dlio.exchange.exchange_base import Exchange
    from dlio.exchange.exchange_context import ExchangeContext
    from dlio.exchange.exchange_factory import ExchangeCalls, make_exchange, start_exchange
    from dlio.exchange.exchange_spec import NAMES, ExchangeSpec, parse_exchange

__all__ = [
    "NAMES",
    "Exchange",
    "ExchangeCalls",
    "ExchangeContext",
    "ExchangeSpec",
    "make_exchange",
    "parse_exchange",
    "start_exchange",
]

# The options of `dlio train` name an exchange: `dlio --help` must not import torch.
__getattr__ = lazy_names(
    {
        "Exchange": "dlio.exchange.exchange_base",
        "ExchangeCalls": "dlio.exchange.exchange_factory",
        "ExchangeContext": "dlio.exchange.exchange_context",
        "ExchangeSpec": "dlio.exchange.exchange_spec",
        "NAMES": "dlio.exchange.exchange_spec",
        "make_exchange": "dlio.exchange.exchange_factory",
        "parse_exchange": "dlio.exchange.exchange_spec",
        "start_exchange": "dlio.exchange.exchange_factory",
    },
)
