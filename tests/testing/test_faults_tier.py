"""The tier's suite catches each fault of a tier."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlio.data.schema import Buffer
from dlio.errors import CorruptBlock, TierFull
from dlio.storage.block import BlockInfo, PayloadScratch
from dlio.storage.tier import Tier
from dlio.storage.tier_spec import TierSpec
from dlio.testing import TierTests
from dlio.testing.tier_suite import FINGERPRINT
from tests.testing.faults import Fault, assert_caught, assert_complete


class _ForgetsBlocks(Tier):
    def blocks(self) -> set[int]:
        return set()


class _OffByOnePlace(Tier):
    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        return super().read(block, max(0, place - 1), scratch)


class _FirstPieceOnly(Tier):
    def read_into(self, block: int, place: int, pieces: Sequence[memoryview]) -> None:
        payload = super().read(block, place)
        pieces[0][:] = payload[: len(pieces[0])]


class _DigestOfNothing(Tier):
    def read_stored(self, block: int, place: int, into: memoryview) -> tuple[int, int]:
        return super().read_stored(block, place, into)[0], 0


class _WithoutItsEnd(Tier):
    def read_whole(self, block: int) -> memoryview:
        return super().read_whole(block)[:-1]


class _DigestOfTheNumber(Tier):
    def digest(self, block: int) -> int:
        return block


class _ReadsNothingThere(Tier):
    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        return super().read(block, place, scratch) if self.has(block) else memoryview(b"")


class _OwnBlocksOnly(Tier):
    def __init__(self, spec: TierSpec, *names: str, fingerprint: str | None = None) -> None:
        self.own: set[int] = set()
        super().__init__(spec, *names, fingerprint=fingerprint)

    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        super().publish(block, pieces)
        self.own.add(block)

    def has(self, block: int) -> bool:
        return block in self.own


class _CountsBlocks(Tier):
    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        hits = self.hits
        payload = super().read(block, place, scratch)
        self.hits = max(hits, 1)
        return payload


class _BelongsToOneThread(Tier):
    """Blocks of every thread but the first to publish are lost."""

    thread: int | None = None

    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        if self.thread is None:
            self.thread = threading.get_ident()
        if self.thread == threading.get_ident():
            super().publish(block, pieces)


class _LeavesHalfABlock(Tier):
    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        try:
            super().publish(block, pieces)
        except TierFull:
            (Path(self.path) / f"{block:08d}.blk").write_bytes(b"half")
            raise


class _FullSomewhere(Tier):
    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        try:
            super().publish(block, pieces)
        except TierFull as error:
            raise TierFull("no space left on device") from error


class _Unchecked(Tier):
    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        with self._opened(block) as (descriptor, info, _):
            return info.read(descriptor, place, scratch, checked=False)


class _CheckReadsTheTableOnly(Tier):
    def check(self, block: int) -> BlockInfo:
        with self._opened(block) as (_, info, _):
            return info


class _BelievesNames(Tier):
    def read(self, block: int, place: int, scratch: PayloadScratch | None = None) -> memoryview:
        try:
            return super().read(block, place, scratch)
        except CorruptBlock:
            return memoryview(b"whatever")


class _DiscardsTwiceWithAnError(Tier):
    def discard(self, block: int) -> None:
        pass


class _ForAll(Tier):
    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        super().publish(block, pieces)
        os.chmod(Path(self.path) / f"{block:08d}.blk", 0o644)


class _ClaimsForThreads(Tier):
    def claim(self, block: int) -> bool:
        if block in self._claimed:
            return False
        self._claimed.add(block)
        return True


class _NeverReleases(Tier):
    def release(self, block: int) -> None:
        pass


class _ClaimsByAFile(Tier):
    def claim(self, block: int) -> bool:
        path = Path(self.path) / f"{block}.claim"
        if path.exists():
            return False
        path.write_bytes(b"")
        return True


class _LeavesLeftovers(Tier):
    def _remove_leftovers(self) -> None:
        pass


class _TakesItsBlocksAlong(Tier):
    def close(self) -> None:
        for name in os.listdir(self.path) if self.folder >= 0 else []:
            if name.endswith(".blk"):
                os.unlink(Path(self.path) / name)
        super().close()


class _ClosesOnce(Tier):
    def close(self) -> None:
        if self.folder < 0:
            raise ValueError("closed already")
        super().close()


class _KeepsFilesOpen(Tier):
    def publish(self, block: int, pieces: Sequence[Buffer]) -> None:
        super().publish(block, pieces)
        os.open(Path(self.path) / f"{block:08d}.blk", os.O_RDONLY | os.O_CLOEXEC)


class _RoomWithoutEnd(Tier):
    def free_bytes(self) -> int:
        return 1 << 62


def _of(broken: type[Tier]) -> type[TierTests]:
    def make(self: TierTests, folder: Path, fingerprint: str | None = FINGERPRINT) -> Tier:
        return broken(TierSpec("disk", str(folder), 1 << 20), "d", "n", fingerprint=fingerprint)

    return type(broken.__name__, (TierTests,), {"make": make})


FAULTS = [
    Fault("test_a_published_block_is_there", _of(_ForgetsBlocks)),
    Fault("test_payloads_are_read_as_they_were_written", _of(_OffByOnePlace)),
    Fault("test_payloads_are_read_into_pieces_one_after_another", _of(_FirstPieceOnly)),
    Fault("test_stored_bytes_come_with_length_and_digest", _of(_DigestOfNothing)),
    Fault("test_a_whole_block_is_read_as_it_was_written", _of(_WithoutItsEnd)),
    Fault("test_equal_blocks_have_equal_digests", _of(_DigestOfTheNumber)),
    Fault("test_a_block_that_is_not_there_is_not_found", _of(_ReadsNothingThere)),
    Fault("test_other_processes_of_the_node_see_the_block", _of(_OwnBlocksOnly)),
    Fault("test_samples_that_were_read_are_counted", _of(_CountsBlocks)),
    Fault("test_threads_publish_and_read_at_once", _of(_BelongsToOneThread)),
    Fault("test_a_block_appears_whole_or_not_at_all", _of(_LeavesHalfABlock)),
    Fault("test_a_full_tier_is_named_in_the_error", _of(_FullSomewhere)),
    Fault("test_a_flipped_bit_is_an_error", _of(_Unchecked)),
    Fault("test_a_flipped_bit_is_an_error", _of(_CheckReadsTheTableOnly)),
    Fault("test_a_block_under_a_wrong_number_is_refused", _of(_BelievesNames)),
    Fault("test_a_block_of_another_data_set_is_refused", _of(_BelievesNames)),
    Fault("test_a_discarded_block_can_be_filled_again", _of(_DiscardsTwiceWithAnError)),
    Fault("test_its_folder_is_private", _of(_ForAll)),
    Fault("test_one_process_at_a_time_claims_a_block", _of(_ClaimsForThreads)),
    Fault("test_a_released_block_can_be_claimed", _of(_NeverReleases)),
    Fault("test_a_claim_ends_with_its_process", _of(_ClaimsByAFile)),
    Fault("test_a_dead_writers_temporary_file_is_removed", _of(_LeavesLeftovers)),
    Fault("test_blocks_outlive_the_process_on_disks_only", _of(_TakesItsBlocksAlong)),
    Fault("test_closing_twice_is_harmless", _of(_ClosesOnce)),
    Fault("test_closing_gives_descriptors_back", _of(_KeepsFilesOpen)),
    Fault("test_it_knows_the_room_that_is_left", _of(_RoomWithoutEnd)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


def test_each_promise_has_a_fault() -> None:
    assert_complete(TierTests, FAULTS)
