"""The benchmark suite, `dlio bench`: each figure is measured next to its reference, in one run."""

from typing import Final

from dlio.cli.app import Group

command: Final = Group(
    "Measure dlio and its references side by side in one run, with medians and spread.",
    {
        "agreement": "dlio_bench.storage.side_by_side:command",
        "chaos": "dlio_bench.chaos.command:command",
        "checkpoint": "dlio_bench.checkpoint.command:command",
        "compare": "dlio_bench.results.compare:command",
        "exchange": "dlio_bench.exchange.command:command",
        "gpu": "dlio_bench.gpu.command:command",
        "html": "dlio_bench.results.page.command:command",
        "loader": "dlio_bench.loader:command",
        "peers": "dlio_bench.peers.command:command",
        "prune": "dlio_bench.prune.command:command",
        "readers": "dlio_bench.readers:command",
        "search": "dlio_bench.searching:command",
        "shuffle": "dlio_bench.shuffle:command",
        "staging": "dlio_bench.staging:command",
        "storage": "dlio_bench.storage.command:command",
        "tiers": "dlio_bench.tiers:command",
        "train": "dlio_bench.training.command:command",
        "watch": "dlio_bench.watch.command:command",
    },
)
"""`dlio bench`, and where its commands are."""
