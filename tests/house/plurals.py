"""Numbers before nouns in messages: `1 nodes` is not English, and `node(s)` is two texts in one.

    python tests/house/plurals.py

`dlio.util.units.counted` writes them. The nouns are those that messages count; bytes and pixels are
not among them, which formats and limits name in their hundreds. A number that is a constant of at
least two is left alone.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dlio.util.units import counted

ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = ("dlio", "readers", "staging", "bench")
NOUNS: Final = (
    *("batch", "block", "box", "channel", "class", "column", "core", "dimension", "entry", "epoch"),
    *("fault", "file", "folder", "generation", "GPU", "group", "image", "index", "inode"),
    *("keypoint", "label", "layer", "link", "loader", "machine", "mask", "message", "node"),
    *("option", "parameter", "picture", "process", "rank", "reader", "repeat", "replica"),
    *("request", "round", "row", "sample", "seed", "shard", "step", "task", "tensor", "thread"),
    *("tier", "trial", "window", "worker"),
)
_WORDS: Final = "class|damaged|decoded|different|lost|more|optimizer|other"
_PLURALS: Final = "|".join(counted(2, noun).removeprefix("2 ") for noun in NOUNS)
_NOUN: Final = re.compile(rf" (?:(?:{_WORDS}) )?(?:{_PLURALS}|(?:{'|'.join(NOUNS)})\(s\))(?![\w/])")

SEVERAL: Final = {
    *("dlio/cli/doctor/rank_checks.py", "dlio/features/mesh/dtensor_layers.py"),
    *("dlio/features/mesh/layer_parts.py", "dlio/features/mesh/rank_mesh.py"),
    *("dlio/features/mesh/slab.py", "dlio/features/search/searcher.py"),
    *("dlio/integrations/script/check.py", "dlio/plan/rank_shares.py"),
    *("dlio/loader/torchdata_state/parallel_iterator.py", "dlio/testing/wrappers.py"),
    *(
        "bench/dlio_bench/peers/standalone/runners/protocol.py",
        "bench/dlio_bench/chaos/node_storm.py",
    ),
    *("bench/dlio_bench/loader_cases.py", "bench/dlio_bench/prune/samples.py"),
    *("bench/dlio_bench/shuffle_cases.py", "bench/dlio_bench/storage_cases/rank_loaders.py"),
}
"""Modules whose numbers before nouns are two or more, as of ranks that share something; that have a
message of torch's; or that run where dlio is not installed."""


def wrong_plurals(text: str) -> Iterator[int]:
    """Yield the lines of a module at which a number that may be 1 stands before a plural."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            for number, word in zip(node.values, node.values[1:], strict=False):
                if (
                    isinstance(number, ast.FormattedValue)
                    and isinstance(word, ast.Constant)
                    and _NOUN.match(str(word.value))
                    and not ast.unparse(number.value).strip("_").isupper()
                ):
                    yield number.lineno


def in_room() -> Iterator[str]:
    """Yield `file:line` of all such places."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if str(path.relative_to(ROOT)) in SEVERAL:
                continue
            for line in wrong_plurals(path.read_text()):
                yield f"{path.relative_to(ROOT)}:{line}"


if __name__ == "__main__":
    print(*in_room(), sep="\n")
