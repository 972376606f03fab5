"""Coverage-guided fuzzing of a parser: `python tests/fuzz/fuzz.py tar -max_total_time=600`.

Needs atheris (`pip install atheris`). Inputs that reach new code gather in .cache/fuzz/<parser>;
an input that a parser does not survive is written to .cache/fuzz/found-<parser>-*. With
`-merge=1 tests/fuzz/corpus/<parser> .cache/fuzz/<parser>` the smallest set that reaches as much is
kept, which the tests read.
"""

import os
import sys

import atheris

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[0:1] = [ROOT, *(os.path.join(ROOT, room) for room in ("readers", "staging", "bench"))]

with atheris.instrument_imports(include=["dlio", "dlio_readers"]):
    from tests.fuzz.parsers import PARSERS, sound, survives


def main() -> None:
    """Fuzz until libFuzzer's own options, or an error, end it."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in PARSERS:
        raise SystemExit(f"name a parser: {', '.join(PARSERS)}")
    work = os.path.join(ROOT, ".cache", "fuzz")
    corpus = os.path.join(work, name)
    os.makedirs(corpus, exist_ok=True)
    with open(os.path.join(corpus, "sound"), "wb") as file:
        file.write(sound()[name])
    kept = os.path.join(HERE, "corpus", name)
    folders = [corpus, *([kept] if os.path.isdir(kept) else [])]
    named = any(not each.startswith("-") for each in sys.argv[1:])
    limits = ["-rss_limit_mb=6144", "-timeout=20", "-max_len=65536"]
    prefix = f"-artifact_prefix={os.path.join(work, f'found-{name}-')}"
    atheris.Setup(
        [sys.argv[0], *limits, prefix, *sys.argv[1:], *([] if named else folders)],
        lambda data: survives(PARSERS[name], data),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
