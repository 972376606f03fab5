"""Check that files are opened for reading by functions that refuse pipes, devices and the like.

To open a FIFO waits for a writer, /dev/zero has no end, and libraries that take a path open it
themselves. So nothing outside of `dlio.util.input_files` and its like opens a path for reading, but
for files of the kernel's own. `python -m tests.house.reading` prints complaints.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.rooms import print_complaints

ROOMS: Final = ("dlio", "staging/dlio_staging", "bench/dlio_bench")
"""Readers have a room of their own, `dlio.data.source`."""
OWNERS: Final = (
    *("dlio/util/input_files.py", "dlio/util/limits.py", "dlio/util/trusted_files.py"),
    *("dlio/util/whole_files.py", "dlio/util/folders.py", "dlio/util/user_folders.py"),
    *("dlio/util/reaper.py", "dlio/data/source.py", "dlio/data/open_files.py"),
    *("dlio/data/links.py", "dlio/util/link_free.py"),
)
"""The rooms: they open regular files, or those that are private to this user."""
ALLOWED: Final = {
    "dlio/util/machine_memory.py": "the kernel's own files",
    "dlio/launch/torch_launch.py": "the kernel's own files",
    "bench/dlio_bench/results/machine.py": "the kernel's own files",
    "dlio/testing/": "in pytest's folder",
    "dlio/integrations/script/runner.py": "the script to run, which is trusted",
    **{
        f"bench/dlio_bench/{each}": "in a temporary folder that it has made"
        for each in (
            *("chaos/", "emulated/", "exchange_cases/", "peers/standalone/", "readers.py"),
            *("peers/dlio_contenders.py", "peers/row_contenders.py", "loader_cases.py"),
            *("shuffle_rank.py", "staging_bench.py", "storage_cases/metadata.py"),
            *("storage_cases/page_cache.py", "storage_cases/rank_loaders.py"),
        )
    },
    "bench/dlio_bench/results/html/document.py": "a file of the program",
}
"""Modules, and folders of them, that open files that they have made, with the reason."""
_PARSERS: Final = re.compile(
    r"(?:json|tomllib|pickle|toml)\.load|yaml\.(?:safe_|full_|unsafe_)?load(?:_all)?"
)
"""They have no bounds, as those of the room have."""
_LOADERS: Final = re.compile(
    r"(?:np|numpy)\.(?:load|loadtxt|genfromtxt|fromfile|memmap)"
    r"|torch\.load|runpy\.run_path|(?:pd|pandas)\.read_\w+|(?:Image|tarfile|zipfile|gzip)\.open"
)
"""They take a path or a stream."""
_OPENERS: Final = ("open", "io.open", "builtins.open", "codecs.open", "os.open")
_METHODS: Final = ("read_text", "read_bytes")
_MAY_READ: Final = re.compile(
    r"\b(?:\w*open|\w*load\w*|read_\w+|run_path|from(?:file|txt)|memmap)\s*\("
)
_KERNELS: Final = re.compile(r"f?['\"]/(?:proc|sys|dev/null|dev/zero)\b|os\.devnull")
"""Files that nobody can exchange."""
_STREAMS: Final = re.compile(r"(?:open_regular|open_input|os\.fdopen|io\.\w+IO|sys\.stdin)\b")
"""Files that are open."""
_PLACES: Final = ("O_DIRECTORY", "O_PATH", "O_WRONLY", "O_RDWR", "O_CREAT")


def complaints(text: str, path: str) -> list[str]:
    """Return a line for each call that opens a path for reading."""
    if not _MAY_READ.search(text) or any(path.startswith(each) for each in ALLOWED):
        return []
    tree = ast.parse(text)
    constants = {
        ast.unparse(target): ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            constants[ast.unparse(node.optional_vars)] = ast.unparse(node.context_expr)
    return [
        f"{path}:{line}: {call}: use dlio.util.input_files"
        for line, call in sorted(set(_calls(tree, constants)))
    ]


def _calls(tree: ast.Module, constants: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            if not _KERNELS.match(ast.unparse(node.func.value).removeprefix("Path(")):
                yield node.lineno, called
        elif _PARSERS.fullmatch(called):
            yield node.lineno, called
        elif _LOADERS.fullmatch(called) or called in _OPENERS:
            first = ast.unparse(node.args[0]) if node.args else ""
            first = constants.get(first, first)
            opened = _KERNELS.match(first) or _STREAMS.match(first)
            if first and not opened and _reads(called, node, constants):
                yield node.lineno, called


def _reads(called: str, node: ast.Call, constants: dict[str, str]) -> bool:
    """False for a call that opens a folder, or to write: `opening` looks at these."""
    given = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "mode")]
    if not given:
        return True
    text = ast.unparse(given[0])
    text = constants.get(text, text)
    if called == "os.open":
        return not any(place in text for place in _PLACES)
    return not (isinstance(given[0], ast.Constant) and set(str(given[0].value)) & set("wax"))


def main(root: Path) -> int:
    """Print the complaints about all rooms; returns the exit code."""
    return print_complaints(root, ROOMS, OWNERS, complaints)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
