"""Generated parts of pages, by the name that stands in a page's `<!-- generate: NAME -->`."""

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dlio_docs import benchmarks, layout_table, reference, workloads

__all__ = ["GENERATORS"]

ROOT: Final = Path(__file__).resolve().parents[2]


def _fields(argument: str) -> str:
    """Return a table of a dataclass's fields: name, type, and the docstring below each."""
    module, _, name = argument.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    rows = ["| field | type | |", "|---|---|---|"]
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        kind = ast.unparse(statement.annotation).replace("|", "\\|")
        rows.append(f"| `{statement.target.id}` | `{kind}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _file(argument: str) -> str:
    """Return a Markdown file of the repository, its title left out."""
    text = (ROOT / argument).read_text(encoding="utf-8")
    return text.split("\n", 1)[1] if text.startswith("# ") else text


def _names(argument: str) -> str:
    """Return mkdocstrings' directives for the public names of modules, in order."""
    parts = []
    for module in argument.split():
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", None) or [
            name
            for name, value in vars(loaded).items()
            if getattr(value, "__module__", "").startswith("dlio.")
        ]
        parts += [f"::: {module}.{name}" for name in names if name[0] != "_"]
    return "\n\n".join(parts)


GENERATORS: Final[dict[str, Callable[[str], str]]] = {
    "benchmarks": benchmarks.page,
    "commands": lambda _: reference.commands_page(),
    "environment": lambda _: reference.environment_table(),
    "fields": _fields,
    "file": _file,
    "layouts": lambda _: layout_table.table(),
    "names": _names,
    "workload-keys": lambda _: workloads.keys_table(),
    "workload-rounds": lambda _: workloads.rounds_table(),
    "workload-shapes": lambda _: workloads.shapes_table(),
}
