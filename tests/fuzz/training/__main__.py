"""Judge drawn scripts: `python -m tests.fuzz.training --seeds 0 500 --keep failures`.

A failing script is written to the folder of --keep, with the command that repeats it. The last
lines count the verdicts, with the reasons and notices. Exit code 1 if
any script is silent, hangs or ends without a true reason.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.conftest import MpiRun, mpirun
from tests.fuzz.training.choices import draw
from tests.fuzz.training.faults import FAULTS
from tests.fuzz.training.judge import (
    GOOD,
    Case,
    Verdict,
    all_ways,
    judge,
    repeat_command,
    smaller,
)
from tests.warm.pool import WarmPython

_CHUNK = 80
_FEW = 6
"""Scripts that are judged at once where the first that fails ends the program."""


def main() -> int:
    """Judge the scripts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("choices", nargs="?", help="one script's choices, as JSON")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--way", choices=("run", "distribute", "slices"), help="this way alone")
    parser.add_argument("--ranks", type=int, default=None, help="this number of ranks alone")
    parser.add_argument("--without", nargs="*", default=(), help="features, or feature=alternative")
    parser.add_argument("--keep", default="failures", help="folder for scripts that fail")
    parser.add_argument("--smaller", action="store_true", help="make failing scripts smaller")
    parser.add_argument(
        "--fault", choices=FAULTS, help="break dlio in this way: ends when it is seen"
    )
    given = parser.parse_args()
    warm = WarmPython()
    sys.executable = warm.executable
    warm.start()
    warm.wait()
    try:
        return _all(given, mpirun.__wrapped__())  # type: ignore[attr-defined]
    finally:
        sys.executable = warm.real
        warm.close()


def _all(given: argparse.Namespace, mpi: MpiRun) -> int:
    if given.choices is not None:
        cases = [Case("given", json.loads(given.choices), given.way or "run", given.ranks or 2)]
    else:
        cases = []
        for seed in range(*given.seeds):
            choices = {
                name: value
                for name, value in draw(seed).items()
                if name not in given.without and f"{name}={value}" not in given.without
            }
            cases += all_ways(seed, choices)
    cases = [c for c in cases if given.way in (None, c.way) and given.ranks in (None, c.ranks)]
    tally = _Tally()
    many = _FEW if given.fault else _CHUNK
    for start in range(0, len(cases), many):
        part = cases[start : start + many]
        with tempfile.TemporaryDirectory(prefix="dlio-fuzz-") as folder:
            verdicts = judge(part, Path(folder), mpi, given.fault)
            for case, verdict in zip(part, verdicts, strict=True):
                tally.add(case, verdict)
                if verdict.kind in ("chaotic", "invalid"):
                    print(f"{case.name}: {verdict.kind}: {verdict.detail}", flush=True)
                if verdict.kind not in GOOD:
                    print(f"{case.name}: {verdict.kind}: {verdict.detail}", flush=True)
                    least = case
                    if given.smaller:
                        least = smaller(case, Path(folder) / f"smaller-{case.name}", mpi)
                    _keep(least, verdict.detail, Path(given.keep))
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{start + len(part)} of {len(cases)}: {dict(tally.kinds)}", flush=True)
        if given.fault and any(kind not in GOOD for kind in tally.kinds):
            break
    tally.tell()
    return int(any(kind not in GOOD for kind in tally.kinds))


class _Tally:
    """Counts of verdicts."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._apart: dict[str, list[float]] = {}

    def add(self, case: Case, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind == "same":
            precision = case.choices.get("precision", "float32")
            self._apart.setdefault(precision, []).append(verdict.apart)
        for text in verdict.detail.split("dlio run: "):
            # The same reason at other lines, with other numbers.
            reason = re.sub(r"(\w+\.py:#(, )?)+", "LINE", re.sub(r"-?[\d.]*\d", "#", text))
            self._reasons[f"{verdict.kind}: {reason.strip()}"] += 1 if reason.strip() else 0

    def tell(self) -> None:
        for precision, each in sorted(self._apart.items()):
            ordered = sorted(each)
            within = [ordered[int(part * (len(ordered) - 1))] for part in (0.5, 0.9, 0.99, 1.0)]
            print(
                f"{precision}: {len(each)} the same, median and 90 %, 99 %, all of the largest "
                f"differences within {', '.join(f'{value:.1e}' for value in within)}"
            )
        for reason, count in self._reasons.most_common():
            print(f"{count} {reason}")


def _keep(case: Case, detail: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = f"# {detail}\n# {repeat_command(case)}\n"
    (folder / f"{case.name}.py").write_text(head + case.script, encoding="utf-8")
    print(f"  {json.dumps(case.choices)}\n  {repeat_command(case)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
