"""Slow and failing readers and tiers do as a test tells them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dlio.data.reader import Reader
from dlio.data.schema import IMAGE_LABEL
from dlio.errors import CorruptBlock, SourceError, TierFull
from dlio.storage.block import encode_block
from dlio.storage.tier_spec import TierSpec
from dlio.testing import FailingReader, FailingTier, MemoryReader, SlowReader, SlowTier
from dlio.testing.wrappers import Gate

ONE = np.array([3], np.int64)


@pytest.fixture
def memory() -> MemoryReader:
    return MemoryReader(IMAGE_LABEL, [{"image": b"%d" % k, "label": k} for k in range(8)])


def test_a_slow_reader_reads_when_it_is_let(memory: MemoryReader) -> None:
    slow = SlowReader(memory)
    assert isinstance(slow, Reader)
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(slow.read, ONE) for _ in range(2)]
        slow.gate.wait_held(2)
        assert memory.reads.sum() == 0
        slow.gate.let()
        slow.gate.open()
        assert [bytes(read.result(20)[0]) for read in reads] == [memory.payloads[3]] * 2
    assert (slow.gate.held, slow.gate.passed) == (0, 2)


def test_a_gate_that_nobody_opens_is_an_error() -> None:
    gate = Gate(deadline_s=0.01)
    with pytest.raises(TimeoutError, match="nobody opened"):
        gate.enter()
    with pytest.raises(TimeoutError, match="0 of 1 threads"):
        gate.wait_held()


def test_a_failing_reader_fails_at_its_samples(memory: MemoryReader) -> None:
    failing = FailingReader(memory, [3], times=1)
    failing.read(np.array([1, 2], np.int64))
    with pytest.raises(SourceError, match=r"memory\[3\]"):
        failing.read(ONE)
    assert bytes(failing.read(ONE)[0]) == memory.payloads[3]
    always = FailingReader(memory, [3])
    for _ in range(3):
        with pytest.raises(SourceError):
            always.read(ONE)
    assert (failing.failures, always.failures) == (1, 3)


def test_tiers_are_slow_full_or_damaged_as_told(tmp_path: Path) -> None:
    spec = TierSpec("disk", str(tmp_path), 1 << 20)
    pieces = encode_block([b"abc"], block=0, fingerprint="00" * 16, schema=IMAGE_LABEL)
    with FailingTier(spec, "data", "node") as failing:
        failing.full = frozenset([0])
        with pytest.raises(TierFull, match="block 0"):
            failing.publish(0, pieces)
        failing.full = frozenset()
        failing.publish(0, pieces)
        failing.damaged = frozenset([0])
        with pytest.raises(CorruptBlock, match="block 0"):
            failing.read(0, 0)
    with SlowTier(spec, "data", "node") as slow, ThreadPoolExecutor(1) as pool:
        read = pool.submit(slow.read, 0, 0)
        slow.gate.wait_held()
        slow.gate.open()
        assert bytes(read.result(20)) == b"abc"
