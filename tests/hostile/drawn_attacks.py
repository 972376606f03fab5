"""Attacks drawn over alice's deeds, the names that mallory has taken, the entries of these names,
and the rights of the folder; and those of locks, colleagues and journals.

In each alice's command ends in its result or in one line, within the deadline. That
her home has not changed is checked for all attacks.
"""

import codecs
import contextlib
import fcntl
import io
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio.comm.single import SingleCommunicator
from dlio.errors import UsageError
from dlio.train.callbacks.prometheus import Prometheus
from dlio.train.callbacks.tensorboard import TensorBoard
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio.train.sample_ledger import SampleLedger
from dlio.util.input_files import as_usage
from dlio.util.whole_files import write_json
from tests.hostile.commands import (
    attack,
    checkpoint,
    daily,
    fill_tier,
    is_refused,
    labels,
    link,
    packs,
)
from tests.hostile.optional import feature
from tests.hostile.users import Machine, User

_DRAWN = 180


def _ledger(path: Path) -> None:
    with SampleLedger(str(path), SingleCommunicator()) as ledger:
        ledger.finish()


def _study_journal(path: Path) -> Any:
    return feature("search.study_journal").StudyJournal(str(path))


def _journal(path: Path) -> int:
    with (
        as_usage(str(path), "name another --study"),
        contextlib.closing(_study_journal(path)) as journal,
    ):
        journal.append_logs([{"op_code": 0}])
        return len(list(journal.read_logs(0)))


def _page(machine: Machine, path: Path) -> object:
    report = machine.alice.home / ".cache" / "report.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text('{"machine": {}, "rows": [{"loader": "dlio", "samples_per_s": 3.5}]}')
    return _cli("bench", "html", report, "--output", path)


def _view(machine: Machine, path: Path) -> object:
    words = ("--output", path, "--no-browser", "--count", 1, "--crop", 0)
    return _cli("view", machine.data, *words)


def _script(path: Path) -> object:
    return _cli("launch", "--slurm", "nodes=1", "--script", path, "train", "data")


def _curves(path: Path) -> None:
    curves = TensorBoard()
    curves._folder = str(path)
    with curves:
        curves._scalar("loss", 1.0, 1)


def load_commands(place: Path, data: Path) -> None:
    """Do once what users do later, who cannot read the modules of the interpreter."""
    codecs.lookup("ascii")
    machine = Machine(User(0, 0, place), User(0, 0, place), place, data)
    for name in ("view", "ls html", "script", "curves"):
        path = place / name
        path.mkdir()
        with contextlib.suppress(UsageError):  # Without TensorBoard.
            DEEDS[name][0](machine, path)


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
    assert last.startswith("dlio: error: "), said.getvalue()
    return f"UsageError: {last}"


DEEDS: dict[str, tuple[Callable[[Machine, Path], object], tuple[str, ...]]] = {
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
    "curves": (lambda _, at: _curves(at / "out"), ("out",)),
    "curves below": (lambda _, at: _curves(at / "way" / "out"), ("way", "way/out")),
    "metrics": (lambda _, at: Prometheus(str(at / "out")) and None, ("out",)),
    "read trace": (lambda _, at: _cli("ledger", at / "out", "--samples", 3), ("out",)),
    "read report": (lambda _, at: _cli("bench", "compare", at / "out", at / "out"), ("out",)),
    "status": (lambda _, at: _cli("status", "--tiers", at / "out"), ("out",)),
    "evict": (lambda _, at: _cli("evict", "--everything", "--tiers", at / "out"), ("out",)),
    "verify": (lambda _, at: _cli("verify", at / "out"), ("out",)),
    "ls": (lambda _, at: _cli("ls", at / "out"), ("out",)),
    "cache clean": (lambda _, at: _cleaned(at / "out"), ("out",)),
}
"""Deeds of alice in a folder, and the names in it that mallory may have taken."""


def _cleaned(path: Path) -> object:
    os.environ["DLIO_CACHE"] = str(path)
    return _cli("cache", "clean")


def _free_folder(path: Path, _: Machine) -> None:
    path.mkdir()
    path.chmod(0o777)
    (path / ".dlio").write_text("dlio\n")


def _free_file(path: Path, _: Machine) -> None:
    path.write_text("{}\n")
    path.chmod(0o666)


def _socket(path: Path, _: Machine) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _huge_file(path: Path, _: Machine) -> None:
    """A sparse file: reading all of it would take the machine's memory."""
    path.touch()
    path.chmod(0o666)
    os.truncate(path, 1 << 40)


PLANTS: dict[str, Callable[[Path, Machine], object]] = {
    "link home": lambda path, machine: path.symlink_to(machine.alice.home / "thesis"),
    "link file": lambda path, machine: path.symlink_to(machine.alice.home / "profile"),
    "link new": lambda path, machine: path.symlink_to(machine.alice.home / "new"),
    "link device": lambda path, _: path.symlink_to("/dev/zero"),
    "fifo": lambda path, _: os.mkfifo(path, 0o666),
    "folder": _free_folder,
    "file": _free_file,
    "socket": _socket,
    "hard link": lambda path, machine: path.hardlink_to(machine.mallory.home / "profile"),
    "link process": lambda path, _: path.symlink_to("/proc/self/root/dev/zero"),
    "link fd": lambda path, _: path.symlink_to("/proc/self/fd/0"),
    "link itself": lambda path, _: path.symlink_to(path.name),
    "huge": _huge_file,
}


def _drawn(deed: str, name: str, plant: str, rights: str) -> Any:
    def act(machine: Machine) -> None:
        place = machine.folder(rights)
        path = place / name.replace(f"dlio-{os.getuid()}", f"dlio-{machine.alice.uid}")

        def prepare() -> None:
            os.umask(0)
            path.parent.mkdir(exist_ok=True)
            os.chmod(path.parent, 0o777) if path.parent != place else None
            PLANTS[plant](path, machine)

        assert machine.mallory.run(prepare) is None
        before = sorted(os.listdir(path)) if plant == "folder" else []
        result = machine.alice.run(lambda: DEEDS[deed][0](machine, place))
        worked = result is None or not isinstance(result, str) or result.startswith("/")
        assert worked or is_refused(result) or result.startswith("AssertionError"), result
        if plant == "folder" and not worked:
            assert sorted(os.listdir(path)) == before

    act.__name__ = f"{deed} {name} {plant} {rights}".replace("/", "-").replace(" ", "_")
    return attack(act)


_EVERY = [
    (deed, name, plant, rights)
    for deed, (_, names) in DEEDS.items()
    for name, plant, rights in itertools.product(names, PLANTS, ("sticky", "open", "group"))
]


# A folder of the group


def _through_a_link(machine: Machine, write: Callable[[Path], object]) -> None:
    place = machine.folder("group")
    link(machine, place / "out", machine.alice.home / "thesis")
    result = machine.alice.run(lambda: write(place / "out"))
    assert is_refused(result), result
    assert "link" in result


@daily
# SECURITY.md: S11
def _a_report_below_a_link_in_a_folder_of_the_group(machine: Machine) -> None:
    _through_a_link(machine, lambda out: write_json(str(out / "r.json"), 1))


@attack
def _a_checkpoint_below_a_link_in_a_folder_of_the_group(machine: Machine) -> None:
    _through_a_link(machine, lambda out: checkpoint(out / "ck"))


@attack
def _a_packing_below_a_link_in_a_folder_of_the_group(machine: Machine) -> None:
    _through_a_link(machine, lambda out: packs(machine.data, out / "packed"))


@daily
def _curves_below_a_link_in_a_folder_of_the_group(machine: Machine) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    _through_a_link(machine, lambda out: _curves(out / "curves"))
    _through_a_link(machine, _curves)


@attack
def _her_own_link_in_a_folder_of_the_group_is_followed(machine: Machine) -> None:
    place, there = machine.folder("group"), machine.folder("group")

    def write() -> None:
        os.symlink(there, place / "out")
        write_json(str(place / "out" / "r.json"), 1)

    assert machine.alice.run(write) is None
    assert (there / "r.json").exists()


# Locks


@daily
# SECURITY.md: S15
def _a_lock_of_checkpoints_is_not_held_by_a_reader(machine: Machine) -> None:
    place = machine.folder("group")
    place.chmod(0o755)
    os.chown(place, machine.alice.uid, -1)
    assert isinstance(machine.alice.run(lambda: checkpoint(place)), list)

    def hold() -> None:
        descriptor = os.open(place / ".lock", os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        time.sleep(30)

    assert "PermissionError" in str(machine.mallory.run(hold))
    assert isinstance(machine.alice.run(lambda: checkpoint(place, 2)), list)


@attack
def _the_holder_of_a_lock_is_named(machine: Machine) -> None:
    place = machine.folder("group")
    assert isinstance(machine.alice.run(lambda: checkpoint(place), umask=0o002), list)
    read, write = os.pipe()
    holder = os.fork()
    if not holder:
        os.setgroups([54321])
        os.setresgid(*[machine.mallory.gid] * 3)
        os.setresuid(*[machine.mallory.uid] * 3)
        with contextlib.suppress(BaseException):
            fcntl.flock(os.open(place / ".lock", os.O_RDWR), fcntl.LOCK_EX)
            os.write(write, b"x")
            time.sleep(60)
        os._exit(1)
    try:
        assert os.read(read, 1) == b"x"
        result = machine.alice.run(lambda: checkpoint(place, 2))
        assert is_refused(result), result
        assert f"process {holder} of user {machine.mallory.uid}" in result
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(read)
        os.close(write)


@daily
# SECURITY.md: S18
def _a_colleague_goes_on_with_a_shared_folder_of_checkpoints(machine: Machine) -> None:
    for umask in (0o022, 0o077, 0o002):
        place = machine.folder("group") / "ck"

        def first(place: Path = place) -> list[str]:
            return checkpoint(place)

        def go_on(place: Path = place) -> list[float]:
            with Checkpoints(str(place), SingleCommunicator(), keep=2) as checkpoints:
                newest = checkpoints.newest()
                assert newest is not None
                read: list[float] = newest.read("")["rank0/x"].tolist()
            checkpoint(place, 2)
            return read

        place.mkdir()
        os.chown(place, machine.alice.uid, 54321)
        place.chmod(0o2775)
        assert isinstance(machine.alice.run(first, umask=umask), list)
        assert machine.mallory.run(go_on, umask=umask) == [0.0, 1.0, 2.0]
        assert (place / ".lock").stat().st_mode & 0o777 == 0o660


# A journal


@attack
# SECURITY.md: S17
def _a_journal_is_exchanged_for_a_link_while_the_search_runs(machine: Machine) -> None:
    place = machine.folder("open")

    def run() -> int:
        with contextlib.closing(_study_journal(place / "journal.log")) as journal:
            journal.append_logs([{"op_code": 0}])
            os.rename(place / "journal.log", place / "taken")  # As mallory could at this time.
            os.symlink(machine.alice.home / "profile", place / "journal.log")
            journal.append_logs([{"op_code": 1}])
            return len(list(journal.read_logs(0)))

    assert machine.alice.run(run) == 2


@attack
# SECURITY.md: S14
def _no_library_makes_files_that_all_may_write(machine: Machine) -> None:
    """With any umask, in a command: Optuna and TensorBoard make files as `open` does."""
    place = machine.folder("sticky")

    def work() -> int:
        from dlio import cli

        def opened(_: list[str]) -> None:
            (place / "events").write_text("")
            (place / "logs").mkdir()

        vars(cli)["run_command"] = opened
        with contextlib.suppress(SystemExit):
            main(["train"])
        return os.umask(0)

    assert machine.alice.run(work, umask=0) == 0
    for name in ("events", "logs"):
        assert not (place / name).stat().st_mode & 0o002


ATTACKS: list[Any] = [
    *(each for each in globals().values() if isinstance(each, type(pytest.param()))),
    *(_drawn(*each) for each in random.Random(45).sample(_EVERY, _DRAWN)),
]
