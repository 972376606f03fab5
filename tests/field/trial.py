"""The runs of a script: in one process, thrice; on ranks; and by `dlio run --check`."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.field.differences import (
    differing_files,
    differing_lines,
    largest_difference,
    largest_number_difference,
    load_tensors,
)
from tests.field.field_script import FieldScript

_KEEPER: Final = str(Path(__file__).with_name("keeper"))
_LIMIT_S: Final = 900.0
_DLIO: Final = str(Path(sys.executable).with_name("dlio"))


@dataclass(frozen=True, slots=True)
class FieldRun:
    """One run of a script."""

    code: int
    printed: str
    errors: str
    seconds: float
    folder: str
    kept: str
    """Folder with the parameters of each rank."""

    @property
    def notices(self) -> list[str]:
        """Lines that dlio has printed."""
        return [line for line in self.errors.splitlines() if line.startswith("dlio")]

    @property
    def other_errors(self) -> str:
        """Lines on standard error that are not dlio's."""
        lines = [line for line in self.errors.splitlines() if not line.startswith("dlio")]
        return "\n".join(lines)


class Trial:
    """All runs of a script, each in a fresh folder.

    Args:
        checkout: the script's repository.
        folder: an empty folder for the runs.
    """

    def __init__(self, script: FieldScript, checkout: str, folder: str, ranks: int) -> None:
        self._script, self._checkout, self._folder = script, checkout, folder
        self._ranks = ranks
        words = ["run", "-n", str(ranks), *script.options]
        self.one = self._run("one", [sys.executable], {})
        self.again = self._run("again", [sys.executable], {})
        """One process with the same seeds: differences are by nature."""
        self.noise = self._run("noise", [sys.executable], {"FIELD_RESEED": "7"})
        """One process with other random numbers from the first forward pass on."""
        self.ranks = self._run("ranks", [_DLIO, *words], {})
        self.check: FieldRun | None = None
        if script.check_steps:
            words += ["--check", str(script.check_steps)]
            self.check = self._run("check", [_DLIO, *words], {})

    def _run(self, way: str, start: list[str], environment: dict[str, str]) -> FieldRun:
        script = self._script
        inside = script.folder or os.path.dirname(script.path)
        folder = os.path.join(self._folder, way, inside or "script")
        kept = os.path.join(self._folder, way + ".kept")
        os.mkdir(os.path.join(self._folder, way))
        os.mkdir(kept)
        shutil.copytree(os.path.join(self._checkout, inside), folder)
        script.make_inputs(folder)
        began = time.monotonic()
        done = subprocess.run(
            [*start, os.path.relpath(script.path, inside or os.curdir), *script.arguments],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{_KEEPER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "FIELD_KEEPS": kept,
                "FIELD_SEED": "0",
                **script.environment,
                **environment,
            },
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
        seconds = time.monotonic() - began
        for name, text in (("out", done.stdout), ("err", done.stderr)):
            Path(f"{self._folder}/{way}.{name}").write_text(text, encoding="utf-8")
        return FieldRun(done.returncode, done.stdout, done.stderr, seconds, folder, kept)

    def lines(self, run: FieldRun) -> list[str]:
        """Return the printed lines of a run that are not those of one process."""
        printed = [each.printed.replace(each.folder, ".") for each in (self.one, run)]
        return differing_lines(printed[0], printed[1], self._script.times)

    def weights(self, run: FieldRun, rank: int = 0) -> tuple[float, str]:
        """Return the largest relative difference of a rank's parameters from one process's, and
        the parameter."""
        return self._apart(f"{self.one.kept}/0.pt", f"{run.kept}/{rank}.pt")

    def _apart(self, first: str, second: str) -> tuple[float, str]:
        if not (os.path.exists(first) and os.path.exists(second)):
            return float("nan"), "none were kept"
        one, other = load_tensors(first), load_tensors(second)
        if one.keys() != other.keys():
            return float("inf"), f"{len(one)} tensors, {len(other)} in the other run"
        return largest_difference(one, other)

    def report(self) -> str:
        """Return the results, as lines of text."""
        script, one = self._script, self.one
        lines = [
            f"== {script.name}: {script.path} {' '.join(script.arguments)}",
            f"needed: {' '.join(script.options) or 'nothing'}",
            f"exit codes: one process {one.code}, again {self.again.code}, noise "
            f"{self.noise.code}, {self._ranks} ranks {self.ranks.code}, seconds: "
            f"{one.seconds:.0f}, {self.ranks.seconds:.0f}",
        ]
        lines += [f"  {line}" for line in one.errors.splitlines()[-5:] if one.code]
        for name, run in (("again", self.again), ("noise", self.noise), ("ranks", self.ranks)):
            differing = self.lines(run)
            files, stored = differing_files(one.folder, run.folder)
            apart, where = self.weights(run)
            numbers, count = largest_number_difference(differing), len(one.printed.splitlines())
            lines.append(
                f"{name}: {len(differing)} of {count} lines differ (numbers by {numbers:.1e}); "
                f"weights by {apart:.1e} {where}; "
                f"files: {', '.join(files) or 'the same'}, stored numbers by {stored:.1e}"
            )
            if run is self.ranks:
                lines += [f"  {line}" for line in differing[:20]]
        apart, where = self._apart(f"{self.ranks.kept}/0.pt", f"{self.ranks.kept}/1.pt")
        lines.append(f"rank 1 from rank 0: weights by {apart:.1e} {where}")
        lines += [f"  {line}" for line in self.ranks.notices]
        extra = set(self.ranks.other_errors.splitlines()) - set(one.errors.splitlines())
        lines += [f"  on ranks alone: {line}" for line in sorted(extra)[:20]]
        if self.check is not None:
            lines.append(f"--check {script.check_steps}: exit code {self.check.code}")
            lines += [f"  {line}" for line in self.check.printed.splitlines()]
            lines += [f"  {line}" for line in self.check.errors.splitlines()[-8:]]
        return "\n".join(lines)
