"""Names are public or private for a reason; modules keep to one subject; types are checked."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, has_feature

PRODUCT = ("dlio", "readers/dlio_readers", "staging/dlio_staging", "bench/dlio_bench")
MOST_LINES = 900
MOST_IGNORES = 23
_IGNORE = re.compile(r"# *type: *ignore")

Complaints = Callable[[str], list[str]]


def _modules(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((ROOT / room).rglob("*.py"))


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The check itself, in the repository's folder."""
    spec = importlib.util.spec_from_file_location("public_check", ROOT / "tests/house/public.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(ROOT)
    return module


@pytest.fixture
def complaints_about(
    checker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Complaints:
    """A function that returns the complaints about a module with a given text."""

    def check(text: str) -> list[str]:
        path = tmp_path / ("public.py" if text.startswith("# public\n") else "room.py")
        path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(checker, "PUBLIC", {str(tmp_path / "public.py")})
        return [each.removeprefix(f"{path}:") for each in checker.complaints(path)]

    return check


def test_public_names_are_declared_and_all_names_described(
    checker: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = checker.main()
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# public\nX = 1\n", " has no __all__"),
        ('# public\n__all__ = ["gone"]\n', " __all__ has 'gone', which is not there"),
        (
            '# public\n__all__ = []\ndef f() -> None:\n    "Do."\n',
            "3: f is public, but not in __all__",
        ),
        (
            '__all__ = ["f"]\ndef f() -> None:\n    "Do."\n',
            " has an __all__, but is internal: the underscore says what is private",
        ),
        ("def f() -> None: ...\n", "1: f has no docstring"),
        ('def f(a: list[Any]) -> None:\n    "Do."\n', "1: f has list[Any]"),
        (
            'class C:\n    "It."\n    x = 1\n    "An x."\n    "Of what?"\n',
            "5: a docstring without an attribute above it",
        ),
        ('class C:\n    "It."\n    def m(self) -> Any: ...\n', "3: m has Any"),
    ],
)
def test_a_fault_is_reported(complaints_about: Complaints, text: str, expected: str) -> None:
    assert complaints_about(text) == [expected]


def test_a_sound_module_is_passed(complaints_about: Complaints) -> None:
    text = '_Y = 1\ndef f(a: object) -> None:\n    "Do."\ndef _g(a): ...\n'
    assert complaints_about(text) == []
    assert complaints_about(f'# public\n__all__ = ["f"]\n{text}') == []


def test_a_faulty_tree_fails(
    checker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dlio").mkdir()
    (tmp_path / "dlio" / "room.py").write_text("def f(): ...\n", encoding="utf-8")
    (tmp_path / "dlio" / "_private.py").write_text("def f(): ...\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in checker.public_files()] == ["dlio/room.py"]
    assert checker.main() == 1


def test_every_exception_to_the_check_is_in_use(checker: ModuleType) -> None:
    files = [str(path) for path in checker.public_files()]
    for place in (*checker.ANY_ALLOWED, *checker.PUBLIC):
        feature = re.match(r"dlio/features/(\w+)", place)
        if feature is None or has_feature(feature[1]):
            assert any(file.startswith(place) for file in files), place


def test_no_module_is_longer_than_900_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in _modules("dlio", "readers", "staging", "bench", "tests", "docs", "examples")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert long == {}


def test_types_are_seldom_silenced() -> None:
    ignores = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _modules(*PRODUCT)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _IGNORE.search(line)
    ]
    assert len(ignores) <= MOST_IGNORES, ignores


def test_names_that_are_imported_when_used_are_no_modules() -> None:
    # Whoever imports a module sets its name in the package: `from package import name` then gave
    # the module in place of the function, if another name of that module was asked for first.
    clashes, packages = [], 0
    for room in PRODUCT:
        for path in (ROOT / room).rglob("__init__.py"):
            if "__getattr__" in (text := path.read_text(encoding="utf-8")):
                packages += 1
                names = set(re.findall(r'^ {4,8}"(\w+)": [("]', text, re.MULTILINE))
                modules = {each.stem for each in path.parent.glob("*.py")}
                modules |= {each.parent.name for each in path.parent.glob("*/__init__.py")}
                clashes += [f"{path.relative_to(ROOT)}: {name}" for name in names & modules]
    assert packages >= (4 if has_feature("mesh") else 3)
    assert clashes == []
