"""Check that nothing is written, renamed or deleted but by the room that verifies folders.

`python -m tests.house.opening` prints complaints; other programs are checked by `complaints`.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.rooms import print_complaints

ROOMS: Final = ("dlio", "readers/dlio_readers", "staging/dlio_staging")
"""Benchmarks write in temporary folders that they have made, and are not checked."""
OWNERS: Final = (
    "dlio/util/whole_files.py",
    "dlio/util/folders.py",
    "dlio/util/user_folders.py",
    "dlio/util/trusted_files.py",
    "dlio/util/shared_folders.py",
)
"""The room."""
ALLOWED: Final = {
    (
        "dlio/testing/tier_suite.py",
        "write_bytes",
    ): "damages the tier under test, in pytest's folder",
    ("dlio/testing/tier_suite.py", "rename"): "the same",
    ("dlio/util/link_free.py", "open"): "opens for reading, with flags of its own",
    ("dlio/data/links.py", "open"): "the same",
    ("dlio/testing/reader_suite.py", "write_bytes"): "makes data for the test, in pytest's folder",
    **{
        (f"dlio/integrations/script/{module}.py", call): "does as the script asked, in its name"
        for module, calls in (
            ("file_calls", ("copy2", "unlink")),
            (
                "file_view",
                (
                    *("chmod", "copy2", "copyfile", "link", "makedirs", "mkdir"),
                    *("move", "open", "rename", "rmtree", "symlink", "unlink"),
                ),
            ),
            ("private_files", ("makedirs", "rmtree")),
        )
        for call in calls
    },
    **{
        ("dlio/integrations/script/scratch_folder.py", call): "in a private temporary folder, or "
        "a file that the script has made"
        for call in (
            *("copy2", "mkdir", "open", "remove", "rename", "replace", "rmdir"),
            *("symlink", "unlink"),
        )
    },
}
_OS: Final = {
    *("chmod", "chown", "lchown", "link", "makedirs", "mkdir", "mkfifo", "mknod", "remove"),
    *("removedirs", "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink"),
}
_SHUTIL: Final = {
    *("chown", "copy", "copy2", "copyfile", "copymode", "copystat", "copytree", "move", "rmtree"),
}
_METHODS: Final = {
    *("hardlink_to", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink"),
    *("write_bytes", "write_text"),
}
_MAY_WRITE: Final = re.compile(
    rf"\b(?:open|{'|'.join(_OS | _SHUTIL | _METHODS)})\s*\(|from (?:os|shutil|io|builtins) import"
)
"""To parse the modules without such text, and to walk through them, takes seconds."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_WRITING: Final = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")
_NOWHERE: Final = ("os.devnull", "'/dev/null'")


def complaints(text: str, path: str) -> list[str]:
    """Return a line for each call that opens for writing, renames or deletes."""
    if not _MAY_WRITE.search(text):
        return []
    tree = ast.parse(text)
    return [
        f"{path}:{line}: {call}: use dlio.util.whole_files or dlio.util.folders"
        for line, call in sorted(set(_calls(tree)))
        if (path, call.rpartition(".")[2]) not in ALLOWED
    ]


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names = _imported(tree)
    scopes = [tree, *(each for each in ast.walk(tree) if isinstance(each, _FUNCTIONS))]
    for scope in scopes:
        for node in _inside(scope):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                called = names.get(called, called)
                if _writes(called, node, scope):
                    yield node.lineno, called


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module or function, but not those of functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _inside(node)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Full names of functions that are imported by name."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "io", "builtins")
        for alias in node.names
    }


def _writes(called: str, node: ast.Call, scope: ast.AST) -> bool:
    module, _, name = called.rpartition(".")
    if called == "os.open":
        return ast.unparse(node.args[0]) not in _NOWHERE and _is_writing(node, scope)
    if called in ("open", "io.open", "builtins.open", "os.fdopen"):
        return called != "os.fdopen" and _mode_writes(node)
    if module == "os":
        return name in _OS
    if module == "shutil":
        return name in _SHUTIL
    return "." in called and name in _METHODS


def _mode_writes(node: ast.Call) -> bool:
    modes = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "mode")]
    return any(
        not isinstance(mode, ast.Constant) or bool(set(str(mode.value)) & set("wax+"))
        for mode in modes
    )


def _is_writing(node: ast.Call, scope: ast.AST) -> bool:
    """True unless the flags of os.open are known to be for reading only."""
    given = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "flags")]
    known = False
    for flags in given:
        texts = [ast.unparse(flags)]
        if isinstance(flags, ast.Name):
            texts = [
                ast.unparse(each.value)
                for each in _inside(scope)
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == flags.id
            ]
        known = bool(texts) and all(
            "os.O_" in text and not any(flag in text for flag in _WRITING) for text in texts
        )
    return not known


def main(root: Path) -> int:
    """Print the complaints about all rooms; returns the exit code."""
    return print_complaints(root, ROOMS, OWNERS, complaints)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
