"""Coverage-guided fuzzing of the parsers: `python tests/fuzz/fuzz.py block -max_total_time=60`.

Needs atheris (`pip install atheris`). Without a parser's name, all of them by the first byte.
"""

import os
import sys

import atheris

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [ROOT, *(os.path.join(ROOT, room) for room in ("readers", "staging", "bench"))]

with atheris.instrument_imports(include=["dlio", "dlio_readers", "tests.fuzz"]):
    from tests.fuzz.parsers import PARSERS, sound, survives


def main() -> None:
    """Fuzz until libFuzzer's own options, or an error, end it."""
    names = list(PARSERS)
    chosen = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in names else None

    def one(data: bytes) -> None:
        if chosen is not None:
            survives(PARSERS[chosen], data)
        elif data:
            survives(PARSERS[names[data[0] % len(names)]], data[1:])

    corpus = os.path.join(ROOT, ".cache", "fuzz")
    os.makedirs(corpus, exist_ok=True)
    for k, (name, data) in enumerate(sound().items()):
        if chosen in (None, name):
            seed = data if chosen else bytes([k]) + data
            with open(os.path.join(corpus, f"sound-{name}"), "wb") as file:
                file.write(seed)
    atheris.Setup([*sys.argv, "-rss_limit_mb=2048", "-timeout=20", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
