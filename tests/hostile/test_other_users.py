"""Attacks of another user of the machine: mallory plants, alice works, and nothing of hers changes.

Both are real users. Each attack is one function, which takes the machine, and asserts what alice's
command did; that her home has not changed is checked for all of them.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlio_staging.manage import StatusOptions, status
from dlio_staging.verify import verify
from tests.hostile import drawn_attacks, group_attacks, outputs, private
from tests.hostile.commands import Attack, checkpoint, fill_tier, packs
from tests.hostile.deeds import DAILY, DEEDS, load_commands
from tests.hostile.users import Machine, two_users

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None,
    reason="makes two users of the machine: needs root and useradd",
)
ATTACKS = [*outputs.ATTACKS, *private.ATTACKS, *group_attacks.ATTACKS, *drawn_attacks.ATTACKS]


@pytest.fixture(scope="module")
def machine(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    """The machine. What the attacks import is loaded: users cannot read the interpreter."""
    place = tmp_path_factory.mktemp("loaded")
    packs(pictures, place / "packed")
    checkpoint(place / "ck")
    fill_tier(place, 0)
    verify(str(place))
    names = DEEDS if request.config.getoption("--nightly") else DAILY
    load_commands(tmp_path_factory.mktemp("commands"), pictures, names)
    with contextlib.redirect_stdout(io.StringIO()):
        status(StatusOptions(tiers=str(place)))
    with two_users(pictures) as both:
        yield both


@pytest.mark.parametrize("act", ATTACKS)
# SECURITY.md: S10
def test_another_user_changes_nothing_and_is_not_believed(machine: Machine, act: Attack) -> None:
    before = machine.belongings()
    act(machine)
    assert machine.belongings() == before


def test_there_are_attacks_enough() -> None:
    assert len(ATTACKS) >= 400
