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

from typing import TYPE_CHECKING

from dlio.util.extras import how_to_install
from dlio.util.lazy import lazy_names

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

__getattr__ = lazy_names(
    {
        "CommunicatorTests": "dlio.testing.communicator",
        "CompressorTests": "dlio.testing.compressor",
        "ExchangeTests": "dlio.testing.exchange_suite",
        "FailingReader": "dlio.testing.wrappers",
        "FailingTier": "dlio.testing.wrappers",
        "LoaderStateTests": "dlio.testing.loader_state",
        "MemoryReader": "dlio.testing.memory_reader",
        "ReaderTests": "dlio.testing.reader_suite",
        "SlowReader": "dlio.testing.wrappers",
        "SlowTier": "dlio.testing.wrappers",
        "ThreadCommunicator": "dlio.testing.thread_ranks",
        "TierTests": "dlio.testing.tier_suite",
        "promises_of": "dlio.testing.promises",
        "run_ranks": "dlio.testing.thread_ranks",
    }
)

# A failed assert of an inherited test shows its values, as one of the plug-in's own tests does.
_SUITES = "communicator compressor exchange_suite loader_state reader_suite tier_suite"
pytest.register_assert_rewrite(*(f"dlio.testing.{suite}" for suite in _SUITES.split()))


def __dir__() -> list[str]:
    return sorted(__all__)
