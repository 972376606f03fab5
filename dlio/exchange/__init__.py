"""Exchanges of gradients or weights between ranks, selected by one word.

| module | contents |
|---|---|
| `exchange_base` | the contract: the calls of a training step |
| `exchange_spec` | the names that users write: `gossip`, `local-sgd(8)+adaptive` |
| `distribute` | `dlio.distribute`, on which the trainer, `dlio run` and Lightning are based |
| `exchange_context`, `exchange_factory` | the circumstances of an exchange; how it is started |
| `synchronous_sgd` | averages of gradients during backward |
| `gossip`, `node_gossip`, `pair_buffer` | GossipGraD and NoLoCo between ranks, and between nodes |
| `asgd`, `local_sgd` | asynchronous weights; local SGD and DiLoCo |
| `buckets`, `buffer_placement` | flat buffers; where they lie, how they are summed |
| `sums`, `routes`, `quantised_allreduce`, `nccl` | the sum of a buffer over all ranks |
| `compress`, `traffic` | compressors of messages; the counts of messages |
| `step_values`, `step_watch` | numbers that travel with gradients; ranks that part are told |
| `round_commit`, `peer_steps` | agreement of the survivors after a loss |
| `rank_group` | tensors between ranks within the passes of a model |
| `cut` | cuts of parameters, and of the residuals and momenta that belong to them |
| `script_takeover` | agreement between `dlio run` and a script that distributes itself |
"""

from typing import TYPE_CHECKING

from dlio.util.lazy import lazy_names

if TYPE_CHECKING:
    from dlio.exchange.exchange_base import Exchange
    from dlio.exchange.exchange_context import ExchangeContext
    from dlio.exchange.exchange_factory import make_exchange, start_exchange
    from dlio.exchange.exchange_spec import NAMES, ExchangeSpec, parse_exchange

__all__ = [
    "NAMES",
    "Exchange",
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
        "ExchangeContext": "dlio.exchange.exchange_context",
        "ExchangeSpec": "dlio.exchange.exchange_spec",
        "NAMES": "dlio.exchange.exchange_spec",
        "make_exchange": "dlio.exchange.exchange_factory",
        "parse_exchange": "dlio.exchange.exchange_spec",
        "start_exchange": "dlio.exchange.exchange_factory",
    },
)
