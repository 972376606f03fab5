"""Counts of an architect's review, printed: size, names, comments, and the length of journeys.

    python tests/house/review.py

A report, not a limit. `test_review.py` forbids only class and module names that are bare
participles, and names that stand twice; `lint-imports` forbids cycles and upward imports.
"""

import ast
import gc
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.house.statements import statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "dlio": "dlio",
    "dlio_readers": "readers/dlio_readers",
    "dlio_staging": "staging/dlio_staging",
    "dlio_bench": "bench/dlio_bench",
}
COMMENTED = ("dlio/loader", "dlio/storage", "dlio/comm", "dlio/exchange")
"""Folders whose comments are counted on their own."""
IRREGULAR = set(
    "begun bent borne bound bought brought built burnt cast caught chosen dealt done drawn driven "
    "fallen fed felt fought found frozen given gone grown heard held hidden hit kept known laid "
    "left lent lost made meant met overlapped paid put read said seen sent shown shut spent stolen "
    "swept sworn taken taught thought thrown told torn woken won worn wound written".split()
)
NOUNS = set(
    # Participles by their form, nouns of the field by their use; and words that merely end so.
    "accounting embedding feed finding greeting lightning mapping need padding packing pruning "
    "ring seed setting shed skipping speed staging string testing thing timing training".split()
)
"""Single words that may be names although they look like participles."""
DOCUMENTED = {"dlio.loader.opened", "dlio_bench.emulated"}
"""Modules that users import by the guides; their paths stay."""


@dataclass(frozen=True)
class Module:
    """One module of the product."""

    name: str
    """Dotted name."""
    path: Path
    tree: ast.Module
    text: str

    @property
    def label(self) -> str:
        """Path relative to the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def stem(self) -> str:
        """Last part of the dotted name."""
        return self.name.rpartition(".")[2]

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield all classes, those inside of functions and classes too."""
        yield from (each for each in statements(self.tree) if isinstance(each, ast.ClassDef))


@cache
def modules() -> dict[str, Module]:
    """Return all modules of the product by their dotted names."""
    by_name = {}
    # All trees stay: to look for garbage among them takes seconds.
    collects = gc.isenabled()
    gc.disable()
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            by_name[name] = Module(name, path, ast.parse(text), text)
    if collects:
        gc.enable()
    return by_name


# Names


def is_participle(name: str) -> bool:
    """True if a name is one word that has the form of a participle or gerund."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name.strip("_"))
    if len(words) != 1:
        return False
    word = words[0].lower()
    return word not in NOUNS and (word in IRREGULAR or bool(re.search(r"(ed|ing)$", word)))


def participles() -> list[str]:
    """Return the classes and modules whose names are bare participles."""
    wrong = [
        f"{module.label}:{node.lineno}: class {node.name}"
        for module in modules().values()
        for node in module.classes()
        if is_participle(node.name)
    ]
    return wrong + [
        f"{each.label}: module"
        for each in modules().values()
        if is_participle(each.stem) and each.name not in DOCUMENTED
    ]


def doubles() -> list[str]:
    """Return the names of classes and of modules that stand in several places."""
    classes, stems = defaultdict(list), defaultdict(list)
    for module in modules().values():
        # Programs that run in environments of their own do not belong to dlio's namespace.
        if ".standalone." in module.name:
            continue
        if module.stem != "__main__":
            stems[module.stem].append(module.label)
        for node in module.classes():
            classes[node.name].append(f"{module.label}:{node.lineno}")
    return [
        f"{kind} {name}: {', '.join(places)}"
        for kind, table in (("class", classes), ("module", stems))
        for name, places in sorted(table.items())
        if len(places) > 1
    ]


def exported() -> int:
    """Return the number of names in all `__all__`s of dlio/."""
    total = 0
    for module in modules().values():
        for node in module.tree.body if module.name.split(".")[0] == "dlio" else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id == "__all__":
                total += len(getattr(getattr(node, "value", None), "elts", ()))
    return total


# Size and comments


def source_lines() -> dict[str, int]:
    """Return lines by folder of the second level, C files included."""
    lines: Counter[str] = Counter()
    for folder in PACKAGES.values():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".h"}:
                parts = path.relative_to(ROOT).parts
                room = "/".join(parts[:2]) if parts[0] == "dlio" else parts[0]
                lines[room] += path.read_text(encoding="utf-8").count("\n")
    return dict(lines)


def comments_per_100(folder: str) -> float:
    """Return comments per 100 lines of code (neither blank, nor comment, nor docstring)."""
    comments = code = 0
    for module in modules().values():
        if not module.label.startswith(f"{folder}/"):
            continue
        strings = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                strings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        for number, line in enumerate(module.text.splitlines(), 1):
            stripped = line.strip()
            code += bool(stripped) and not stripped.startswith("#") and number not in strings
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            comments += token.type == tokenize.COMMENT
    return 100 * comments / code if code else 0.0


def satellites() -> list[str]:
    """Return files of under 60 lines that exactly one other module imports."""
    importers = defaultdict(set)
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    full = f"{node.module}.{each.name}"
                    importers[full if full in modules() else node.module].add(module.name)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    importers[each.name].add(module.name)
    return [
        each.label
        for each in modules().values()
        if each.path.name != "__init__.py"
        and each.text.count("\n") < 60
        and len(importers[each.name]) == 1
    ]


# Journeys


@cache
def definitions() -> dict[str, tuple[Module, ast.AST]]:
    """Return top-level functions and classes by `module.name`."""
    return {
        f"{module.name}.{node.name}": (module, node)
        for module in modules().values()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@cache
def bindings(name: str) -> dict[str, str]:
    """Return the dotted name of each name that a module defines or imports."""
    module = modules()[name]
    bound = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                bound[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            for each in node.names:
                bound[each.asname or each.name.split(".")[0]] = (
                    each.asname and each.name
                ) or each.name
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = f"{name}.{node.name}"
    return bound


def resolve(dotted: str, depth: int = 0) -> str:
    """Follow re-exports of a dotted name to its definition."""
    module, _, name = dotted.rpartition(".")
    if dotted in definitions() or module not in modules() or depth > 5:
        return dotted
    target = bindings(module).get(name, dotted)
    return dotted if target == dotted else resolve(target, depth + 1)


def types_in(module: Module) -> set[str]:
    """Return the product's classes that a module defines or names."""
    types = {f"{module.name}.{node.name}" for node in module.classes()}
    bound = bindings(module.name)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in bound:
            dotted = resolve(bound[node.id])
            if isinstance(definitions().get(dotted, (None, None))[1], ast.ClassDef):
                types.add(dotted)
    return types


def sample_path() -> tuple[list[Module], set[str]]:
    """Return the modules that docs/design/sample-path.md names, and the classes named in them."""
    page = (ROOT / "docs/design/sample-path.md").read_text(encoding="utf-8")
    page = page.split("<!-- end of the path -->")[0]
    named = {}
    for word in re.findall(r"`([a-z_][\w.]*)`", page):
        for name, module in modules().items():
            known = {name, name.partition(".")[2]}
            if name.startswith("dlio.loader."):
                known.add(name.removeprefix("dlio.loader."))
            if word in known and module.path.name != "__init__.py":
                named[name] = module
    return list(named.values()), set().union(*(types_in(each) for each in named.values()))


@dataclass
class Walk:
    """The stays of a parameter and of its attributes: each function that one is handed to."""

    stays: list[str] = field(default_factory=list)

    def follow(self, function: str, parameter: str) -> None:
        """Follow a parameter of a function (`module.name` or `module.Class.method`)."""
        definition = _function(function)
        here = f"{function}({parameter})"
        if definition is None or here in self.stays:
            return
        self.stays.append(here)
        module, owner, node = definition
        roots = {parameter}
        kept = set()
        for target, value in _assignments(node):
            if _root(value) in roots:
                if isinstance(target, ast.Name):
                    roots.add(target.id)
                elif isinstance(target, ast.Attribute):
                    kept.add(_root(target))
        self._calls(module, owner, node, roots | kept)
        if owner is None or not kept:
            return
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method is not node:
                used = {_root(each) for each in ast.walk(method)} & kept
                stay = f"{module.name}.{owner.name}.{method.name}({', '.join(sorted(used))})"
                if used and stay not in self.stays:
                    self.stays.append(stay)
                    self._calls(module, owner, method, used | _aliases(method, used))

    def _calls(
        self, module: Module, owner: ast.ClassDef | None, node: ast.AST, roots: set[str]
    ) -> None:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            target = _target(module, owner, call.func)
            definition = _function(target) if target else None
            if not target or not definition:
                continue
            _, its_owner, its_node = definition
            names = [each.arg for each in its_node.args.posonlyargs + its_node.args.args]
            if its_owner is not None and names[:1] in (["self"], ["cls"]):
                names = names[1:]
            for name, argument in zip(names, call.args, strict=False):
                if _root(argument) in roots:
                    self.follow(target, name)
            for keyword in call.keywords:
                if keyword.arg and _root(keyword.value) in roots:
                    self.follow(target, keyword.arg)

    def files(self) -> set[str]:
        """Return the modules that the parameter stays in."""
        return {max((m for m in modules() if s.startswith(f"{m}.")), key=len) for s in self.stays}


def _root(node: ast.AST) -> str:
    """Return the name that a chain of attributes begins with; `self.x` for one of `self`."""
    while isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return f"self.{node.attr}"
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _aliases(node: ast.AST, roots: set[str]) -> set[str]:
    """Return local names that are assigned from a root, or from an attribute of one."""
    return {
        target.id
        for target, value in _assignments(node)
        if isinstance(target, ast.Name) and _root(value) in roots
    }


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
                    yield from zip(target.elts, each.value.elts, strict=False)
                else:
                    yield target, each.value


def _function(dotted: str) -> tuple[Module, ast.ClassDef | None, ast.FunctionDef] | None:
    """Return (module, class, function); a class stands for its __init__."""
    if dotted in definitions():
        module, node = definitions()[dotted]
        if isinstance(node, ast.FunctionDef):
            return module, None, node
        if isinstance(node, ast.ClassDef):
            return _method(module, node, "__init__")
    owner, _, name = dotted.rpartition(".")
    if owner in definitions():
        module, node = definitions()[owner]
        if isinstance(node, ast.ClassDef):
            return _method(module, node, name)
    return None


def _method(
    module: Module, owner: ast.ClassDef, name: str
) -> tuple[Module, ast.ClassDef, ast.FunctionDef] | None:
    for each in owner.body:
        if isinstance(each, ast.FunctionDef) and each.name == name:
            return module, owner, each
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in bindings(module.name):
            dotted = resolve(bindings(module.name)[base.id])
            if dotted in definitions():
                its_module, its_node = definitions()[dotted]
                if isinstance(its_node, ast.ClassDef):
                    return _method(its_module, its_node, name)
    return None


def _target(module: Module, owner: ast.ClassDef | None, func: ast.expr) -> str | None:
    bound = bindings(module.name)
    if isinstance(func, ast.Name) and func.id in bound:
        return resolve(bound[func.id])
    if isinstance(func, ast.Attribute):
        if isinstance(func.value, ast.Name) and func.value.id == "self" and owner is not None:
            return f"{module.name}.{owner.name}.{func.attr}"
        if isinstance(func.value, ast.Name) and func.value.id in bound:
            return resolve(f"{resolve(bound[func.value.id])}.{func.attr}")
    return None


def walk(function: str, parameter: str) -> Walk:
    """Return the stays of a parameter from a function on."""
    way = Walk()
    way.follow(function, parameter)
    return way


def rooms() -> list[str]:
    """Return the folders and files of the top two levels: of dlio/, and the packages next to it."""
    inside = {".".join(name.split(".")[:2]) for name in modules() if name.startswith("dlio.")}
    return sorted({*inside, "dlio", *(each for each in PACKAGES if each != "dlio")})


def main() -> int:
    """Print the counts."""
    lines = source_lines()
    everything = modules().values()
    lengths = sorted(each.text.count("\n") for each in everything)
    classes = [node.name for each in everything for node in each.classes()]
    print(f"lines of the product        {sum(lines.values()):>8,}")
    for room, count in sorted(lines.items(), key=lambda each: -each[1]):
        print(f"  {room:<26}{count:>8,}")
    print(f"files                       {len(lengths):>8,}  (median {lengths[len(lengths) // 2]})")
    print(f"files under 60 lines with one importer {len(satellites())}")
    print(f"classes                     {len(classes):>8,}  ({len(set(classes)):,} names)")
    print(f"names in dlio's __all__s    {exported():>8,}")
    print(f"bare participles            {len(participles()):>8}")
    print(f"names that stand twice      {len(doubles()):>8}")
    print(f"rooms of the top two levels {len(rooms()):>8}  {' '.join(rooms())}")
    files, types = sample_path()
    print(f"a sample's path             {len(files):>8} files, {len(types)} types")
    for label, start in (("the configuration", TRAIN), ("  from Worker on", WORKER)):
        way = walk(*start)
        print(f"{label:<28}{len(way.stays):>8} stays in {len(way.files())} files")
    for folder in COMMENTED:
        print(f"comments in {folder:<16}{comments_per_100(folder):>8.1f} per 100 lines of code")
    if "--names" in sys.argv:
        print("\n".join([*participles(), *doubles()]))
    if "--stays" in sys.argv:
        print("\n".join(walk(*TRAIN).stays))
    return 0


TRAIN = ("dlio.train.trainer.train", "config")
WORKER = ("dlio.train.worker.Worker.__init__", "config")

if __name__ == "__main__":
    sys.exit(main())
