"""Check the prose of docstrings, comments and messages against the rules of CONTRIBUTING.md.

    python tests/house/language.py            # the whole tree
    python tests/house/language.py dlio/comm  # some folders or files

Rules:

- a docstring begins with a noun phrase or an imperative, not with Of, What, That, Whether or Who;
- "is not a ..." or "invalid", not "is no ..."; "next to" or "compared with", not "beside";
- at most one "what" in a thousand words of docstrings and comments;
- nothing is called `told`; a variable has a more telling name than `found`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOMS = ("dlio", "readers", "staging", "bench", "tests", "docs", "examples")
_FRAGMENT = re.compile(r"(Of|What|That|Whether|Who|Whose|Whom|To whom|Of whom)\b")
_PHRASES = {
    re.compile(
        r"\b(is|are|was|were) no (?!longer|more\b|less|fewer)\w+"
    ): "say 'is not a' or 'invalid'",
    re.compile(r"\bbeside\b"): "say 'next to' or 'compared with'",
    re.compile(r"\b(of|to|by|from) whom\b"): "name the rank or the caller",
}
_MOST_WHATS_PER_1000 = 1.0
_NAMES = {"told", "found"}


@dataclass(slots=True)
class Prose:
    """Word counts and complaints of the files read so far."""

    words: int = 0
    whats: int = 0
    complaints: list[str] = field(default_factory=list)

    def read(self, path: Path) -> None:
        """Check a file of Python and add its counts."""
        text = path.read_text(encoding="utf-8")
        for line, prose in _prose(text):
            self.words += len(re.findall(r"[A-Za-z']+", prose))
            self.whats += len(re.findall(r"\bwhat\b", prose, flags=re.IGNORECASE))
            self._phrases(path, line, prose)
        tree = ast.parse(text)
        keys = _keys_of_formats(tree)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            if isinstance(node, documented):
                doc = ast.get_docstring(node) or ""
                if _FRAGMENT.match(doc):
                    line = node.body[0].lineno
                    self.complaints.append(
                        f"{path}:{line}: docstring begins with {doc.split()[0]!r}: use a noun "
                        "phrase or an imperative"
                    )
            name = getattr(node, "name", None) or (
                node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            )
            if name in _NAMES and node not in keys:
                self.complaints.append(
                    f"{path}:{getattr(node, 'lineno', 0)}: a name says more than {name!r}"
                )
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._phrases(path, node.lineno, node.value)

    def _phrases(self, path: Path, line: int, prose: str) -> None:
        for pattern, remedy in _PHRASES.items():
            for match in pattern.finditer(prose):
                self.complaints.append(f"{path}:{line}: {match.group()!r}: {remedy}")


def _keys_of_formats(tree: ast.Module) -> set[ast.AST]:
    """Names of fields in TypedDicts: keys of files and states, which stay."""
    return {
        field.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("TypedDict", "State")) for base in node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and field.value is None
    }


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments and of strings that are statements."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def main(arguments: list[str]) -> int:
    """Print complaints; return 1 if there are any."""
    places = [Path(each) for each in arguments] or [Path(each) for each in ROOMS]
    prose = Prose()
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            # Environments and caches, such as .venv, hold the prose of others.
            is_hidden = any(part.startswith(".") for part in path.relative_to(place).parts)
            if not is_hidden and path.resolve() != Path(__file__).resolve():
                prose.read(path)
    rate = 1000 * prose.whats / max(1, prose.words)
    if rate > _MOST_WHATS_PER_1000:
        prose.complaints.append(
            f"'what' stands {rate:.1f} times in 1,000 words, {_MOST_WHATS_PER_1000} at most"
        )
    print(
        "\n".join(dict.fromkeys(prose.complaints)) or f"{prose.words:,} words, none to complain of"
    )
    return bool(prose.complaints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
