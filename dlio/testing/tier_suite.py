"""The promises of `dlio.storage.tier.Tier`, each as a test.

Subclass `TierTests` and give `make`. Two tiers that `make` opens in the same folder stand for two
processes of one node.
"""

import os
import resource
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from dlio.data.schema import IMAGE_LABEL, Buffer
from dlio.errors import CorruptBlock, TierFull
from dlio.storage.block import encode_block
from dlio.storage.tier import Tier

FINGERPRINT: Final = "00" * 16
_THREADS: Final = 4
_DEADLINE_S: Final = 60.0
_SAMPLES: Final = 5


class TierTests(ABC):
    """Tests that a tier keeps its contract."""

    persistent = True
    """True if blocks outlive the last process that has the tier open, as on a disk."""

    @abstractmethod
    def make(self, folder: Path, fingerprint: str | None = FINGERPRINT) -> Tier:
        """Open the tier of a data set below `folder`, with at least 1 MiB of capacity."""

    def flip(self, tier: Tier, block: int) -> None:
        """Flip a bit in the last payload of a published block, behind the tier's back."""
        path = _file_of(tier, block)
        data = bytearray(path.read_bytes())
        data[-20] ^= 4
        path.write_bytes(data)

    # Published blocks can be read.

    def test_a_published_block_is_there(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            assert not tier.has(3)
            tier.publish(3, _pieces(3))
            assert tier.has(3)
            assert tier.blocks() == {3}

    def test_payloads_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            for place in range(_SAMPLES):
                assert bytes(tier.read(3, place)) == _payload(3, place)

    def test_payloads_are_read_into_pieces_one_after_another(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            whole = _payload(3, 2)
            memory = memoryview(bytearray(len(whole)))
            tier.read_into(3, 2, [memory[:10], memory[10:]])
            assert bytes(memory) == whole

    def test_stored_bytes_come_with_length_and_digest(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            into = memoryview(bytearray(len(_payload(3, 2))))
            stored, digest = tier.read_stored(3, 2, into)
            info = tier.check(3)
            assert (stored, digest) == (int(info.table[2]["stored"]), int(info.table[2]["xxh3"]))
            assert bytes(info.check(into[:stored], 2)) == _payload(3, 2)

    def test_a_whole_block_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            assert bytes(tier.read_whole(3)) == b"".join(bytes(piece) for piece in _pieces(3))

    def test_equal_blocks_have_equal_digests(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            before = tier.digest(3)
            tier.discard(3)
            tier.publish(3, _pieces(3, size=101))
            assert tier.digest(3) != before
            tier.discard(3)
            tier.publish(3, _pieces(3))
            assert tier.digest(3) == before

    def test_a_block_that_is_not_there_is_not_found(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            into = memoryview(bytearray(1))
            for read in (
                lambda: tier.read(4, 0),
                lambda: tier.read_into(4, 0, [into]),
                lambda: tier.read_stored(4, 0, into),
                lambda: tier.read_whole(4),
                lambda: tier.check(4),
            ):
                with pytest.raises(FileNotFoundError):
                    read()

    def test_other_processes_of_the_node_see_the_block(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier, self.make(tmp_path) as other:
            tier.publish(3, _pieces(3))
            assert other.has(3), "the other process does not see the block"
            assert bytes(other.read(3, 2)) == _payload(3, 2)

    def test_samples_that_were_read_are_counted(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
            for place in range(3):
                tier.read(3, place)
            assert tier.hits == 3

    def test_threads_publish_and_read_at_once(self, tmp_path: Path) -> None:
        gate = threading.Barrier(_THREADS)

        def publish(part: int) -> None:
            gate.wait(_DEADLINE_S)
            for block in range(part, 40, _THREADS):
                tier.publish(block, _pieces(block))

        def read(part: int) -> None:
            gate.wait(_DEADLINE_S)
            for block in np.roll(np.arange(40), part).tolist():
                for place in range(_SAMPLES):
                    assert bytes(tier.read(block, place)) == _payload(block, place)

        with self.make(tmp_path) as tier, ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(publish, range(_THREADS)))
            assert tier.blocks() == set(range(40))
            list(pool.map(read, range(_THREADS)))

    # Nothing half, nothing damaged, nothing of a stranger's.

    def test_a_block_appears_whole_or_not_at_all(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            before = set(os.listdir(tier.path))
            with _file_limit(5000), pytest.raises(TierFull):
                tier.publish(1, _pieces(1, size=2000))
            assert tier.blocks() == set()
            assert set(os.listdir(tier.path)) == before

    def test_a_full_tier_is_named_in_the_error(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            with _file_limit(5000), pytest.raises(TierFull) as caught:
                tier.publish(1, _pieces(1, size=2000))
            assert tier.path in str(caught.value)
            assert "block 1" in str(caught.value)

    def test_a_flipped_bit_is_an_error(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(0, _pieces(0))
            self.flip(tier, 0)
            assert bytes(tier.read(0, 0)) == _payload(0, 0)
            last = _SAMPLES - 1
            into = memoryview(bytearray(len(_payload(0, last))))
            for read in (
                lambda: tier.read(0, last),
                lambda: tier.read_into(0, last, [into]),
                lambda: tier.read_whole(0),
                lambda: tier.check(0),
            ):
                with pytest.raises(CorruptBlock):
                    read()

    def test_a_block_under_a_wrong_number_is_refused(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(0, _pieces(0))
            _file_of(tier, 0).rename(_file_of(tier, 1))
            with pytest.raises(CorruptBlock):
                tier.read(1, 0)

    def test_a_block_of_another_data_set_is_refused(self, tmp_path: Path) -> None:
        with self.make(tmp_path, None) as tier, self.make(tmp_path, "11" * 16) as other:
            tier.publish(0, _pieces(0))
            with pytest.raises(CorruptBlock):
                other.read(0, 0)

    def test_a_discarded_block_can_be_filled_again(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(0, _pieces(0))
            tier.read(0, 0)
            tier.discard(0)
            assert not tier.has(0)
            tier.discard(0)  # Once more: another process may have been faster.
            tier.publish(0, _pieces(0, size=50))
            assert bytes(tier.read(0, 1)) == _payload(0, 1, size=50)

    def test_its_folder_is_private(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(0, _pieces(0))
            for path in (Path(tier.path), *Path(tier.path).iterdir()):
                assert path.stat().st_mode & 0o077 == 0, f"others can open {path}"

    # One process fills a block.

    def test_one_process_at_a_time_claims_a_block(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier, self.make(tmp_path) as other:
            assert tier.claim(5)
            assert not tier.claim(5)
            assert not other.claim(5)
            assert other.claim(6)

    def test_a_released_block_can_be_claimed(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier, self.make(tmp_path) as other:
            assert tier.claim(5)
            tier.release(5)
            assert other.claim(5)

    def test_a_claim_ends_with_its_process(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as other:
            with self.make(tmp_path) as tier:
                assert tier.claim(5)
            assert other.claim(5)

    def test_a_dead_writers_temporary_file_is_removed(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            left = Path(tier.path) / "tmp.00000009.1.1"
            left.write_bytes(b"half")
            assert tier.claim(9)
            self.make(tmp_path).close()
            assert left.exists(), "the file of a living writer was removed"
            tier.release(9)
            self.make(tmp_path).close()
            assert not left.exists(), "the file of a dead writer stays for ever"

    # Opening and closing.

    def test_blocks_outlive_the_process_on_disks_only(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            tier.publish(3, _pieces(3))
        with self.make(tmp_path) as again:
            assert again.has(3) == self.persistent

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close()
        try:
            tier.close()
        except Exception as error:
            raise AssertionError(f"the second close() raised {error!r}") from error

    def test_closing_gives_descriptors_back(self, tmp_path: Path) -> None:
        self.make(tmp_path).close()
        before = len(os.listdir("/proc/self/fd"))
        with self.make(tmp_path) as tier:
            for block in range(50):
                tier.publish(block, _pieces(block))
                tier.read(block, 0)
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_it_knows_the_room_that_is_left(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as tier:
            status = os.statvfs(tier.path)
            assert 0 <= tier.free_bytes() <= status.f_blocks * status.f_frsize
            assert tier.free_bytes() > 0


def _payload(block: int, place: int, size: int = 100) -> bytes:
    return bytes([block + 1, place]) * size


def _pieces(block: int, size: int = 100) -> list[Buffer]:
    payloads = [_payload(block, place, size) for place in range(_SAMPLES)]
    return encode_block(payloads, block=block, fingerprint=FINGERPRINT, schema=IMAGE_LABEL)


def _file_of(tier: Tier, block: int) -> Path:
    return Path(tier.path) / f"{block:08d}.blk"


@contextmanager
def _file_limit(count: int) -> Iterator[None]:
    """A disk that has room for files of `count` bytes and no more, within a `with`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
