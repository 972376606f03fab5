"""Check the names of modules: `__all__`, docstrings, and signatures without `Any`.

    python tests/house/public.py            # print complaints

`__all__` is a promise to users. It stands where the documentation has them import from
(`PUBLIC`), and in packages that re-export names of their modules. Everywhere else a name without a
leading underscore is for other modules of the project; it needs a docstring, too.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.house.statements import statements

ROOMS = ("dlio", "readers/dlio_readers", "staging/dlio_staging", "bench/dlio_bench")
PUBLIC = {
    "dlio/__init__.py",
    "dlio/errors.py",
    "dlio/image/crop_transforms.py",
    "dlio/integrations/__init__.py",
    "dlio/testing/__init__.py",
    "dlio/transforms.py",
}
"""Files that users import from, as the documentation shows."""
ANY_ALLOWED = {
    "dlio/loader": "torch's DataLoader: its arguments, samples, batches and states",
    "dlio/testing/loader_state.py": "torch's stateful loaders: states and batches",
    "dlio/exchange/loss_terms": "nodes of torch's graphs: the values that they have saved",
    "dlio/integrations": "Lightning's and torch's hooks, which are typed so",
    "dlio/comm/process_group/mpi_work": "torch's Work and Future: the values that they hold",
    "dlio/features/skipping": "a user's loss function and samples, as torch has them",
    "dlio/features/pruning/pruning_feature": "a saved state, as JSON types",
    "dlio/util/structured_text": "a value of JSON",
    "dlio/train/feature_spec": "records of options, each of a feature's own type",
    "dlio/train/feature_hooks": "records of options, and saved states as JSON types",
    "dlio/train/report": "reports of epochs as JSON types",
}
"""Files or folders whose public signatures may have `Any`, with the reason."""
_ASSIGNED = re.compile(r"[A-Za-z]\w*$")


def public_files() -> Iterator[Path]:
    """Yield the files of public modules."""
    for room in ROOMS:
        for path in sorted(Path(room).rglob("*.py")):
            parts = [part for part in path.with_suffix("").parts if part != "__init__"]
            if not any(part.startswith("_") for part in parts):
                yield path


def declared(tree: ast.Module) -> list[str] | None:
    """Return the names in `__all__`; None if it is missing."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(each.name == "__all__" for each in node.names):
            return []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__all__":
                return [ast.literal_eval(each) for each in getattr(node.value, "elts", [])]
    return None


def defined(tree: ast.Module) -> list[str]:
    """Return the public functions, classes, constants and aliases that a module defines."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            names += [each.id for each in node.targets if isinstance(each, ast.Name)]
    return list(dict.fromkeys(name for name in names if _ASSIGNED.match(name)))


def complaints(path: Path) -> Iterator[str]:
    """Yield complaints about one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = declared(tree)
    body = statements(tree)
    imported = _imported(body)
    lazy = "__getattr__" in {getattr(node, "name", "") for node in tree.body}
    public = str(path) in PUBLIC
    if public and names is None:
        yield f"{path}: has no __all__"
    elif names is not None:
        bound = {*defined(tree), *imported}
        for name in names:
            if name not in bound and not lazy:
                yield f"{path}: __all__ has {name!r}, which is not there"
        if not (public or lazy or (path.name == "__init__.py" and imported & set(names))):
            yield f"{path}: has an __all__, but is internal: the underscore says what is private"
    yield from _misplaced(path, body)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        if public and node.name not in (names or ()):
            yield f"{path}:{node.lineno}: {node.name} is public, but not in __all__"
        if ast.get_docstring(node) is None:
            yield f"{path}:{node.lineno}: {node.name} has no docstring"
        if not any(str(path).startswith(place) for place in ANY_ALLOWED):
            yield from _any_in(path, node)


def _misplaced(path: Path, body: list[ast.AST]) -> Iterator[str]:
    """Yield complaints about strings that describe no attribute: none stands above them."""
    for scope in body:
        if not isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for above, node in itertools.pairwise(scope.body):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and not isinstance(above, ast.Assign | ast.AnnAssign)
            ):
                yield f"{path}:{node.lineno}: a docstring without an attribute above it"


def _any_in(path: Path, node: ast.AST) -> Iterator[str]:
    functions = node.body if isinstance(node, ast.ClassDef) else [node]
    for function in functions:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if function.name.startswith("_") and function.name != "__init__":
            continue
        arguments = function.args
        hints = [each.annotation for each in arguments.posonlyargs + arguments.args]
        hints += [each.annotation for each in arguments.kwonlyargs]
        hints += [each.annotation for each in (arguments.vararg, arguments.kwarg) if each]
        for hint in (*hints, function.returns):
            if hint is not None and re.search(r"\bAny\b", ast.unparse(hint)):
                yield f"{path}:{function.lineno}: {function.name} has {ast.unparse(hint)}"


def _imported(body: list[ast.AST]) -> set[str]:
    return {
        (each.asname or each.name).split(".")[0]
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    }


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and "TypeVar" in ast.unparse(value.func)


def main() -> int:
    """Print complaints and return 1 if there are any."""
    wrong = [each for path in public_files() for each in complaints(path)]
    print("\n".join(wrong) or "names are as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
