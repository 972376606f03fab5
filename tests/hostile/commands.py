"""Short forms of what alice does, and of what mallory plants, for the attacks."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlio.comm.single import SingleCommunicator
from dlio.data.reader import open_reader
from dlio.data.schema import IMAGE_LABEL
from dlio.storage.block import encode_block
from dlio.storage.inventory import DatasetUse
from dlio.storage.manifest import Manifest, write_manifest
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from dlio_staging.pack_folder import pack
from tests.hostile.users import Machine

Attack = Callable[[Machine], None]
DATA_SET = "f" * 32


def attack(act: Attack) -> Any:
    """Make a parameter of an attack, for the nightly tests."""
    return pytest.param(act, id=act.__name__.strip("_"), marks=pytest.mark.nightly)


def daily(act: Attack) -> Any:
    """Make a parameter of an attack, for the daily tests, too."""
    return pytest.param(act, id=act.__name__.strip("_"))


def packs(data: Path, destination: Path) -> int:
    return pack(str(data), str(destination), workers=1, shard_bytes=1 << 14).samples


def labels(path: Path) -> list[int]:
    with contextlib.closing(open_reader(str(path))) as reader:
        return sorted(reader.labels.tolist())


def checkpoint(folder: Path, step: int = 1) -> list[str]:
    with Checkpoints(str(folder), SingleCommunicator(), keep=1) as checkpoints:
        checkpoints.save(step, {"rank0/x": torch.arange(3.0)}, {})
        checkpoints.wait()
        assert not checkpoints.failures, checkpoints.failures
        return checkpoints.written


def fill_tier(root: Path, block: int = 0) -> str:
    """Put a block and a manifest into a tier; returns the path of the blocks."""
    pieces = encode_block([b"x" * 9], block=block, fingerprint=DATA_SET, schema=IMAGE_LABEL)
    with (
        contextlib.closing(DatasetUse(str(root), DATA_SET, {"source": "/nowhere"})),
        Tier(TierSpec("disk", str(root), 1 << 20), DATA_SET, "node") as tier,
    ):
        tier.publish(block, pieces)
        about = {"source": "/nowhere", "format": "folder", "fingerprint": DATA_SET}
        numbers = np.array([block], np.uint64)
        write_manifest(tier.folder, Manifest(about, numbers, numbers))
        return tier.path


def is_refused(result: object) -> bool:
    """True for an error that users can act on."""
    kinds = ("UsageError", "TierError", "SourceError", "CorruptBlock")
    return isinstance(result, str) and result.startswith(kinds)


def link(machine: Machine, path: Path, to: Path) -> None:
    machine.mallory.run(lambda: os.symlink(to, path))
    assert path.is_symlink()


def renamed_private(machine: Machine, place: Path, name: str) -> Path:
    """A private folder of alice's, which mallory has given another name."""

    def make() -> None:
        (place / "diary").mkdir(mode=0o700)
        (place / "diary" / "monday").mkdir(mode=0o700)
        (place / "diary" / "monday" / "page").write_text("dear diary")

    machine.alice.run(make)
    machine.mallory.run(lambda: os.rename(place / "diary", place / name))
    return place / name / "monday" / "page"
