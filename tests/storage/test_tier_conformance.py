"""The conformance suite of tiers, on disk and in shared memory."""

import secrets
from pathlib import Path

from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.testing import TierTests
from dlio.testing.tier_suite import FINGERPRINT
from dlio.util.shared_folders import SHARED_MEMORY


class TestDisk(TierTests):
    def make(self, folder: Path, fingerprint: str | None = FINGERPRINT) -> Tier:
        spec = TierSpec("disk", str(folder), 1 << 20)
        return Tier(spec, "data", "node", fingerprint=fingerprint)


class TestRam(TierTests):
    persistent = False

    def make(self, folder: Path, fingerprint: str | None = FINGERPRINT) -> Tier:
        # Named after the test's folder, so that concurrent tests have tiers of their own.
        name = folder / "job"
        if not name.exists():
            name.write_text(f"test-{secrets.token_hex(4)}")
        spec = TierSpec("ram", SHARED_MEMORY, 1 << 20)
        return Tier(spec, name.read_text(), fingerprint=fingerprint)
