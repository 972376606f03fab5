"""Conformance suites for plug-ins: subclass one, give a factory, inherit its tests.

    import dlio.testing

    class TestMyReader(dlio.testing.ReaderTests):
        def make(self, folder):
            ...  # write a small data set into `folder`
            return MyReader(...)

        def expected(self):
            return [{"image": b"...", "label": 3}, ...]

| suite                | checks                                    | module         |
|----------------------|-------------------------------------------|----------------|
| `ReaderTests`        | `dlio.data.reader_contract.Reader`        | `reader_suite` |
| `TierTests`          | `dlio.storage.tier.Tier`                  | `tier_suite`   |
| `CommunicatorTests`  | `dlio.comm.Communicator`                  | `communicator` |
| `ExchangeTests`      | `dlio.exchange.exchange_base.Exchange`    | `exchange_suite` |
| `CompressorTests`    | `dlio.exchange.compress.Compressor`       | `compressor`   |
| `LoaderStateTests`   | `state_dict` of a loader                  | `loader_state` |

Each test method is named for the promise that it checks. Communicators and exchanges need ranks:
`mpirun -n 3 python -m dlio.testing.communicator` checks the MPI library of this machine, and
`run_ranks` runs a check on ranks that are threads of one process. `SlowReader`, `FailingReader`,
`SlowTier` and `FailingTier` stand between code under test and storage.

This package needs pytest and hypothesis: `pip install pytest hypothesis`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dlio.util.extras import how_to_install

try:
    import hypothesis  # noqa: F401 - missing packages are reported here, once
    import pytest
except ImportError as error:
    raise ImportError(
        f"dlio.testing needs pytest and hypothesis ({error}): {how_to_install('testing')}"
    ) from error

if TYPE_CHECKING:
    from dlio.testing.communicator import CommunicatorTests
    from dlio.testing.compressor import CompressorTests
    from dlio.testing.exchange_suite import ExchangeTests
    from dlio.testing.loader_state import LoaderStateTests
    from dlio.testing.memory_reader import MemoryReader
    from dlio.testing.promises import promises_of
    from dlio.testing.reader_suite import ReaderTests
    from dlio.testing.thread_ranks import ThreadCommunicator, run_ranks
    from dlio.testing.tier_suite import TierTests
    from dlio.testing.wrappers import FailingReader, FailingTier, SlowReader, SlowTier

__all__ = [
    "CommunicatorTests",
    "CompressorTests",
    "ExchangeTests",
    "FailingReader",
    "FailingTier",
    "LoaderStateTests",
    "MemoryReader",
    "ReaderTests",
    "SlowReader",
    "SlowTier",
    "ThreadCommunicator",
    "TierTests",
    "promises_of",
    "run_ranks",
]

_WHERE = {
    "CommunicatorTests": "communicator",
    "CompressorTests": "compressor",
    "ExchangeTests": "exchange_suite",
    "FailingReader": "wrappers",
    "FailingTier": "wrappers",
    "LoaderStateTests": "loader_state",
    "MemoryReader": "memory_reader",
    "ReaderTests": "reader_suite",
    "SlowReader": "wrappers",
    "SlowTier": "wrappers",
    "ThreadCommunicator": "thread_ranks",
    "TierTests": "tier_suite",
    "promises_of": "promises",
    "run_ranks": "thread_ranks",
}

# A failed assert of an inherited test shows its values, as one of the plug-in's own tests does.
_SUITES = "communicator compressor exchange_suite loader_state reader_suite tier_suite"
pytest.register_assert_rewrite(*(f"dlio.testing.{suite}" for suite in _SUITES.split()))


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'dlio.testing' has no attribute {name!r}")
    return getattr(import_module(f"dlio.testing.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
