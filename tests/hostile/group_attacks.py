"""Attacks in folders of a group, on locks, on colleagues' checkpoints and on journals."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio.cli import main
from dlio.comm.single import SingleCommunicator
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio.util.whole_files import write_json
from tests.hostile.commands import (
    attack,
    checkpoint,
    daily,
    is_refused,
    link,
    packs,
    renamed_private,
)
from tests.hostile.deeds import curves, study, study_journal
from tests.hostile.users import Machine


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
    _through_a_link(machine, lambda out: curves(out / "curves"))
    _through_a_link(machine, curves)


@attack
def _her_own_link_in_a_folder_of_the_group_is_followed(machine: Machine) -> None:
    place, there = machine.folder("group"), machine.folder("group")

    def write() -> None:
        os.symlink(there, place / "out")
        write_json(str(place / "out" / "r.json"), 1)

    assert machine.alice.run(write) is None
    assert (there / "r.json").exists()


@daily
# SECURITY.md: S12
def _a_trials_checkpoint_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("group")
    machine.alice.run(lambda: study(place / "s"), umask=0o002)
    page = renamed_private(machine, place / "s" / "trials" / "0000", "checkpoint")
    assert machine.alice.run(lambda: study(place / "s")) is None
    assert page.read_text() == "dear diary"


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
            time.sleep(3600)
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
        with contextlib.closing(study_journal(place / "journal.log")) as journal:
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


ATTACKS: list[Any] = [each for each in globals().values() if isinstance(each, type(pytest.param()))]
