"""The reader's suite passes on readers that keep their contract, and catches each fault."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dlio.data.reader import Reader
from dlio.data.schema import Value
from dlio.errors import SourceError
from dlio.testing import ReaderTests
from dlio_readers.shard import ShardReader
from dlio_staging.pack_folder import pack
from tests.testing.faults import Fault, assert_caught, assert_complete
from tests.testing.records import RecordReader, RecordTests

Samples = npt.NDArray[np.int64]
Payloads = list[bytes | memoryview]


class TestRecords(RecordTests):
    """The reader that the faults are put into keeps every promise."""


class _LacksClasses(RecordReader):
    def __getattribute__(self, name: str) -> object:
        if name == "classes":
            raise AttributeError(name)
        return super().__getattribute__(name)


class _OneTooFew(RecordReader):
    def __len__(self) -> int:
        return super().__len__() - 1


class _PathOfTwoLines(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.format = "records\nof numbers"


class _SizesWithoutLabels(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sizes = self.sizes - 8


class _SizesOfShortIntegers(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sizes = self.sizes.astype(np.int32)


class _LabelsFromOne(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.labels = self.labels + 1


class _NamesOfTheFile(RecordReader):
    def name(self, sample: int) -> str:
        return os.path.basename(self.path)


class _LastSampleInNoBlock(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        starts = self.layout.starts.copy()
        starts[-1] -= 1
        self.layout = replace(self.layout, starts=starts)


class _BigEndian(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        return [
            bytes(payload[:8]) + np.frombuffer(payload[8:], ">f4").astype("<f4").tobytes()
            for payload in super().read(samples)
        ]


class _InStorageOrder(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        return super().read(np.sort(samples))


class _NoRequestTooSmall(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        return super().read(samples if len(samples) else np.zeros(1, np.int64))


class _RunsLoseTheirLast(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        payloads = super().read(samples)
        if len(samples) > 1 and (np.diff(samples) == 1).all():
            payloads[-1] = payloads[-2]
        return payloads


class _Counting(RecordReader):
    reads = 0

    def read(self, samples: Samples) -> Payloads:
        self.reads += 1
        return [bytes([self.reads % 256]) + payload[1:] for payload in super().read(samples)]


class _OneMemoryForAll(RecordReader):
    memory = bytearray(1 << 20)

    def read(self, samples: Samples) -> Payloads:
        payloads: Payloads = []
        at = 0
        for payload in super().read(samples):
            self.memory[at : at + len(payload)] = payload
            payloads.append(memoryview(self.memory)[at : at + len(payload)])
            at += len(payload)
        return payloads

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__


class _OneReadEach(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        return [super(_OneReadEach, self).read(samples[k : k + 1])[0] for k in range(len(samples))]


class _SharedCursor(RecordReader):
    """Where to read is kept in the reader, and read again once another thread has come by."""

    def __init__(self, path: str) -> None:
        self.asked = np.zeros(0, np.int64)
        self.inside = 0
        self.another = threading.Event()
        super().__init__(path)

    def read(self, samples: Samples) -> Payloads:
        self.asked = samples
        self.inside += 1
        if self.inside > 1:
            self.another.set()
        elif threading.current_thread() is not threading.main_thread():
            self.another.wait(5)
        self.inside -= 1
        return super().read(self.asked)


class _BareOsError(RecordReader):
    def read(self, samples: Samples) -> Payloads:
        try:
            return super().read(samples)
        except SourceError as error:
            raise SourceError("a read failed") from error


class _FingerprintOfTheMoment(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fingerprint = os.urandom(16).hex()


class _HoldsALock(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lock = threading.Lock()


class _FingerprintInCapitals(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fingerprint = "ABCDEF" + self.fingerprint[6:]


class _FingerprintOfThePath(RecordReader):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fingerprint = path.encode().hex()[-32:]


class _ClosedForGood(RecordReader):
    closed = False

    def read(self, samples: Samples) -> Payloads:
        if self.closed:
            raise ValueError("read of closed file")
        return super().read(samples)

    def close(self) -> None:
        self.closed = True


class _ReadsAhead(RecordReader):
    stop = threading.Event()

    def read(self, samples: Samples) -> Payloads:
        threading.Thread(target=self.stop.wait, args=(20,), daemon=True).start()
        return super().read(samples)


class _RecognisesAll(RecordReader):
    @classmethod
    def recognises(cls, path: str) -> str | None:
        return None


class _RecognisesNothing(RecordReader):
    @classmethod
    def recognises(cls, path: str) -> str | None:
        return "not today"


class ShardTests(ReaderTests):
    """Shards hold blocks as tiers do; `reader` may be set to a broken kind of them."""

    reader: type[ShardReader] = ShardReader

    def make(self, folder: Path) -> Reader:
        if not (folder / "packed").exists():
            RecordTests().make(folder)
            for label in ("a", "b"):
                (folder / "source" / label).mkdir(parents=True)
            for k, row in enumerate(self.expected()):
                file = folder / "source" / "ab"[k % 2] / f"{k:03d}.png"
                file.write_bytes(row["image"])
            pack(str(folder / "source"), str(folder / "packed"), order="source")
        return self.reader(str(folder / "packed"))

    def expected(self) -> Sequence[Mapping[str, Value]]:
        order = [*range(0, 40, 2), *range(1, 40, 2)]
        rows = [{"image": b"%d" % k * (300 + k), "label": k % 2} for k in order]
        return sorted(rows, key=lambda row: (row["label"], row["image"]))


class _OffByOneBlock(ShardReader):
    def read_stored(self, block: int, into: memoryview, at: int = 0) -> None:
        super().read_stored(block, into, at)
        middle = len(into) * 2 // 3
        into[middle : middle + 1] = bytes([into[middle] ^ 1])


class _ChecksNothing(ShardReader):
    def check_stored(self, block: int, stored: memoryview) -> None:
        pass


def _records(broken: type[RecordReader]) -> type[RecordTests]:
    return type(broken.__name__, (RecordTests,), {"reader": broken})


def _shards(broken: type[ShardReader]) -> type[ShardTests]:
    return type(broken.__name__, (ShardTests,), {"reader": broken})


FAULTS = [
    Fault("test_it_has_every_attribute_and_method_of_the_protocol", _records(_LacksClasses)),
    Fault("test_it_has_as_many_samples_as_were_written", _records(_OneTooFew)),
    Fault("test_format_and_path_are_single_lines_of_text", _records(_PathOfTwoLines)),
    Fault("test_sizes_are_the_bytes_of_each_payload", _records(_SizesWithoutLabels)),
    Fault("test_sizes_are_the_bytes_of_each_payload", _records(_SizesOfShortIntegers)),
    Fault("test_labels_index_the_classes", _records(_LabelsFromOne)),
    Fault("test_names_tell_samples_apart", _records(_NamesOfTheFile)),
    Fault("test_blocks_hold_every_sample_once", _records(_LastSampleInNoBlock)),
    Fault("test_payloads_are_the_samples_that_were_written", _records(_BigEndian)),
    Fault("test_payloads_come_in_the_order_of_the_request", _records(_InStorageOrder)),
    Fault("test_a_request_for_no_samples_gives_none", _records(_NoRequestTooSmall)),
    Fault("test_a_block_reads_as_its_samples_do_alone", _records(_RunsLoseTheirLast)),
    Fault("test_reading_is_deterministic", _records(_Counting)),
    Fault("test_a_payload_stays_as_it_is_when_others_are_read", _records(_OneMemoryForAll)),
    Fault("test_neighbours_in_storage_are_read_together", _records(_OneReadEach)),
    Fault("test_threads_read_at_once", _records(_SharedCursor)),
    Fault("test_a_sample_that_cannot_be_read_is_named", _records(_BareOsError)),
    Fault("test_it_is_the_same_when_opened_again", _records(_FingerprintOfTheMoment)),
    Fault("test_it_is_the_same_in_another_process", _records(_HoldsALock)),
    Fault("test_its_fingerprint_is_32_hexadecimal_digits", _records(_FingerprintInCapitals)),
    Fault("test_its_fingerprint_changes_with_the_data_set", _records(_FingerprintOfThePath)),
    Fault("test_reading_after_close_opens_files_again", _records(_ClosedForGood)),
    Fault("test_it_leaves_no_thread_behind", _records(_ReadsAhead)),
    Fault("test_it_recognises_its_own_format_only", _records(_RecognisesAll)),
    Fault("test_it_recognises_its_own_format_only", _records(_RecognisesNothing)),
    Fault("test_stored_blocks_hold_the_samples", _shards(_OffByOneBlock)),
    Fault("test_a_damaged_stored_block_is_refused", _shards(_ChecksNothing)),
]


@pytest.fixture(autouse=True)
def _cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    _ReadsAhead.stop.clear()
    yield
    _ReadsAhead.stop.set()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_catches(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


def test_each_promise_has_a_fault() -> None:
    assert_complete(ReaderTests, FAULTS)
