"""The benchmark suite, `dlio bench`: each figure is measured next to its reference, in one run."""

from typing import Final

from dlio.cli.app import CommandGroup

command: Final = CommandGroup(
    "Measure dlio and its references side by side, with their spread.",
    {
        "agreement": "dlio_bench.storage_cases.side_by_side:command",
        "chaos": "dlio_bench.chaos.chaos_command:command",
        "checkpoint": "dlio_bench.checkpoint_cases.checkpoint_command:command",
        "compare": "dlio_bench.results.compare:command",
        "exchange": "dlio_bench.exchange_cases.exchange_command:command",
        "gpu": "dlio_bench.gpu.gpu_command:command",
        "html": "dlio_bench.results.html.document:command",
        "index": "dlio_bench.index_bench:command",
        "loader": "dlio_bench.loader_bench:command",
        "peers": "dlio_bench.peers.environments:command",
        "prune": "dlio_bench.prune.prune_command:command",
        "readers": "dlio_bench.readers:command",
        "search": "dlio_bench.search_bench:command",
        "shuffle": "dlio_bench.shuffle_bench:command",
        "staging": "dlio_bench.staging_bench:command",
        "storage": "dlio_bench.storage_cases.storage_command:command",
        "tiers": "dlio_bench.tier_bench:command",
        "train": "dlio_bench.training.training_command:command",
        "watch": "dlio_bench.watch.watch_command:command",
    },
)
"""`dlio bench`, and where its commands are."""
