"""Attacks on packings, checkpoints and files that alice names."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio.train.sample_ledger import SampleLedger
from dlio.util.whole_files import write_json
from dlio_staging.pack_folder import pack
from dlio_staging.pack_plan import PackOptions, PackPlan
from tests.hostile.commands import (
    attack,
    checkpoint,
    daily,
    is_refused,
    labels,
    link,
    packs,
    renamed_private,
)
from tests.hostile.users import Machine


def _linked_packing(machine: Machine, kind: str) -> None:
    place = machine.folder(kind)
    link(machine, place / ".packed.packing", machine.alice.home)
    result = machine.alice.run(lambda: packs(machine.data, place / "packed"))
    assert is_refused(result), result
    assert ".packed.packing" in result


@daily
def _a_packing_is_a_link_to_her_home(machine: Machine) -> None:
    _linked_packing(machine, "sticky")


@attack
def _a_packing_is_a_link_where_all_may_rename(machine: Machine) -> None:
    _linked_packing(machine, "open")


@attack
def _a_packing_is_a_link_in_a_folder_of_the_group(machine: Machine) -> None:
    _linked_packing(machine, "group")


@daily
def _a_packing_is_begun_and_poisoned(machine: Machine) -> None:
    place = machine.folder("sticky")

    def plant() -> None:
        os.umask(0)
        folder = place / ".packed.packing"
        for name in ("data", "done"):
            (folder / name).mkdir(parents=True)
        with contextlib.closing(open_reader(str(machine.data))) as reader:
            del reader
        plan = PackPlan(str(machine.data), PackOptions(shard_bytes=1 << 14))
        (folder / ".dlio").write_text("dlio packing 0\n")
        (folder / "plan.json").write_text(json.dumps({"key": plan.key}))
        (folder / "done" / "0-0.json").write_text('{"data_bytes": 1, "file_bytes": 1}')

    assert machine.mallory.run(plant) is None
    result = machine.alice.run(lambda: packs(machine.data, place / "packed"))
    assert is_refused(result), result
    assert not (place / "packed").exists()


@attack
# SECURITY.md: S12
def _a_packing_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("open")
    page = renamed_private(machine, place, ".packed.packing")
    assert is_refused(machine.alice.run(lambda: packs(machine.data, place / "packed")))
    assert page.read_text() == "dear diary"


@attack
def _a_packing_is_a_fifo(machine: Machine) -> None:
    place = machine.folder("sticky")
    machine.mallory.run(lambda: os.mkfifo(place / ".packed.packing"))
    assert is_refused(machine.alice.run(lambda: packs(machine.data, place / "packed")))


@attack
def _a_destination_is_a_dangling_link(machine: Machine) -> None:
    place = machine.folder("sticky")
    link(machine, place / "packed", machine.alice.home / "new")
    assert is_refused(machine.alice.run(lambda: packs(machine.data, place / "packed")))


@attack
def _a_folder_on_the_way_is_a_link_to_her_home(machine: Machine) -> None:
    place = machine.folder("sticky")
    link(machine, place / "work", machine.alice.home)
    assert is_refused(machine.alice.run(lambda: packs(machine.data, place / "work" / "packed")))


@attack
def _a_packing_is_swapped_while_it_is_written(machine: Machine) -> None:
    place, packing = machine.folder("open"), ".packed.packing"
    elsewhere = machine.alice.home / "thesis"

    def swapped() -> int:
        def swap(*_: int) -> None:
            if not (place / "taken").exists():
                # As mallory could at this time: all may rename here.
                os.rename(place / packing, place / "taken")
                os.symlink(elsewhere, place / packing)

        return pack(
            str(machine.data), str(place / "packed"), shard_bytes=1 << 14, progress=swap
        ).samples

    machine.alice.run(swapped)
    assert not (place / "packed").exists() or labels(place / "packed") == labels(machine.data)


@attack
def _a_packing_in_a_folder_of_the_group_works(machine: Machine) -> None:
    place = machine.folder("group")
    result = machine.alice.run(lambda: packs(machine.data, place / "packed"), umask=0o002)
    assert result == len(labels(machine.data)), result
    assert machine.mallory.run(lambda: labels(place / "packed")) == labels(machine.data)


@attack
def _a_folder_of_a_member_of_the_group_where_all_may_write_works(machine: Machine) -> None:
    place = machine.folder("sticky")

    def make() -> None:
        (place / "project").mkdir()
        os.chown(place / "project", -1, 54321)
        (place / "project").chmod(0o2775)

    machine.mallory.run(make)
    result = machine.alice.run(lambda: packs(machine.data, place / "project" / "packed"))
    assert result == len(labels(machine.data)), result


def _lock_of(machine: Machine, place: Path, make: Callable[[Path], object]) -> None:
    """Have alice write a checkpoint where mallory has made the file that locks the folder."""

    def plant() -> None:
        os.umask(0)
        (place / "ck").mkdir()
        make(place / "ck" / ".lock")

    assert machine.mallory.run(plant) is None
    result = machine.alice.run(lambda: checkpoint(place / "ck"))
    assert is_refused(result), result


@daily
def _a_lock_of_checkpoints_is_a_link_to_her_file(machine: Machine) -> None:
    profile = machine.alice.home / "profile"
    for kind in ("sticky", "group", "open"):
        _lock_of(machine, machine.folder(kind), lambda lock: lock.symlink_to(profile))


@attack
def _a_lock_of_checkpoints_is_a_fifo(machine: Machine) -> None:
    for kind in ("sticky", "group"):
        _lock_of(machine, machine.folder(kind), os.mkfifo)


@attack
def _a_lock_of_checkpoints_is_another_name_of_her_file(machine: Machine) -> None:
    place = machine.folder("group")
    machine.alice.run(lambda: (place / "ck").mkdir())
    os.link(machine.alice.home / "profile", place / "ck" / ".lock")  # Some systems allow it to all.
    try:
        assert is_refused(machine.alice.run(lambda: checkpoint(place / "ck")))
    finally:
        (place / "ck" / ".lock").unlink()


@attack
def _an_unfinished_checkpoint_is_a_link_to_her_home(machine: Machine) -> None:
    place = machine.folder("group")
    link(machine, place / ".unfinished-00000001", machine.alice.home / "thesis")
    result = machine.alice.run(lambda: checkpoint(place))
    assert isinstance(result, str)
    assert result.startswith("AssertionError"), result  # It was not written, and said so.


@attack
def _an_unfinished_checkpoint_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("open")
    page = renamed_private(machine, place, ".unfinished-00000009")
    assert machine.alice.run(lambda: checkpoint(place)) == ["step-00000001"]
    assert page.read_text() == "dear diary"


@attack
def _an_old_checkpoint_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("open")
    page = renamed_private(machine, place, "step-00000000")
    assert machine.alice.run(lambda: checkpoint(place)) == ["step-00000001"]
    pages = [page, *place.glob(".unfinished-*/monday/page")]
    assert [each.read_text() for each in pages if each.exists()] == ["dear diary"]


@attack
def _a_checkpoint_of_a_stranger_is_not_resumed(machine: Machine) -> None:
    place = machine.folder("open")
    assert machine.mallory.run(lambda: checkpoint(place, 7)) == ["step-00000007"]
    machine.mallory.run(lambda: (place / ".lock").unlink())
    link(machine, place / "step-00000008", place / "step-00000007")

    def newest() -> list[str]:
        with Checkpoints(str(place), SingleCommunicator()) as checkpoints:
            return checkpoints.paths()

    assert machine.alice.run(newest) == []


@daily
def _temporary_names_of_a_report_are_links(machine: Machine) -> None:
    place, profile = machine.folder("open"), machine.alice.home / "profile"

    def plant() -> None:
        for process in range(os.getpid(), os.getpid() + 50):
            os.symlink(profile, place / f"r.json.{process}.tmp")

    machine.mallory.run(plant)
    machine.alice.run(lambda: write_json(str(place / "r.json"), {"loss": 1}))
    assert json.loads((place / "r.json").read_text()) == {"loss": 1}


@attack
def _a_report_is_a_link_to_her_file(machine: Machine) -> None:
    for kind in ("sticky", "group", "open"):
        place = machine.folder(kind)
        link(machine, place / "r.json", machine.alice.home / "profile")
        machine.alice.run(lambda place=place: write_json(str(place / "r.json"), 1))  # type: ignore[misc]


@attack
def _a_report_is_a_fifo(machine: Machine) -> None:
    place = machine.folder("group")
    machine.mallory.run(lambda: os.mkfifo(place / "r.json"))
    assert machine.alice.run(lambda: write_json(str(place / "r.json"), 1)) is None
    assert json.loads((place / "r.json").read_text()) == 1


@attack
def _the_folder_of_a_report_is_a_link_to_her_home(machine: Machine) -> None:
    place = machine.folder("sticky")
    link(machine, place / "out", machine.alice.home)
    assert is_refused(machine.alice.run(lambda: write_json(str(place / "out" / "profile"), 1)))


@attack
def _an_unfinished_trace_is_a_link_or_a_strangers(machine: Machine) -> None:
    place = machine.folder("open")
    link(machine, place / "t.json.token.tmp", machine.alice.home / "profile")

    def trace() -> None:
        with SampleLedger(str(place / "t.json"), SingleCommunicator(), token="token") as ledger:
            ledger.finish()

    assert is_refused(machine.alice.run(trace))
    machine.mallory.run(lambda: os.replace(place / "t.json.token.tmp", place / "gone"))
    machine.mallory.run(lambda: (place / "t.json.token.tmp").write_text("{}"))
    assert is_refused(machine.alice.run(trace))


ATTACKS: list[Any] = [each for each in globals().values() if isinstance(each, type(pytest.param()))]
