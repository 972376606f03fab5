"""Delete a feature: everything else has to work without it.

    python tests/house/deletion.py             # every feature in turn: imports and commands
    python tests/house/deletion.py --tests mesh search    # and the tests that remain

For each feature, a copy of the checkout lacks `dlio/features/FEATURE`, `tests/features/FEATURE`,
its entry points and contracts in pyproject.toml, its examples (`examples/FEATURE_*`), the
benchmarks that measure it with their tests, and the documentation's code blocks that use it and
references to its names. In the copy, nothing imports the feature, and `dlio` neither offers its
commands and options nor fails without them.

The tests that remain are run in two parts, since all of them for each feature would take more than
an hour: in the feature's own copy those that go with another feature, and all others once, in a
copy that lacks every feature.
"""

import argparse
import ast
import dataclasses
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FEATURES = sorted(path.parent.name for path in (ROOT / "dlio" / "features").glob("*/__init__.py"))
PRODUCT = ("dlio", "readers", "staging", "bench")
_LAZY = "dlio/__init__.py"
"""The table of public names: the modules of features are imported when a name is used."""
_BUILT = ("dlio/image/native/*.so",)
_BLOCK = re.compile(
    r"^```.*?^```$\n?"
    r"|^::: [^\n]*\n(?: {4}[^\n]*\n)*"  # A name whose docstring the reference shows.
    r"|^<!-- generate: [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)
_DEADLINE_S = 3600


_ASK = """
import contextlib, io, json, sys
import dlio
from dlio.cli import main
for word in sys.argv[1:]:
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            getattr(dlio, word[5:]) if word.startswith("dlio.") else main(word.split())
        except SystemExit as end:
            status = end.code
        except Exception as error:
            status = 1
            print(error)
    print(json.dumps([word, [status, said.getvalue()]]))
"""
"""A program that prints a line for each argument, `[argument, [exit status, output]]`: of the use
of that public name ("dlio.X"), or of `dlio` with those words ("train --help")."""


@dataclass(frozen=True)
class Copy:
    """A checkout that lacks features."""

    root: Path
    features: tuple[str, ...]
    commands: tuple[str, ...]
    """Commands that it lacks."""
    flags: tuple[str, ...]
    """Options of `dlio train` that it lacks."""
    names: tuple[str, ...]
    """Public names of `dlio` that it lacks."""
    benches: tuple[str, ...]
    """Benchmarks that it lacks, and their tests, as modules."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which Python finds this copy's code and entry points, not those that are
        installed."""
        paths = ["site", "", *PRODUCT[1:], "docs"]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self.root / path) for path in paths),
            "DLIO_CACHE": str(self.root / ".cache" / "dlio"),
            "COLUMNS": "100",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with arguments in the copy."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )


@contextmanager
def without(*features: str) -> Iterator[Copy]:
    """Make a copy of the checkout without features; deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="without-feature-") as folder:
        yield delete(features, Path(folder))


def delete(features: Sequence[str], folder: Path) -> Copy:
    """Copy the checkout into a folder, without features."""
    commands, flags, names = (
        tuple(itertools.chain.from_iterable(map(ask, features)))
        for ask in (_commands, _flags, _public_names)
    )
    kept, lost = _kept_and_lost(features)
    for path in kept:
        if not (ROOT / path).is_file():
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    for pattern in _BUILT:
        for built in ROOT.glob(pattern):
            shutil.copy2(built, folder / built.relative_to(ROOT))
    modules = [f"dlio.features.{feature}" for feature in features]
    _drop_lines(folder / "pyproject.toml", modules)
    benches = tuple(sorted(_module(path) for path in lost))
    spoken = [f"dlio {name}" for name in (*commands, *_bench_commands(benches))]
    _drop_lines(folder / "bench/dlio_bench/__init__.py", benches)
    for path in lost:
        _replace(folder / Path(path).parent / "__init__.py", f"`{Path(path).stem}`", "-")
    _drop_blocks(folder, [*spoken, *flags, *(f"dlio.{name}" for name in names), *modules])
    for page in _pages(folder):
        for words in spoken:
            _replace(page, f"`{words}", f"`{words.removeprefix('dlio ')}")
    _write_metadata(folder)
    return Copy(folder, tuple(features), commands, flags, names, benches)


def _kept_and_lost(features: Sequence[str]) -> tuple[list[str], set[str]]:
    """Return the files that remain without features, and the benchmarks with their tests that go
    because they measure one."""
    places = "dlio/features/{}/", "tests/features/{}/", "examples/{}_"
    own = tuple(place.format(feature) for place in places for feature in features)
    kept = [path for path in _files() if not path.startswith(own)]
    measuring = [path for path in kept if path.startswith(("bench/", "tests/bench/"))]
    # Benchmarks of several features are tested with one of these.
    measuring += [path for path in kept if path.startswith("tests/features/") and _uses_bench(path)]
    lost = set[str]().union(*(_measuring(feature, measuring) for feature in features))
    return [path for path in kept if path not in lost], lost


def tests_of_others(feature: str) -> list[str]:
    """Return the tests that remain without a feature, and not without all of them."""
    (with_others, _), (alone, _) = _kept_and_lost([feature]), _kept_and_lost(FEATURES)
    tests = re.compile(r"tests/.*/test_\w+\.py")
    return sorted(filter(tests.fullmatch, {*with_others} - {*alone}))


def _files() -> list[str]:
    """Return the files of the checkout, including those that are not added yet."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(set(filter(None, listed.stdout.split("\0"))))


def _entry_points() -> Mapping[str, Mapping[str, str]]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups: Mapping[str, Mapping[str, str]] = tomllib.loads(text)["project"]["entry-points"]
    return groups


def _commands(feature: str) -> tuple[str, ...]:
    prefix = f"dlio.features.{feature}."
    pairs = _entry_points().get("dlio.commands", {}).items()
    return tuple(name for name, value in pairs if f"{value}.".startswith(prefix))


def _bench_commands(benches: Sequence[str]) -> list[str]:
    """Return the commands whose benchmarks are among these modules."""
    text = (ROOT / "bench/dlio_bench/__init__.py").read_text(encoding="utf-8")
    pairs = re.findall(r'"(\w+)": "([\w.]+):', text)
    return [f"bench {name}" for name, module in pairs if module in benches]


def _public_names(feature: str) -> tuple[str, ...]:
    text = (ROOT / _LAZY).read_text(encoding="utf-8")
    return tuple(re.findall(rf'"(\w+)": \("dlio\.features\.{feature}\b', text))


def _module(path: str) -> str:
    """Return the name of the module in a file."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts[1:] if parts[0] in PRODUCT[1:] else parts)


def imported(path: Path, module: str) -> set[str]:
    """Return the names of modules that a file imports, or names in a text, within functions too."""
    modules: set[str] = set()
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")
                up = node.level - is_package
                base = ".".join([*parent[: len(parent) - up], *filter(None, [base])])
            modules |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules |= set(re.findall(r"\bdlio\.features\.[\w.]+", node.value))
    return modules


def _uses_bench(path: str) -> bool:
    """True for a test that imports a benchmark."""
    place = ROOT / path
    return path.endswith(".py") and place.is_file() and "dlio_bench" in place.read_text("utf-8")


def _measuring(feature: str, paths: Sequence[str]) -> set[str]:
    """Return the benchmarks that import a feature when they are imported themselves."""
    prefix = f"dlio.features.{feature}"
    graph = {
        _module(path): (path, imported(ROOT / path, _module(path)))
        for path in paths
        if path.endswith(".py")
    }
    gone = {
        name
        for name, (_, modules) in graph.items()
        if any(f"{each}.".startswith(f"{prefix}.") for each in modules)
    }
    while more := {
        name for name, (_, modules) in graph.items() if name not in gone and modules & gone
    }:
        gone |= more
    return {graph[name][0] for name in gone}


def _drop_lines(path: Path, words: Sequence[str]) -> None:
    """Delete the lines of a file that contain one of these words."""
    if not words:
        return
    pattern = re.compile("|".join(rf"{re.escape(word)}\b" for word in words))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not pattern.search(line)), encoding="utf-8")


def _replace(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, if there is one."""
    if path.is_file() and old in (text := path.read_text(encoding="utf-8")):
        path.write_text(text.replace(old, new), encoding="utf-8")


def _pages(folder: Path) -> list[Path]:
    return [folder / "README.md", *(folder / "docs").rglob("*.md")]


def _drop_blocks(folder: Path, words: Sequence[str]) -> None:
    """Delete the code blocks and references of README.md and docs/ that use the feature."""
    pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words))
    for path in _pages(folder):
        text = path.read_text(encoding="utf-8")
        left = _BLOCK.sub(lambda m: "" if pattern.search(m.group()) else m.group(), text)
        if left != text:
            path.write_text(left, encoding="utf-8")


def _write_metadata(folder: Path) -> None:
    """Write the metadata that an installation of the copy would have, for `importlib.metadata`."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    info = folder / "site" / f"dlio-{project['version']}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {row}" for row in project["dependencies"]]
    for extra, rows in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for row in rows:
            package, _, marker = map(str.strip, row.partition(";"))
            condition = f"({marker}) and " if marker else ""
            lines.append(f"Requires-Dist: {package}; {condition}extra == '{extra}'")
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = ""
    for group, entries in groups.items():
        text += f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
    (info / "entry_points.txt").write_text(text, encoding="utf-8")


def _flags(feature: str) -> tuple[str, ...]:
    """Return the options that a feature gives `dlio train`."""
    place = _entry_points().get("dlio.features", {}).get(feature)
    if place is None:
        return ()
    module, _, name = place.partition(":")
    options = getattr(importlib.import_module(module), name).options
    return tuple(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))


def importers(copy: Copy) -> list[str]:
    """Return the files of a copy that import or name a feature, as complaints."""
    faults = []
    for path in sorted(copy.root.rglob("*.py")):
        relative, text = path.relative_to(copy.root).as_posix(), path.read_text(encoding="utf-8")
        # To parse the others would take seconds.
        named = [feature for feature in copy.features if feature in text]
        if relative == _LAZY or not named:
            continue
        modules = imported(path, _module(relative))
        for feature in named:
            prefix = f"dlio.features.{feature}"
            if any(f"{each}.".startswith(f"{prefix}.") for each in modules):
                faults.append(f"{relative}: imports {prefix}")
    return faults


def referring(copy: Copy) -> list[str]:
    """Return the files of the remaining tests that name something which the copy lacks."""
    feature = "|".join(map(re.escape, copy.features))
    words = [*copy.flags, *copy.names, rf"features[./](?:{feature})", rf"[\"'](?:{feature})[\"']"]
    for bench in copy.benches:
        package, _, name = map(re.escape, bench.rpartition("."))
        words.append(rf"{package}(?:\.| import (?:[^\n(]*\b|\([^)]*\b)){name}")
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)|examples/(?:{feature})_")
    return [
        str(path.relative_to(copy.root))
        for path in sorted((copy.root / "tests").rglob("test_*.py"))
        if pattern.search(path.read_text(encoding="utf-8"))
    ]


def complaints(copy: Copy, tests: Sequence[str] = ("tests",)) -> Iterator[str]:
    """Yield faults of a copy: imports of the feature, commands and those tests that need it."""
    yield from importers(copy)
    helps = {"--help": copy.commands, "train --help": copy.flags}
    refused = {f"train nowhere {flag} 1": flag for flag in copy.flags}
    # One process for all: each costs a second.
    asked = copy.run("-c", _ASK, *helps, *refused, *(f"dlio.{name}" for name in copy.names))
    if asked.returncode:
        yield f"asking for commands, options and names: {asked.stderr[-300:]}"
        return
    answers = dict(json.loads(line) for line in asked.stdout.splitlines())
    for words, gone in helps.items():
        status, shown = answers[words]
        if status:
            yield f"dlio {words}: {shown.strip()[-300:]}"
        for word in gone:
            if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown):
                yield f"dlio {words} still offers {word}"
    for words, flag in refused.items():
        status, said = answers[words]
        if status != 2 or flag not in said:
            yield f"dlio {words}: is not refused as an unknown option: {said[-300:]}"
    for name in copy.names:
        status, said = answers[f"dlio.{name}"]
        if not status or not any(feature in said for feature in copy.features):
            yield f"dlio.{name}: its error does not name its feature: {said[-300:]}"
    if not tests:
        return
    # Without rewritten assertions: the copy has no bytecode yet.
    options = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    collected = copy.run("-m", "pytest", *options, *tests)
    if collected.returncode not in (0, 5):  # 5: by day, none of these is run.
        yield f"tests that remain need it: {collected.stdout[-1500:]}"


def failing_tests(copy: Copy, *tests: str) -> str:
    """Run tests of a copy; return the end of their output, empty if they pass."""
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    ran = copy.run(*words, *tests)
    return ran.stdout[-3000:] if ran.returncode else ""


def main() -> int:
    """Print the faults of each feature; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("features", nargs="*", help="all by default")
    parser.add_argument("--tests", action="store_true", help="run the tests that remain, too")
    given = parser.parse_args()
    failed = False
    chosen = [[feature] for feature in given.features or FEATURES]
    for features in [*chosen, FEATURES] if given.tests else chosen:
        with without(*features) as copy:
            faults = list(complaints(copy))
            if given.tests and not faults:
                own = [] if features == FEATURES else tests_of_others(features[0])
                faults += filter(None, [failing_tests(copy, *own)])
        name = "all of them" if features == FEATURES else features[0]
        print(f"{name}: {'; '.join(faults) or 'can be deleted'}", flush=True)
        failed |= bool(faults)
    return failed


if __name__ == "__main__":
    sys.exit(main())
