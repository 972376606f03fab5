"""The promises of `dlio.data.reader.Reader`, each as a test.

Subclass `ReaderTests`; `make` and `expected` are required, the other hooks make more promises
testable. A data set of some dozens of samples is enough; those next to each other should differ.
"""

import pickle
import string
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.reader_contract import Reader, StoredBlocks, path_rules_of
from dlio.data.schema import Value
from dlio.errors import CorruptBlock, SourceError
from dlio.storage.block import check_block

_THREADS: Final = 4
_DEADLINE_S: Final = 60.0


class ReaderTests(ABC):
    """Tests that a reader keeps its contract."""

    @abstractmethod
    def make(self, folder: Path) -> Reader:
        """Open the data set in `folder`; write it first where it is not there yet."""

    @abstractmethod
    def expected(self) -> Sequence[Mapping[str, Value]]:
        """Field values of each sample, by sample index; fields left out are not compared."""

    def change(self, folder: Path) -> None:
        """Change the data set in `folder` so that its fingerprint must change."""
        pytest.skip("the suite's subclass has no change()")

    def damage(self, folder: Path, sample: int) -> None:
        """Make one sample in `folder` unreadable, for example by cutting off its file; the reader
        has been opened, and closed, before."""
        pytest.skip("the suite's subclass has no damage()")

    # The description of the data set.

    def test_it_has_every_attribute_and_method_of_the_protocol(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        assert isinstance(reader, Reader), f"{type(reader).__name__} lacks part of the protocol"

    def test_it_has_as_many_samples_as_were_written(self, tmp_path: Path) -> None:
        assert len(self.make(tmp_path)) == len(self.expected())

    def test_format_and_path_are_single_lines_of_text(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        for text in (reader.format, reader.path):
            assert isinstance(text, str)
            assert text.strip()
            assert "\n" not in text

    def test_sizes_are_the_bytes_of_each_payload(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        assert np.asarray(reader.sizes).dtype == np.int64
        assert reader.sizes.shape == (len(reader),)
        assert [len(payload) for payload in _read_all(reader)] == reader.sizes.tolist()

    def test_labels_index_the_classes(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        assert np.asarray(reader.labels).dtype == np.int64
        assert reader.labels.shape == (len(reader),)
        if len(reader.classes):
            assert reader.labels.min() >= 0
            assert reader.labels.max() < len(reader.classes)

    def test_names_tell_samples_apart(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        names = [reader.name(sample) for sample in range(len(reader))]
        assert all(isinstance(name, str) and name for name in names)
        assert len(set(names)) == len(names)

    def test_blocks_hold_every_sample_once(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        held = [reader.layout.samples_of(block) for block in range(reader.layout.blocks)]
        assert all(len(samples) for samples in held), "a block without samples"
        assert sorted(np.concatenate(held).tolist()) == list(range(len(reader)))

    # Payloads.

    def test_payloads_are_the_samples_that_were_written(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        self._assert_read(reader, np.arange(len(reader), dtype=np.int64))

    def test_payloads_come_in_the_order_of_the_request(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        self._assert_read(
            reader, np.random.default_rng(0).integers(0, len(reader), 3 * len(reader))
        )

    def test_a_request_for_no_samples_gives_none(self, tmp_path: Path) -> None:
        assert list(self.make(tmp_path).read(np.zeros(0, np.int64))) == []

    def test_a_block_reads_as_its_samples_do_alone(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        for block in range(reader.layout.blocks):
            samples = reader.layout.samples_of(block)
            together = [bytes(payload) for payload in reader.read(samples)]
            alone = [bytes(reader.read(samples[k : k + 1])[0]) for k in range(len(samples))]
            assert together == alone

    def test_reading_is_deterministic(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        assert _content(reader) == _content(reader)

    def test_a_payload_stays_as_it_is_when_others_are_read(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        payloads = _read_all(reader)
        before = [bytes(payload) for payload in payloads]
        reader.read(np.arange(len(reader), dtype=np.int64)[::-1].copy())
        assert [bytes(payload) for payload in payloads] == before

    def test_neighbours_in_storage_are_read_together(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        if reader.objects:
            pytest.skip("its samples are files of their own")
        samples = max(map(reader.layout.samples_of, range(reader.layout.blocks)), key=len)
        if len(samples) < 8:
            pytest.skip("its blocks have fewer than 8 samples: write more, or smaller ones")
        reader.read(samples)  # Files are open from here on.
        reads = _system_reads()
        reader.read(samples)
        reads = _system_reads() - reads
        assert reads <= len(samples) // 2, f"{reads} reads for {len(samples)} neighbours"

    def test_threads_read_at_once(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        gate = threading.Barrier(_THREADS)

        def work(part: int) -> None:
            order = np.roll(np.arange(len(reader), dtype=np.int64), part * 7)
            gate.wait(_DEADLINE_S)
            for _ in range(3):
                for k in range(len(order)):
                    self._assert_read(reader, order[k : k + 1])
                self._assert_read(reader, order)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))

    def test_a_sample_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        sample = len(reader) // 2
        named = {reader.name(sample), *(path.name for path in tmp_path.rglob("*"))}
        reader.close()
        self.damage(tmp_path, sample)
        with pytest.raises((SourceError, CorruptBlock)) as caught:
            reader.read(np.array([sample], np.int64))
        assert any(name in str(caught.value) for name in named), f"no name in: {caught.value}"

    # How long it lasts.

    def test_it_is_the_same_when_opened_again(self, tmp_path: Path) -> None:
        one, two = self.make(tmp_path), self.make(tmp_path)
        _assert_same(one, two)

    def test_it_is_the_same_in_another_process(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        try:
            copy = pickle.loads(pickle.dumps(reader))  # noqa: S301 - our own bytes
        except Exception as error:
            raise AssertionError(f"it cannot be sent to another process: {error}") from error
        _assert_same(reader, copy)
        assert _content(copy) == _content(reader)

    def test_its_fingerprint_is_32_hexadecimal_digits(self, tmp_path: Path) -> None:
        fingerprint = self.make(tmp_path).fingerprint
        assert len(fingerprint) == 32
        assert set(fingerprint) <= set(string.digits + "abcdef")

    def test_its_fingerprint_changes_with_the_data_set(self, tmp_path: Path) -> None:
        before = self.make(tmp_path).fingerprint
        self.change(tmp_path)
        assert self.make(tmp_path).fingerprint != before

    def test_reading_after_close_opens_files_again(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        before = _content(reader)
        reader.close()
        try:
            after = _content(reader)
        except Exception as error:
            raise AssertionError(f"it cannot be read after close(): {error}") from error
        assert after == before
        reader.close()

    def test_it_leaves_no_thread_behind(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        reader = self.make(tmp_path)
        _read_all(reader)
        left = [thread for thread in threading.enumerate() if thread not in before]
        assert [thread.name for thread in left if "fsspec" not in thread.name] == []
        reader.close()

    def test_it_recognises_its_own_format_only(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        recognises = getattr(type(reader), "recognises", None)
        assert recognises is not None, f"{type(reader).__name__} has no recognises()"
        stranger = tmp_path / "stranger.unknown"
        stranger.write_bytes(b"of no format\n")
        if path_rules_of(type(reader)).takes_objects:
            reason = recognises(iter(()))
        else:
            assert recognises(reader.path) is None
            reason = recognises(str(stranger))
        assert isinstance(reason, str)
        assert reason.strip()

    # Sources that hold blocks as tiers do.

    def test_stored_blocks_hold_the_samples(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        for block, stored in _stored(reader):
            try:
                info = check_block(stored, reader.path, 0)
            except CorruptBlock as error:
                raise AssertionError(f"block {block} is not as it was written: {error}") from error
            samples = reader.layout.samples_of(block)
            assert len(info) == len(samples)
            for place, payload in enumerate(reader.read(samples)):
                at = int(info.table[place]["offset"])
                held = stored[at : at + int(info.table[place]["stored"])]
                assert bytes(info.check(held, place)) == bytes(payload)

    def test_a_damaged_stored_block_is_refused(self, tmp_path: Path) -> None:
        reader = self.make(tmp_path)
        for block, stored in _stored(reader):
            assert isinstance(reader, StoredBlocks)
            reader.check_stored(block, stored)
            stored[len(stored) // 2] ^= 1
            with pytest.raises(CorruptBlock):
                reader.check_stored(block, stored)

    def _assert_read(self, reader: Reader, samples: npt.NDArray[np.int64]) -> None:
        """Read samples, and compare their values with those that were written."""
        payloads, wanted = reader.read(samples), self.expected()
        assert len(payloads) == len(samples)
        for sample, payload in zip(samples.tolist(), payloads, strict=True):
            values = reader.schema.split(payload)
            for name, value in wanted[sample].items():
                assert _plain(values[name]) == _plain(value), f"field {name!r} of sample {sample}"


def _plain(value: Value) -> object:
    """Bytes of an encoded field, lists of an array: things that compare by ==."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def _read_all(reader: Reader) -> list[bytes | memoryview]:
    return reader.read(np.arange(len(reader), dtype=np.int64))


def _content(reader: Reader) -> list[bytes]:
    return [bytes(payload) for payload in _read_all(reader)]


def _assert_same(one: Reader, two: Reader) -> None:
    """Compare all that another process must agree on."""
    assert one.fingerprint == two.fingerprint
    assert one.schema == two.schema
    assert list(one.classes) == list(two.classes)
    assert np.array_equal(one.labels, two.labels)
    assert np.array_equal(one.sizes, two.sizes)
    assert np.array_equal(one.layout.starts, two.layout.starts)
    assert one.layout.order == two.layout.order


def _system_reads() -> int:
    """System calls of this process that have read, on Linux."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        pytest.skip("this system does not count reads")
    return int(text.split("syscr: ")[1].split()[0])


def _stored(reader: Reader) -> Iterator[tuple[int, memoryview]]:
    """(block, its bytes in the source) of a source that holds blocks as tiers do."""
    if not isinstance(reader, StoredBlocks):
        pytest.skip("its source does not hold blocks as tiers do")
    for block in range(reader.layout.blocks):
        stored = memoryview(bytearray(int(reader.block_bytes[block])))
        reader.read_stored(block, stored)
        yield block, stored
