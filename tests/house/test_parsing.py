"""Text and compressed data of strangers are parsed by the rooms that bound them."""

import re
from typing import Final

import pytest

from tests.conftest import ROOT

_PLACES: Final = ("readers/dlio_readers", "dlio/data", "dlio/loader", "staging/dlio_staging")
_CALL: Final = re.compile(
    r"\bjson\.loads?\(|\byaml\.[a-z]|\bimport yaml|\bzlib\.decompress|\bgzip\.|\bbz2\."
    r"|\blzma\.LZMADec"
)
_OWN: Final = re.compile(r'"head"\]\.tobytes\(\)|read_small\(|stdin')
"""dlio's own files, in folders that are verified, and its own processes."""
_ALLOWED: Final = {
    "readers/dlio_readers/mds.py": ("gzip.GzipFile", "bz2.BZ2File"),  # As far as it is declared.
    "readers/dlio_readers/rehearsal.py": (
        "json.loads(last)",
        "json.loads(given, object_hook=_part_of)",
    ),
    "staging/dlio_staging/pack_writers.py": ("json.loads(self.schema", "json.loads(shard.desc"),
    "staging/dlio_staging/pack_folder.py": ("json.loads(text)", "json.loads(plan.schema"),
    "dlio/loader": (),
}


def complaints(text: str, path: str) -> list[str]:
    """Return the lines of a module that parse by themselves."""
    allowed = _ALLOWED.get(path, ())
    return [
        f"{path}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if _CALL.search(line)
        and not _OWN.search(line)
        and not any(each in line for each in allowed)
    ]


def test_readers_parse_by_the_rooms_that_bound_what_is_made() -> None:
    complaining = [
        line
        for place in _PLACES
        for path in sorted((ROOT / place).rglob("*.py"))
        for line in complaints(path.read_text("utf-8"), str(path.relative_to(ROOT)))
    ]
    assert not complaining, complaining


@pytest.mark.parametrize(
    "text", ["x = json.loads(data)", "import yaml", "zlib.decompressobj(31)", "bz2.open(path)"]
)
def test_parsing_elsewhere_is_a_complaint(text: str) -> None:
    assert complaints(text, "readers/dlio_readers/some.py")
