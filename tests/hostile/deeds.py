"""Deeds of alice where mallory may have taken names: functions and commands of dlio."""

import codecs
import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.launch import rank_log
from dlio.launch.job_folder import open_job_folder
from dlio.train.callbacks.prometheus import Prometheus
from dlio.train.callbacks.tensorboard import TensorBoard
from dlio.train.sample_ledger import SampleLedger
from dlio.util.input_files import as_usage
from dlio.util.whole_files import write_json
from tests.hostile.commands import checkpoint, fill_tier, labels, packs
from tests.hostile.optional import feature
from tests.hostile.users import Machine, User

Deed = Callable[[Machine, Path], object]


def _ledger(path: Path) -> None:
    with SampleLedger(str(path), SingleCommunicator()) as ledger:
        ledger.finish()


def study_journal(path: Path) -> Any:
    return feature("search.study_journal").StudyJournal(str(path))


def _journal(path: Path) -> int:
    with (
        as_usage(str(path), "name another --study"),
        contextlib.closing(study_journal(path)) as journal,
    ):
        journal.append_logs([{"op_code": 0}])
        return len(list(journal.read_logs(0)))


def _page(machine: Machine, path: Path) -> object:
    report = machine.alice.home / ".cache" / "report.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text('{"machine": {}, "rows": [{"loader": "dlio", "samples_per_s": 3.5}]}')
    report.chmod(0o600)  # It is not the command that wrote it.
    return _cli("bench", "html", report, "--output", path)


def _view(machine: Machine, path: Path) -> object:
    words = ("--output", path, "--no-browser", "--count", 1, "--crop", 0)
    return _cli("view", machine.data, *words)


def _script(path: Path) -> object:
    return _cli("launch", "--slurm", "nodes=1", "--script", path, "train", "data")


def curves(path: Path) -> None:
    written = TensorBoard()
    written._folder = str(path)
    with written:
        written._scalar("loss", 1.0, 1)


def load_commands(place: Path, data: Path, names: Iterable[str]) -> None:
    """Load the modules of these deeds: users cannot read the modules of the interpreter.

    Each deed is done in a process of its own, as users do it: threads that it starts stay there.
    """
    for encoding in ("ascii", "utf-16", "utf-16-be", "utf-32", "utf-32-be", "utf-32-le"):
        codecs.lookup(encoding)
    root = User(0, 0, place)
    for name in names:
        deed, path = DEEDS[name][0], place / name
        (path / "way").mkdir(parents=True)

        def done(deed: Deed = deed, path: Path = path) -> list[object]:
            said, before = None, set(sys.modules)
            with contextlib.suppress(UsageError):  # Without TensorBoard.
                said = deed(Machine(root, root, place, data), path)
            return [str(said), *(sys.modules.keys() - before)]

        said, *modules = root.run(done)
        assert "such option" not in said, (name, said)
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def _cached(machine: Machine, path: Path) -> list[int]:
    os.environ["DLIO_CACHE"] = str(path)
    return labels(machine.data)


def _cli(*words: object) -> object:
    """Run a command; an error of users' is returned as others are."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main([str(word) for word in words])
        except SystemExit as error:
            if error.code == 0:
                return None
    last = (said.getvalue().splitlines() or [""])[-1]
    if not last.startswith("dlio: error: "):
        raise RuntimeError(said.getvalue())
    return f"UsageError: {last}"


def _train(*options: object) -> Deed:
    """Return the deed of a training with an option that names `out`."""
    small = ("--model", "resnet(width=4)", "--epochs", 1, "--batch-size", 4, "--image-size", 32)

    def act(machine: Machine, at: Path) -> object:
        named = [at / each if each in _PLACES else each for each in options]
        return _cli("train", machine.data, *small, "--tiers", "none", *named)

    return act


def _export(machine: Machine, path: Path) -> object:
    weights = machine.alice.home / ".cache" / "weights.pt"
    weights.parent.mkdir(exist_ok=True)
    said = _train("--save", weights)(machine, path)
    words = ("--model", "resnet(width=4)", "--calibrate", machine.data)
    return said or _cli("export", weights, path, *words)


def _cleaned(path: Path) -> object:
    os.environ["DLIO_CACHE"] = str(path)
    return _cli("cache", "clean")


def study(path: Path) -> object:
    """Have a search end a trial, and remove its checkpoints."""
    objective = feature("search.objectives").Objective("loss", True)
    optuna = pytest.importorskip("optuna")
    folder = path / "trials" / "0000"
    with feature("search.study").Study(str(path), [objective], {"lr": "1"}, {"ranks": 1}) as made:
        record = made.add(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
        folder.mkdir(exist_ok=True)
        checkpoint(path / "trials" / f"{record.number:04}" / "checkpoint")
        made.end(record, "failed", "as an example")
        made.tidy()
    return None


def _log(path: Path) -> object:
    """Have a rank write its log, as `dlio launch --logs` does."""
    reads, writes = os.pipe()
    process = os.fork()
    if not process:
        os.dup2(writes, 2)
        try:
            rank_log.main(str(path), ["/bin/echo"])
        except UsageError as error:
            os.write(writes, f"UsageError: {error}".encode())
        os._exit(1)
    os.close(writes)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with os.fdopen(reads) as file:
        return file.read() if code else None


def _with_tmpdir(at: Path, act: Callable[[], object]) -> object:
    tempfile.tempdir = os.environ["TMPDIR"] = str(at)
    return act()


def _job() -> object:
    with open_job_folder():
        return None


_PLACES = ("out", "way/out")
_OWN = f"dlio-{os.getuid()}"
_IMAGINED = ("--samples", 100, "--ranks-per-node", 2)
DEEDS: dict[str, tuple[Deed, tuple[str, ...]]] = {
    "pack": (lambda m, at: packs(m.data, at / "out"), ("out", ".out.packing")),
    "checkpoint": (
        lambda _, at: checkpoint(at / "out"),
        ("out", "out/.lock", "out/.unfinished-00000001", "out/step-00000001"),
    ),
    "report": (lambda _, at: write_json(str(at / "out"), {"a": 1}), ("out",)),
    "report below": (lambda _, at: write_json(str(at / "way" / "out"), 1), ("way", "way/out")),
    "pack below": (lambda m, at: packs(m.data, at / "way" / "out"), ("way", "way/.out.packing")),
    "checkpoint below": (lambda _, at: checkpoint(at / "way" / "out"), ("way", "way/out")),
    "ledger": (lambda _, at: _ledger(at / "out"), ("out", "out.tmp")),
    "journal": (lambda _, at: _journal(at / "out"), ("out",)),
    "tier": (lambda _, at: fill_tier(at), (f"dlio-{os.getuid()}",)),
    "cache": (lambda m, at: _cached(m, at / "out"), ("out",)),
    "html": (lambda m, at: _page(m, at / "out"), ("out",)),
    "view": (lambda m, at: _view(m, at / "out"), ("out",)),
    "view below": (lambda m, at: _view(m, at / "way" / "out"), ("way", "way/out")),
    "ls html": (lambda m, at: _cli("ls", m.data, "--html", at / "out"), ("out",)),
    "script": (lambda _, at: _script(at / "out"), ("out",)),
    "curves": (lambda _, at: curves(at / "out"), ("out",)),
    "curves below": (lambda _, at: curves(at / "way" / "out"), ("way", "way/out")),
    "metrics": (lambda _, at: Prometheus(str(at / "out")) and None, ("out",)),
    "read trace": (lambda _, at: _cli("ledger", at / "out", "--samples", 3), ("out",)),
    "read report": (lambda _, at: _cli("bench", "compare", at / "out", at / "out"), ("out",)),
    "status": (lambda _, at: _cli("status", "--tiers", at / "out"), ("out",)),
    "evict": (lambda _, at: _cli("evict", "--all", "--tiers", at / "out"), ("out",)),
    "verify": (lambda _, at: _cli("verify", at / "out"), ("out",)),
    "ls": (lambda _, at: _cli("ls", at / "out"), ("out",)),
    "cache clean": (lambda _, at: _cleaned(at / "out"), ("out",)),
    "stage": (
        lambda m, at: _cli("stage", m.data, "--tiers", f"{at / 'out'}:64MiB"),
        ("out", f"out/dlio-{os.getuid()}"),
    ),
    "stage report": (
        lambda m, at: _cli("stage", m.data, "--tiers", f"{at}:64MiB", "--report", at / "out"),
        ("out",),
    ),
    "pack tar": (
        lambda m, at: _cli("pack", m.data, at / "out", "--format", "tar", "--report", at / "r"),
        ("out", ".out.packing", "r"),
    ),
    "train report": (_train("--report", "out"), ("out",)),
    "train checkpoint": (_train("--checkpoint", "out"), ("out", "out/.lock", "out/step-00000003")),
    "train resume": (
        _train("--checkpoint", "out", "--resume"),
        ("out", "out/.lock", "out/step-00000001"),
    ),
    "train save": (_train("--save", "way/out"), ("way", "way/out")),
    "train trace": (_train("--trace", "out"), ("out",)),
    "train curves": (_train("--tensorboard", "way/out"), ("way", "way/out")),
    "train matrices": (_train("--dump-matrices", "out"), ("out", "out/epoch-0001")),
    "train times": (_train("--trace-out", "out"), ("out",)),
    "train weights": (_train("--weights", "out"), ("out",)),
    "train replay": (_train("--replay", "out"), ("out",)),
    "train config": (_train("--config", "out"), ("out",)),
    "export": (lambda m, at: _export(m, at / "out.nir"), ("out.nir",)),
    "study": (
        lambda _, at: study(at / "out"),
        ("out", "out/lock", "out/journal.log", "out/search.json", "out/trials"),
    ),
    "log": (lambda _, at: _log(at / "out"), ("out", "out/rank-0.log")),
    "job": (lambda _, at: _with_tmpdir(at, _job), ("dlio-job-", "dlio-job-abc")),
    "join": (
        lambda _, at: _with_tmpdir(at, lambda: _cli("join", "abc")),
        ("dlio-job-abc", "dlio-job-abc/alive"),
    ),
    "leave": (
        lambda _, at: _with_tmpdir(at, lambda: _cli("leave", "abc", "--nodes", "a")),
        ("dlio-job-abc", "dlio-job-abc/alive"),
    ),
    "near index": (
        lambda m, at: _with_tmpdir(at, lambda: _cached(m, at / "cache")),
        (f"dlio-{os.getuid()}", "cache"),
    ),
    "demo": (
        lambda _, at: _cli("demo", "--draw-only", "--folder", at / "out"),
        ("out", "out/pictures"),
    ),
    "doctor": (
        lambda _, at: _cli("doctor", "--quick", "--report", at / "out", "--tiers", f"{at}:1MiB"),
        ("out", f"dlio-{os.getuid()}"),
    ),
    "pin": (lambda m, at: _cli("pin", m.data, "--tiers", at / "out"), ("out",)),
    "heal": (lambda _, at: _cli("verify", at / "out", "--heal"), ("out",)),
    "evict job": (lambda _, at: _cli("evict", "--job", "1", "--tiers", at), (_OWN, f"{_OWN}/x")),
    "average": (
        _train("--checkpoint", "out", "--ema", "0.9", "--resume"),
        ("out", "out/.unfinished-00000003", "out/step-00000009"),
    ),
    "eval": (lambda m, at: _cli("eval", m.data, "--weights", at / "out"), ("out",)),
    "export weights": (lambda _, at: _cli("export", at / "out", at / "x.nir"), ("out", "x.nir")),
    "view table": (lambda _, at: _cli("view", at / "out", "--no-browser"), ("out",)),
    "page of folder": (lambda _, at: _cli("bench", "html", at / "out"), ("out", "out/r.json")),
    "baseline": (
        lambda _, at: _cli("bench", "watch", "--part", "tiers", "--baseline", at / "out"),
        ("out",),
    ),
    "workload": (lambda _, at: _cli("bench", "storage", at, "--workload", at / "out"), ("out",)),
    "pack order": (lambda m, at: _cli("pack", at / "out", at / "way" / "out"), ("out", "way")),
    "plan": (lambda _, at: _cli("plan", *_IMAGINED, "--report", at / "out"), ("out",)),
    "simulate": (
        lambda _, at: _cli("simulate", *_IMAGINED, "--report", at / "way" / "out"),
        ("way", "way/out"),
    ),
}
"""Deeds of alice in a folder, and the names in it that mallory may have taken."""
DAILY = ("view", "ls html", "script", "curves", "report", "study")
"""Those that are tried by day, too: to load the modules of others takes long."""
