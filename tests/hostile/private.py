"""Attacks on alice's tiers, caches and temporary folders."""

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.data.schema import IMAGE_LABEL
from dlio.launch.job_folder import PREFIX
from dlio.storage.block import encode_block
from dlio.storage.inventory import evict, stored_data
from dlio.storage.manifest import NAME, Manifest, write_manifest
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.train.sample_ledger import SampleLedger
from dlio.util.folders import remove_if_unheld
from dlio.util.shared_folders import SHARED_MEMORY, SharedFolder, own_memory
from dlio.util.user_folders import open_folder
from dlio.util.whole_files import write_json
from dlio_staging.manage import EvictOptions, StatusOptions, evict_command, find_roots, status
from dlio_staging.pack_folder import pack
from dlio_staging.verify import verify
from tests.hostile.commands import (
    DATA_SET,
    attack,
    checkpoint,
    daily,
    fill_tier,
    is_refused,
    labels,
    link,
    renamed_private,
)
from tests.hostile.drawn_attacks import PLANTS
from tests.hostile.optional import feature
from tests.hostile.users import Machine


def _tier_name(machine: Machine) -> str:
    return f"dlio-{machine.alice.uid}"


@attack
def _her_folder_of_a_tier_is_a_link_to_her_home(machine: Machine) -> None:
    place = machine.folder("sticky")
    link(machine, place / _tier_name(machine), machine.alice.home)
    assert is_refused(machine.alice.run(lambda: fill_tier(place)))
    assert machine.alice.run(lambda: _evict_all(place)) is None


@attack
def _her_folder_of_a_tier_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("open")
    page = renamed_private(machine, place, _tier_name(machine))
    before = sorted(os.listdir(page.parent.parent))
    assert is_refused(machine.alice.run(lambda: fill_tier(place)))
    machine.alice.run(lambda: _evict_all(place))
    machine.alice.run(lambda: evict(str(place), "monday"))
    assert page.read_text() == "dear diary"
    assert sorted(os.listdir(page.parent.parent)) == before


def _evict_all(root: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        evict_command(EvictOptions(everything=True, tiers=str(root)))
        evict_command(EvictOptions(job="1", tiers=str(root)))


@daily
# SECURITY.md: S13
def _a_tier_of_a_stranger_is_not_believed(machine: Machine) -> None:
    place = machine.folder("sticky")

    def plant() -> None:
        os.umask(0)
        inside = place / _tier_name(machine) / DATA_SET
        inside.mkdir(parents=True)
        (inside.parent / ".dlio").write_text("dlio\n")
        (inside / ".dlio").write_text("dlio\n")
        os.mkfifo(inside / "about.json")
        os.mkfifo(inside / "hits")
        (inside / "lease.1.1.\x1b[2J").write_text("{}")

    assert machine.mallory.run(plant) is None

    def look() -> list[object]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            status(StatusOptions(tiers=str(place)))
        os.chdir(place)
        return [len(stored_data(str(place))), str(place) in find_roots(None), text.getvalue()]

    count, usual, text = machine.alice.run(look)
    assert (count, usual) == (0, False)
    assert text.isprintable() or "\x1b" not in text
    assert machine.alice.run(lambda: _evict_all(place)) is None


@attack
def _a_tier_of_a_stranger_is_not_healed_from_where_it_says(machine: Machine) -> None:
    place = machine.folder("group")

    def plant() -> str:
        path = Path(fill_tier(place))
        about = {"source": "http://127.0.0.1:9/x", "format": "folder", "fingerprint": DATA_SET}
        both = np.array([0, 1], np.uint64)
        (path / NAME).write_bytes(Manifest(about, both, both).encode())
        for folder in (path, *path.parents[:2]):
            folder.chmod(0o755)
        for file in path.iterdir():
            file.chmod(0o644)
        os.mkfifo(path / "00000007.blk", 0o666)
        (path / "00000008.blk").symlink_to("/dev/zero")
        return str(path)

    path = machine.mallory.run(plant)
    result = machine.alice.run(lambda: verify(path, heal=True).healed)
    assert is_refused(result), result
    assert "your own" in result
    damaged = machine.alice.run(lambda: verify(path).damaged)
    assert sum("not a regular file" in line for line in damaged) == 2, damaged
    place.chmod(0o1777)
    for heal in (False, True):
        assert is_refused(machine.alice.run(lambda heal=heal: verify(path, heal=heal).healed))  # type: ignore[misc]


@attack
def _a_tier_is_swapped_while_it_is_filled(machine: Machine) -> None:
    place = machine.folder("open")
    (place / "tier").mkdir()
    (place / "tier").chmod(0o777)

    def fill() -> list[str]:
        thesis = machine.alice.home / "thesis"
        with Tier(TierSpec("disk", str(place / "tier"), 1 << 20), DATA_SET, "node") as tier:
            os.rename(place / "tier", place / "taken")  # As mallory could at this time.
            os.symlink(thesis, place / "tier")
            pieces = encode_block([b"x"], block=0, fingerprint=DATA_SET, schema=IMAGE_LABEL)
            tier.publish(0, pieces)
            none = np.zeros(0, np.uint64)
            write_manifest(tier.folder, Manifest({}, none, none))
            return sorted(os.listdir(tier.folder))

    assert machine.alice.run(fill) == ["00000000.blk", "claims", "manifest"]


@attack
# SECURITY.md: S16
def _her_folder_in_shared_memory_is_a_strangers(machine: Machine) -> None:
    path = Path(SHARED_MEMORY, _tier_name(machine))
    machine.mallory.run(lambda: path.mkdir(mode=0o777))

    def use() -> list[bool]:
        with SharedFolder("data") as one, SharedFolder("data") as other:
            same = os.path.samestat(os.fstat(one.descriptor), os.fstat(other.descriptor))
            parent = os.stat(os.path.dirname(one.path))
            mine = parent.st_uid == os.geteuid() and not parent.st_mode & 0o077
            return [same, mine, one.path.startswith(own_memory())]

    try:
        assert machine.alice.run(use) == [True, True, True]
        assert os.listdir(path) == []
        assert machine.alice.run(lambda: os.path.exists(own_memory())) is True  # The stranger's.
        assert not list(Path(SHARED_MEMORY).glob(f"{path.name}-*"))
    finally:
        path.rmdir()


@attack
# SECURITY.md: S4
def _an_index_of_a_stranger_is_not_believed(machine: Machine) -> None:
    place = machine.folder("sticky")

    def forge() -> None:
        os.umask(0)
        os.environ["DLIO_CACHE"] = str(place / "cache")
        open_reader(str(machine.data)).close()
        for array in (place / "cache").rglob("*.npy"):
            array.write_bytes(array.read_bytes()[::-1])
        for path in (place / "cache", *(place / "cache").rglob("*")):
            path.chmod(0o777)

    assert machine.mallory.run(forge) is None
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def read() -> list[int]:
        os.environ["DLIO_CACHE"] = str(place / "cache")
        return labels(machine.data)

    assert machine.alice.run(read) == labels(machine.data)
    assert {path: path.read_bytes() for path in before} == before


@attack
def _the_cache_is_a_link_to_her_home(machine: Machine) -> None:
    place = machine.folder("sticky")
    link(machine, place / "cache", machine.alice.home / "thesis")

    def read() -> list[int]:
        os.environ["DLIO_CACHE"] = str(place / "cache")
        return labels(machine.data)

    assert machine.alice.run(read) == labels(machine.data)


@attack
# SECURITY.md: S19
def _a_cache_that_the_group_shares_is_private_to_each(machine: Machine) -> None:
    place = machine.folder("group")

    def read() -> list[int]:
        os.environ["DLIO_CACHE"] = str(place)
        return labels(machine.data)

    for user in (machine.alice, machine.mallory):
        assert user.run(read) == labels(machine.data)
    names = [f"dlio-{user.uid}" for user in (machine.alice, machine.mallory)]
    assert sorted(os.listdir(place)) == sorted(names)


@attack
# SECURITY.md: S14
def _nothing_that_she_writes_without_a_umask_can_be_changed(machine: Machine) -> None:
    place = machine.alice.home / ".cache" / "free"

    def work() -> None:
        place.mkdir(parents=True, mode=0o755)
        os.environ["DLIO_CACHE"] = str(place / "a" / "cache")
        for format_ in ("native", "tar"):
            pack(str(machine.data), str(place / format_), format=format_)
        fill_tier(place)
        checkpoint(place / "ck")
        write_json(str(place / "r.json"), 1)
        with SampleLedger(str(place / "t.json"), SingleCommunicator()) as ledger:
            ledger.finish()

    assert machine.alice.run(work, umask=0) is None
    paths = [place, *place.rglob("*")]
    assert len(paths) > 20
    assert [path for path in paths if path.lstat().st_mode & 0o002] == []


@daily
# SECURITY.md: S13
def _compiled_code_of_a_stranger_is_not_run(machine: Machine) -> None:
    use = feature("compilation.compiled_model").use_private_cache
    name = "torchinductor_alice"

    def folder(place: Path) -> str:
        tempfile.tempdir, os.environ["LOGNAME"] = str(place), "alice"
        assert default_cache_dir() == str(place / name)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        use()
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")

    private = str(machine.alice.home / ".cache" / "dlio" / "torchinductor")
    for plant in ("none", "folder", "link home", "file"):
        place = machine.folder("sticky")
        if plant != "none":
            machine.mallory.run(lambda: PLANTS[plant](place / name, machine))  # noqa: B023
        assert machine.alice.run(lambda: folder(place)) == ("" if plant == "none" else private)  # noqa: B023
    free = machine.folder("open")
    assert machine.alice.run(lambda: folder(free)) == private


@attack
def _a_folder_of_a_dead_job_is_her_own_renamed_folder(machine: Machine) -> None:
    place = machine.folder("open")
    page = renamed_private(machine, place, f"{PREFIX}1")

    def sweep() -> bool:
        above = open_folder(str(place))
        return remove_if_unheld(above, f"{PREFIX}1", "alive")

    assert machine.alice.run(sweep) is False
    assert page.read_text() == "dear diary"
    assert not (page.parent.parent / "alive").exists()


ATTACKS: list[Any] = [each for each in globals().values() if isinstance(each, type(pytest.param()))]
